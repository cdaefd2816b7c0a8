from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from managed_cli.errors import ConfigError, OutputError
from managed_cli.storage import layout
from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import FINGERPRINT_METADATA_KEY, SESSIONS_METADATA_KEY
from managed_cli.storage.standing import SampleStanding
from tests.storage.rows import (
    FINGERPRINT,
    REPOSITORY,
    failures_at,
    fill,
    make_sample,
    opened,
    rows_at,
    rows_of,
    samples_at,
    write_output,
)

OUTPUTS = ["out.parquet", "rows/"]


def samples(*indices: int) -> list[list]:
    return [make_sample(index, choices=2) for index in indices]


def record_owed(path: Path | str, indices: Iterable[int], *, finish: bool = True, **how: bool) -> list[str]:
    """A session over an input of samples with these numbers: which of them it had to do."""
    done = []
    with opened(path, resume=True, **how) as output:
        for index in indices:
            if output.standing(f"s-{index}") is SampleStanding.OWED:
                done.append(f"s-{index}")
                fill(output, samples(index))
        output.finish() if finish else output.write_shard(output.take_pending())
    return done


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("path", OUTPUTS)
class TestAnInterruptedRun:
    def test_does_only_what_is_owed_and_ends_with_the_rows_of_an_undisturbed_one(
        self, tmp_path: Path, path: str
    ) -> None:
        out = f"{tmp_path}/{path}"
        assert record_owed(out, range(5), finish=False) == [f"s-{index}" for index in range(5)]
        assert record_owed(out, range(9)) == ["s-5", "s-6", "s-7", "s-8"]
        assert rows_at(out) == rows_of(samples(*range(9)))
        assert open_recording(out).state == "finished"
        assert check_recording(open_recording(out)).ok

    def test_may_go_on_with_an_input_in_another_order(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, [3, 1, 4], finish=False)
        assert record_owed(out, [0, 1, 2, 3, 4, 5]) == ["s-0", "s-2", "s-5"]
        assert rows_at(out) == rows_of(samples(*range(6)))

    def test_counts_the_rows_of_earlier_sessions_too(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(3), finish=False)
        with opened(out, resume=True) as output:
            assert (output.rows_on_disk, output.summary.samples, len(output.recorded)) == (6, 3, 3)
            fill(output, samples(3, 4))
            assert output.rows_on_disk == 10
            output.finish()
        assert open_recording(out).summary().samples == 5

    def test_says_which_session_recorded_how_much(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        for end in (2, 2, 5):
            record_owed(out, range(end), finish=False)
        record_owed(out, range(6))
        sessions = [(one.number, one.rows, one.samples) for one in open_recording(out).sessions()]
        assert sessions == [(1, 4, 2), (2, 6, 3), (3, 2, 1)]

    def test_leaves_no_torn_shard(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(2), finish=False)
        growing = tmp_path / "rows" if path == "rows/" else tmp_path / "out.parquet.partial"
        for name in (layout.shard_temp_name(1), layout.MERGED_TEMP_NAME, layout.FAILURES_TEMP_NAME):
            (growing / name).write_bytes(b"PAR1 torn")
        with opened(out, resume=True):
            assert layout.temps_in(growing) == []
        assert samples_at(out) == ["s-0", "s-1"]

    def test_numbers_new_shards_after_the_highest_though_one_is_missing(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(6), finish=False)
        growing = tmp_path / "rows" if path == "rows/" else tmp_path / "out.parquet.partial"
        (growing / layout.shard_name(1)).unlink()
        assert record_owed(out, range(6), finish=False) == ["s-2", "s-3"]
        assert [shard.name for shard in layout.shards_in(growing)] == [layout.shard_name(n) for n in (0, 2, 3)]
        assert record_owed(out, range(6)) == []
        assert rows_at(out) == rows_of(samples(*range(6)))

    def test_is_refused_without_a_word_about_it_and_both_options_are_named(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(2), finish=False)
        with pytest.raises(OutputError, match="4 rows in 1 shard") as caught:
            opened(out)
        assert "`--resume` goes on" in str(caught.value.hint)
        assert "`--overwrite` starts anew" in str(caught.value.hint)

    def test_with_a_damaged_shard_is_refused_by_its_name(self, tmp_path: Path, path: str) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(2), finish=False)
        growing = tmp_path / "rows" if path == "rows/" else tmp_path / "out.parquet.partial"
        shard = growing / layout.shard_name(0)
        content = bytearray(shard.read_bytes())
        content[4:40] = bytes(36)  # the first page of the first column, which is sample_id
        shard.write_bytes(content)
        with pytest.raises(OutputError, match=r"sample ids in .*shard-00000\.parquet"):
            opened(out, resume=True)


