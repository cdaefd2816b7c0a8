"""Parts of an input: each sample in one of them, wherever its line stands, and together they are the whole run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import ConfigError
from managed_cli.rollout.input_options import InputPart
from tests.cli.rollout_command import at, check, command, environment, many_rollouts, rollout, rows_of, write_prompts
from tests.servers.process import RunningServer, running_server

SETTINGS = ("--max-tokens", 3, "--seed", 3)
CHANGING = {"server", "attempts", "source"}
"""Facts of a row that depend on where and when it was sampled, not on what."""


def stripped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [{**row, "metadata": {k: v for k, v in row["metadata"].items() if k not in CHANGING}} for row in rows]
    return [{name: value for name, value in row.items() if name not in CHANGING} for row in kept]


@pytest.fixture
def server() -> Any:
    with running_server("llamacpp") as running:
        yield running


@given(st.lists(st.text(), unique=True, max_size=30), st.integers(min_value=1, max_value=9))
def test_every_sample_is_in_exactly_one_part(ids: list[str], count: int) -> None:
    parts = [InputPart(index, count) for index in range(1, count + 1)]
    assert all(sum(part.holds(sample_id) for part in parts) == 1 for sample_id in ids)


def test_parts_are_of_about_the_same_size() -> None:
    sizes = [sum(InputPart(index, 8).holds(f"gsm8k-{i}") for i in range(8000)) for index in range(1, 9)]
    assert (min(sizes) > 850, max(sizes) < 1150) == (True, True)


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/3/5", "1.5/3", "²/3"])
def test_what_names_no_part_is_a_usage_error(text: str) -> None:
    with pytest.raises(ConfigError, match="expected I/N with 1 <= I <= N"):
        InputPart.parse(text)


def test_merged_parts_are_the_run_without_parts(tmp_path: Path, server: RunningServer) -> None:
    prompts = [{"prompt": f"Say {i // 2}."} for i in range(30)]  # no ids, and each prompt twice
    source = write_prompts(tmp_path / "in.jsonl", prompts)
    moved = write_prompts(tmp_path / "moved.jsonl", prompts[::-1])
    runs = [
        [moved if part == 2 else source, *at(server), *SETTINGS, "--part", f"{part}/3", "--out", f"part-{part}.parquet"]
        for part in (1, 2, 3)
    ]
    whole = [source, *at(server), *SETTINGS, "--out", "whole.parquet"]
    assert [done.returncode for done in many_rollouts([*runs, whole], cwd=tmp_path)] == [0, 0, 0, 0]
    names = [f"part-{part}.parquet" for part in (1, 2, 3)]
    merged = subprocess.run(
        command("merge", *names, "--out", "all.parquet"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert merged.returncode == 0, merged.stderr
    assert stripped(rows_of(tmp_path / "all.parquet")) == stripped(rows_of(tmp_path / "whole.parquet"))
    assert min(pq.read_metadata(tmp_path / name).num_rows for name in names) >= 3
    assert check(tmp_path / "all.parquet").returncode == 0


def test_the_limit_is_of_the_whole_input(tmp_path: Path, server: RunningServer) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"id": f"s{i}", "prompt": "Hi."} for i in range(40)])
    runs = [
        [source, *at(server), *SETTINGS, "--limit", 12, "--part", f"{part}/2", "--out", f"{part}.parquet"]
        for part in (1, 2)
    ]
    assert [done.returncode for done in many_rollouts(runs, cwd=tmp_path)] == [0, 0]
    ids = [row["sample_id"] for part in (1, 2) for row in rows_of(tmp_path / f"{part}.parquet")]
    assert sorted(ids) == sorted(f"s{i}" for i in range(12))


def test_a_part_without_samples_is_an_output_without_rows(tmp_path: Path, server: RunningServer) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"id": "only", "prompt": "Hi."}])
    runs = [[source, *at(server), *SETTINGS, "--part", f"{part}/2", "--out", f"{part}.parquet"] for part in (1, 2)]
    done = many_rollouts(runs, cwd=tmp_path)
    assert [run.returncode for run in done] == [0, 0], done
    assert sorted(pq.read_metadata(tmp_path / f"{part}.parquet").num_rows for part in (1, 2)) == [0, 1]


def test_parts_need_a_seed_in_common(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": "Hi."}])
    done = rollout(source, "--part", "1/2", cwd=tmp_path)
    assert done.returncode == 2
    assert "--part needs --seed, the same for every part" in done.stderr


def test_an_output_is_not_resumed_with_another_part(tmp_path: Path, server: RunningServer) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"id": f"s{i}", "prompt": "Hi."} for i in range(8)])
    assert rollout(source, *at(server), *SETTINGS, "--part", "1/2", cwd=tmp_path).returncode == 0
    done = rollout(source, *at(server), *SETTINGS, "--part", "2/2", "--resume", cwd=tmp_path)
    assert done.returncode == 6
    assert "part" in done.stderr
