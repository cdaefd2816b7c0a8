"""Real writers, really killed: whole shards only, and a lock that dies with its holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import layout
from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.shards import open_output
from tests.storage.rows import REPOSITORY, RUN_FACTS, fill, make_sample, write_output

WRITER = """
import itertools, sys
from managed_cli.storage.shards import open_output
from tests.storage.rows import RUN_FACTS, make_sample

output = open_output(sys.argv[1], run_facts=RUN_FACTS, rows_per_shard=6, overwrite=False)
for index in itertools.count():
    output.add(make_sample(index, choices=3, sampled_length=200))
    if output.shard_due:
        output.write_shard(output.take_pending())
        print(output.rows_on_disk, flush=True)
"""
"""Writes shards without end; says how many rows are on disk after each."""


def kill_writer_after(path: str, *, shards: int) -> int:
    """SIGKILL a writer that has told of `shards` shards and goes on; the rows it told of last."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(shards)]
    writer.send_signal(signal.SIGKILL)
    rest = writer.communicate()[0].split()
    assert writer.returncode == -signal.SIGKILL
    return int(rest[-1]) if rest else told[-1]


@pytest.mark.parametrize("path", ["out.parquet", "rows/"])
def test_a_writer_killed_at_work_leaves_whole_shards_with_every_row_it_told_of(tmp_path: Path, path: str) -> None:
    told = kill_writer_after(f"{tmp_path}/{path}", shards=20)
    recording = open_recording(f"{tmp_path}/{path}")
    assert recording.rows >= told
    assert all(file.rows == 6 for file in recording.files)
    assert check_recording(recording).ok


STEP_KILLER = """
import os, pathlib, signal, sys
from managed_cli.storage.shards import open_output
from tests.storage.rows import RUN_FACTS, fill, make_sample

steps_left = int(sys.argv[2])

def killing(step):
    def before_it(*args, **kwargs):
        global steps_left
        if steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps_left -= 1
        return step(*args, **kwargs)
    return before_it

os.fsync = killing(os.fsync)
for name in ("rename", "unlink", "rmdir"):
    setattr(pathlib.Path, name, killing(getattr(pathlib.Path, name)))

with open_output(sys.argv[1], run_facts=RUN_FACTS, rows_per_shard=4, overwrite=True) as output:
    fill(output, [make_sample(index) for index in range(8)])
    print("written", flush=True)
    output.finish()
    print("finished", flush=True)
"""
"""Overwrites a recording with 8 rows in 2 shards; dies before the disk step of the number given."""


def test_a_kill_before_any_step_on_the_disk_loses_no_row_that_was_told_of(tmp_path: Path) -> None:
    final = tmp_path / "out.parquet"
    for steps in range(100):
        for entry in tmp_path.rglob("*"):
            entry.unlink() if entry.is_file() else None
        write_output(final, [make_sample(index) for index in range(3)], overwrite=True)
        run = subprocess.run(
            [sys.executable, "-c", STEP_KILLER, str(final), str(steps)],
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
        )
        assert run.returncode in (0, -signal.SIGKILL), run.stderr
        # The finished file is always whole: the old one, or the new one.
        rows = open_recording(final).rows
        assert rows == 8 if "finished" in run.stdout else rows in (3, 8)
        assert check_recording(open_recording(final)).ok
        partial = final.with_name(final.name + layout.PARTIAL_SUFFIX)
        if rows == 3 and "written" in run.stdout:
            assert open_recording(partial).rows == 8
        if partial.exists() and layout.shards_in(partial):
            assert check_recording(open_recording(partial)).ok
        if run.returncode == 0:
            break
    assert steps > 10, "the steps were not met, so nothing was tested"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.parquet"]


class TestOneWriter:
    def test_a_second_opener_is_told_the_pid_of_the_first(self, tmp_path: Path) -> None:
        with open_output(f"{tmp_path}/out.parquet", run_facts=RUN_FACTS, rows_per_shard=4, overwrite=False) as first:
            fill(first, [make_sample(index) for index in range(4)])
            with pytest.raises(OutputError, match=rf"is being written by process {os.getpid()} on "):
                open_output(f"{tmp_path}/out.parquet", run_facts=RUN_FACTS, rows_per_shard=4, overwrite=True)
            assert first.finish().exists()

    def test_the_lock_of_another_process_is_seen(self, tmp_path: Path) -> None:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, f"{tmp_path}/rows/"], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            with pytest.raises(OutputError, match=f"is being written by process {writer.pid} on "):
                open_output(f"{tmp_path}/rows/", run_facts=RUN_FACTS, rows_per_shard=4, overwrite=False)
            assert open_recording(tmp_path / "rows").state == "growing"
        finally:
            writer.kill()
            writer.communicate()

    def test_the_lock_of_a_dead_process_is_not_in_the_way(self, tmp_path: Path) -> None:
        kill_writer_after(f"{tmp_path}/rows/", shards=1)
        assert (tmp_path / "rows" / layout.LOCK_NAME).exists()
        assert open_recording(tmp_path / "rows").state == "unfinished"
        finished = write_output(f"{tmp_path}/rows/", [make_sample(index) for index in range(4)], overwrite=True)
        assert open_recording(finished).state == "finished"
        assert open_recording(finished).rows == 4