@pytest.mark.parametrize("path", OUTPUTS)
def test_resume_begins_a_run_where_there_is_none(tmp_path: Path, path: str) -> None:
    assert record_owed(f"{tmp_path}/{path}", range(2)) == ["s-0", "s-1"]
    assert open_recording(f"{tmp_path}/{path}").rows == 4


class TestAFinishedRun:
    @pytest.mark.parametrize("path", OUTPUTS)
    def test_owes_nothing_and_is_not_touched(self, tmp_path: Path, path: str) -> None:
        out = write_output(f"{tmp_path}/{path}", samples(0, 1, 2))
        files = {file.path: file.path.stat() for file in open_recording(out).files}
        assert record_owed(f"{tmp_path}/{path}", range(3)) == []
        now = {file.path: file.path.stat() for file in open_recording(out).files}
        assert [(stat.st_ino, stat.st_mtime_ns) for stat in now.values()] == [
            (stat.st_ino, stat.st_mtime_ns) for stat in files.values()
        ]
        assert open_recording(out).state == "finished"
        assert names_in(tmp_path) == [out.name]

    @pytest.mark.parametrize("path", OUTPUTS)
    def test_grows_when_its_input_was_extended(self, tmp_path: Path, path: str) -> None:
        out = write_output(f"{tmp_path}/{path}", samples(0, 1, 2))
        assert record_owed(f"{tmp_path}/{path}", [4, 0, 3, 2, 1]) == ["s-4", "s-3"]
        assert rows_at(out) == rows_of(samples(*range(5)))
        assert [one.rows for one in open_recording(out).sessions()] == [6, 4]
        assert names_in(tmp_path) == [out.name]

    def test_stays_the_finished_file_until_the_new_rows_are_in_it_too(self, tmp_path: Path) -> None:
        out = write_output(tmp_path / "out.parquet", samples(0, 1))
        with opened(out, resume=True) as output:
            fill(output, samples(2, 3))
            assert open_recording(out).rows == 4
            assert open_recording(output.growing_path).rows == 8
        assert "out.parquet.partial" in str(open_recording(out).note)
        assert record_owed(out, range(4)) == []
        assert rows_at(out) == rows_of(samples(*range(4)))

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
    def test_grows_from_a_copy_where_there_are_no_hard_links(
        self, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        out = write_output(tmp_path / "out.parquet", samples(0, 1))
        monkeypatch.setattr(Path, "hardlink_to", refused)
        record_owed(out, range(4), finish=False)
        assert open_recording(tmp_path / "out.parquet.partial").rows == 8
        record_owed(out, range(4))
        assert rows_at(out) == rows_of(samples(*range(4)))

    def test_whose_retried_samples_all_fail_again_keeps_its_rows(self, tmp_path: Path) -> None:
        out = tmp_path / "out.parquet"
        with opened(out) as output:
            fill(output, samples(0))
            output.record_failure({"sample_id": "s-1", "attempts": 1})
            output.finish()
        with opened(out, resume=True, retry_failed=True) as output:
            assert output.standing("s-1") is SampleStanding.OWED
            output.record_failure({"sample_id": "s-1", "attempts": 2})
            output.finish()
        assert names_in(tmp_path) == ["out.parquet", "out.parquet.failures.jsonl"]
        assert rows_at(out) == rows_of(samples(0))
        assert failures_at(tmp_path / "out.parquet.failures.jsonl")["s-1"]["attempts"] == 2

    def test_that_was_killed_while_its_shards_were_removed_is_finished(self, tmp_path: Path) -> None:
        out = tmp_path / "out.parquet"
        record_owed(out, range(6), finish=False)
        growing = tmp_path / "out.parquet.partial"
        last = (growing / layout.shard_name(2)).read_bytes()
        record_owed(out, range(6))
        growing.mkdir()
        (growing / layout.shard_name(2)).write_bytes(last)
        (growing / layout.MERGED_MARK_NAME).touch()
        assert record_owed(out, range(6)) == []
        assert rows_at(out) == rows_of(samples(*range(6)))
        assert names_in(tmp_path) == ["out.parquet"]

    def test_that_went_elsewhere_while_its_shards_were_removed_is_asked_for(self, tmp_path: Path) -> None:
        out = tmp_path / "out.parquet"
        record_owed(out, range(2), finish=False)
        (tmp_path / "out.parquet.partial" / layout.MERGED_MARK_NAME).touch()
        with pytest.raises(OutputError, match="is gone"):
            opened(out, resume=True)
        write_output(out, samples(5), overwrite=True)
        assert names_in(tmp_path) == ["out.parquet"]
        assert samples_at(out) == ["s-5"]

    def test_of_no_rows_grows_like_any_other(self, tmp_path: Path) -> None:
        for path in OUTPUTS:
            write_output(f"{tmp_path}/{path}", [])
            record_owed(f"{tmp_path}/{path}", range(3))
            assert rows_at(f"{tmp_path}/{path}") == rows_of(samples(0, 1, 2))
        assert names_in(tmp_path / "rows") == [layout.shard_name(0), layout.shard_name(1)]


class TestTheFingerprint:
    def test_stands_in_every_file(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet") as output:
            fill(output, samples(0, 1, 2, 3))
            files = layout.shards_in(output.growing_path)
            stored = [json.loads(pq.read_metadata(file).metadata[FINGERPRINT_METADATA_KEY]) for file in files]
            assert stored == [FINGERPRINT] * 2
            finished = output.finish()
        keys = pq.read_metadata(finished).metadata
        assert json.loads(keys[FINGERPRINT_METADATA_KEY]) == FINGERPRINT
        assert json.loads(keys[SESSIONS_METADATA_KEY]) == [{"number": 1, "rows": 8, "samples": 4}]

    @pytest.mark.parametrize("path", OUTPUTS)
    @pytest.mark.parametrize("finish", [True, False])
    def test_of_other_settings_is_refused_with_both_values_of_each(
        self, tmp_path: Path, path: str, finish: bool
    ) -> None:
        out = f"{tmp_path}/{path}"
        record_owed(out, range(2), finish=finish)
        before = {file.path: file.path.read_bytes() for file in open_recording(out).files}
        other = {"model": "tiny-random", "temperature": 0.7, "stop": ["\n"], "template": "ab12"}
        with pytest.raises(OutputError, match="was recorded with other settings") as caught:
            opened(out, fingerprint=other, resume=True)
        assert caught.value.exit_code == 6
        assert caught.value.details[:3] == (
            "temperature: recorded 1.0, now 0.7",
            "seed: recorded 7, now nothing",
            'template: recorded nothing, now "ab12"',
        )
        assert "the 4 rows there are whole" in caught.value.details[3]
        assert {file.path: file.path.read_bytes() for file in open_recording(out).files} == before

    def test_of_equal_values_in_another_order_and_of_tuples_is_equal(self, tmp_path: Path) -> None:
        record_owed(tmp_path / "out.parquet", range(2), finish=False)
        same = {"stop": ("\n",), "seed": 7, "temperature": 1, "model": "tiny-random"}
        with opened(tmp_path / "out.parquet", fingerprint=same, resume=True) as output:
            assert len(output.recorded) == 2

    def test_may_be_told_later_and_is_compared_then(self, tmp_path: Path) -> None:
        record_owed(tmp_path / "out.parquet", range(2), finish=False)
        with opened(tmp_path / "out.parquet", fingerprint=None, resume=True) as output:
            output.refuse_other_settings({"temperature": 1.0})
            with pytest.raises(OutputError, match="other settings") as caught:
                output.refuse_other_settings({"temperature": 0.5})
            assert caught.value.details[0] == "temperature: recorded 1.0, now 0.5"
            with pytest.raises(OutputError, match="other settings"):
                output.describe_run({}, fingerprint={**FINGERPRINT, "model": "another"})
            output.describe_run({}, fingerprint=FINGERPRINT)
            fill(output, samples(2, 3))
            output.finish()
        assert open_recording(tmp_path / "out.parquet").rows == 8

    @pytest.mark.parametrize("finish", [True, False])
    def test_that_is_never_told_lets_nothing_be_added(self, tmp_path: Path, finish: bool) -> None:
        record_owed(tmp_path / "out.parquet", range(2), finish=finish)
        before = names_in(tmp_path)
        with opened(tmp_path / "out.parquet", fingerprint=None, resume=True) as output:
            output.add(make_sample(2))
            with pytest.raises(OutputError, match="other settings"):
                output.write_shard(output.take_pending())
        assert samples_at(tmp_path / "out.parquet") == ["s-0", "s-1"]
        assert names_in(tmp_path) == before

    def test_of_a_run_with_nothing_but_failures_is_compared_too(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet") as output:
            output.record_failure({"sample_id": "s-0"})
        with pytest.raises(OutputError, match="other settings"):
            opened(tmp_path / "out.parquet", fingerprint={}, resume=True)
        assert record_owed(tmp_path / "out.parquet", range(2)) == ["s-1"]
        assert failures_at(tmp_path / "out.parquet.failures.jsonl").keys() == {"s-0"}

    def test_that_a_file_lacks_is_said(self, tmp_path: Path) -> None:
        out = write_output(tmp_path / "out.parquet", samples(0))
        table = pq.read_table(out)
        kept = {b"managed_cli.run": b"{}"}
        pq.write_table(table.replace_schema_metadata(kept), out)
        with pytest.raises(OutputError, match="carries no fingerprint"):
            opened(out, resume=True)

    def test_of_two_runs_in_one_directory_is_refused(self, tmp_path: Path) -> None:
        write_output(f"{tmp_path}/a/", samples(0))
        write_output(f"{tmp_path}/b/", samples(1), fingerprint={**FINGERPRINT, "seed": 8})
        shutil.copy(tmp_path / "b" / layout.shard_name(0), tmp_path / "a" / layout.shard_name(1))
        with pytest.raises(OutputError, match="is of another run than") as caught:
            opened(f"{tmp_path}/a/", resume=True)
        assert caught.value.details[0] == "seed: there 7, here 8"


class TestOptions:
    def test_that_contradict_each_other_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--overwrite"):
            opened(tmp_path / "out.parquet", resume=True, overwrite=True)
        with pytest.raises(ConfigError, match="--retry-failed"):
            opened(tmp_path / "out.parquet", retry_failed=True)
        assert names_in(tmp_path) == []

    def test_the_directory_that_a_file_grows_in_is_no_output(self, tmp_path: Path) -> None:
        record_owed(tmp_path / "out.parquet", range(2), finish=False)
        with pytest.raises(OutputError, match="is where the output") as caught:
            opened(tmp_path / "out.parquet.partial", resume=True)
        assert caught.value.hint == f"`--out {tmp_path / 'out.parquet'} --resume` goes on with it"

    def test_a_slash_too_many_is_found_out(self, tmp_path: Path) -> None:
        record_owed(tmp_path / "rows", range(2), finish=False)
        with pytest.raises(OutputError, match=r"rows\.partial/` holds a run that did not finish"):
            opened(f"{tmp_path}/rows/", resume=True)
        assert record_owed(tmp_path / "rows", range(2)) == []


def test_a_second_resume_is_refused_and_names_the_first(tmp_path: Path) -> None:
    record_owed(tmp_path / "out.parquet", range(2), finish=False)
    program = "import sys; from tests.storage.rows import opened; opened(sys.argv[1], resume=True)"
    with opened(tmp_path / "out.parquet", resume=True) as output:
        second = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "out.parquet")],
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
        )
        assert f"is being written by process {os.getpid()} on " in second.stderr
        fill(output, samples(2, 3))
        output.finish()
    assert rows_at(tmp_path / "out.parquet") == rows_of(samples(*range(4)))


def test_a_sample_that_stands_in_two_shards_is_reported(tmp_path: Path) -> None:
    with opened(f"{tmp_path}/rows/") as output:
        fill(output, samples(0, 1))
        fill(output, samples(1, 2))
        output.finish()
    report = check_recording(open_recording(tmp_path / "rows"))
    assert report.breaches["duplicate"].count == 2


def test_inspect_shows_the_sessions_of_a_resumed_run(tmp_path: Path) -> None:
    record_owed(tmp_path / "out.parquet", range(2), finish=False)
    record_owed(tmp_path / "out.parquet", range(5))
    command: list[Any] = [sys.executable, "-m", "managed_cli", "inspect", tmp_path / "out.parquet"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    assert "2: 4, 6 rows" in shown
    assert subprocess.run([*command, "--check"], capture_output=True, check=False, cwd=REPOSITORY).returncode == 0
