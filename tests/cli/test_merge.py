from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment
from tests.storage.rows import FINGERPRINT, REPOSITORY, make_sample, write_output


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "managed_cli", "merge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment())


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [
        write_output(
            tmp_path / f"part-{number}.parquet",
            [make_sample(index, choices=2) for index in range(number, 9, 3)],
            fingerprint={**FINGERPRINT, "part": f"{number + 1}/3"},
        )
        for number in range(3)
    ]


def test_people_are_told_what_was_merged_and_how_to_look_at_it(tmp_path: Path, parts: list[Path]) -> None:
    out = tmp_path / "all.parquet"
    done = merge(*parts, "--out", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        f"merged 3 parts: 18 rows of 9 samples in {out}; look at them with: managed-cli inspect {out}\n"
    )


def test_scripts_get_one_json_document(tmp_path: Path, parts: list[Path]) -> None:
    done = merge(*parts, "--out", f"{tmp_path}/all/", "--json")
    document = json.loads(done.stdout)
    assert (document["rows"], document["samples"], document["failed_samples"]) == (18, 9, 0)
    assert [part["rows"] for part in document["parts"]] == [6, 6, 6]
    assert document["out"] == str(tmp_path / "all")


def test_parts_of_different_runs_end_with_exit_code_6_and_their_differences(tmp_path: Path, parts: list[Path]) -> None:
    other = write_output(tmp_path / "x.parquet", [make_sample(20)], fingerprint={**FINGERPRINT, "seed": 8})
    done = merge(*parts, other, "--out", tmp_path / "all.parquet")
    assert (done.returncode, done.stdout) == (6, "")
    assert f"  seed: {parts[0]} 7, {other} 8\n" in done.stderr
    assert not (tmp_path / "all.parquet").exists()


def test_what_stands_there_is_replaced_only_with_overwrite(tmp_path: Path, parts: list[Path]) -> None:
    out = tmp_path / "all.parquet"
    assert merge(*parts, "--out", out).returncode == 0
    again = merge(*parts, "--out", out)
    assert again.returncode == 6
    assert "`--overwrite` replaces it" in again.stderr
    assert "--resume" not in again.stderr
    assert merge(*parts, "--out", out, "--overwrite").returncode == 0


def test_no_part_and_no_output_are_usage_errors(tmp_path: Path, parts: list[Path]) -> None:
    assert merge("--out", tmp_path / "all.parquet").returncode == 2
    assert merge(*parts).returncode == 2
