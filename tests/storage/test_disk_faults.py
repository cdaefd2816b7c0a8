"""Disks that are full, read-only, gone or broken: one message, whole shards, and a run that goes on afterwards."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import layout, parquet
from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.shards import ShardedOutput
from tests.storage.full_disk import fill_up, mounted, remount
from tests.storage.rows import failures_at, fill, make_sample, opened, rows_at, rows_of, samples_at

OUTPUTS = ["out.parquet", "rows/"]
PAGE = 4096
"""What a file on a tmpfs takes at least."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as directory:
        yield directory


def samples(*indices: int) -> list[list]:
    return [make_sample(index, choices=2, sampled_length=100) for index in indices]


def fault_of(step: Callable[[], object], message: str) -> OutputError:
    with pytest.raises(OutputError, match=message) as caught:
        step()
    assert caught.value.exit_code == 6
    assert "--resume" in (caught.value.hint or "")
    return caught.value


def write(output: ShardedOutput, *indices: int) -> None:
    fill(output, samples(*indices))
    output.write_shard(output.take_pending())


def resume_to_the_end(path: str, count: int) -> None:
    with opened(path, resume=True) as output:
        fill(output, samples(*(index for index in range(count) if output.standing(f"s-{index}") == "owed")))
        output.finish()
    assert rows_at(path) == rows_of(samples(*range(count)))
    assert check_recording(open_recording(path)).ok


@pytest.mark.parametrize("path", OUTPUTS)
class TestAFullDisk:
    def test_loses_the_shard_that_does_not_fit_and_nothing_else(self, disk: Path, path: str) -> None:
        out = f"{disk}/{path}"
        with opened(out) as output:
            write(output, 0, 1)
            ballast = fill_up(disk, leaving=PAGE)
            fault = fault_of(lambda: write(output, 2, 3), "cannot write a shard to .*: no space left on device")
            assert "the 4 rows in 1 shard" in fault.details[0]
            assert fault.details[1] == "4 rows of 2 samples are not on disk, so these samples are owed still"
            assert layout.temps_in(output.growing_path) == []
        assert samples_at(out) == ["s-0", "s-1"]
        assert open_recording(out).state == "unfinished"
        assert check_recording(open_recording(out)).ok
        ballast.unlink()
        resume_to_the_end(out, 4)

    def test_that_has_room_again_takes_the_same_rows(self, disk: Path, path: str) -> None:
        out = f"{disk}/{path}"
        with opened(out) as output:
            write(output, 0, 1)
            ballast = fill_up(disk)
            fill(output, samples(2))
            output.add(samples(3)[0])
            pending = output.take_pending()
            fault_of(lambda: output.write_shard(pending), "no space left")
            ballast.unlink()
            output.write_shard(pending)
            output.finish()
        resume_to_the_end(out, 4)

    def test_leaves_every_failure_that_was_told_of_and_no_half_line(self, disk: Path, path: str) -> None:
        out = f"{disk}/{path}"
        with opened(out) as output:
            write(output, 0, 1)
            ballast = fill_up(disk, leaving=2 * PAGE)
            told: list[str] = []

            def fail_for_ever() -> None:
                while True:
                    output.record_failure({"sample_id": f"f-{len(told)}", "message": "x" * 1500})
                    told.append(f"f-{len(told)}")

            fault = fault_of(fail_for_ever, "cannot record a failed sample beside .*: no space left on device")
            assert f"sample f-{len(told)} is neither recorded nor listed" in fault.details[1]
            assert len(told) > 2
            assert list(failures_at(output.failures_path)) == told
        assert list(failures_at(output.failures_path)) == told
        ballast.unlink()
        with opened(out, resume=True) as output:
            assert output.failed_samples == len(told)
            output.record_failure({"sample_id": "one more"})
        assert list(failures_at(output.failures_path)) == [*told, "one more"]

    def test_at_the_start_changes_nothing(self, disk: Path, path: str) -> None:
        ballast = fill_up(disk)
        with pytest.raises(OutputError) as caught, opened(f"{disk}/{path}") as output:
            write(output, 0)
        assert "no space left" in caught.value.message
        ballast.unlink()
        resume_to_the_end(f"{disk}/{path}", 3)


def test_a_disk_with_no_room_for_the_finished_file_keeps_the_shards(disk: Path) -> None:
    out = f"{disk}/out.parquet"
    with opened(out) as output:
        write(output, 0, 1)
        write(output, 2, 3)
        ballast = fill_up(disk)
        fault = fault_of(output.finish, "cannot finish .*: no space left")
        assert "the 8 rows in 2 shards" in fault.details[0]
    ballast.unlink()
    resume_to_the_end(out, 4)


def test_a_finished_file_stays_whole_when_there_is_no_room_to_extend_it(disk: Path) -> None:
    out = f"{disk}/out.parquet"
    resume_to_the_end(out, 4)
    with opened(out, resume=True) as output:
        ballast = fill_up(disk)
        fault = fault_of(lambda: write(output, 4, 5), "no space left")
        assert fault.details[0] == f"the 8 rows of `{out}` are whole and unchanged"
    assert samples_at(out) == ["s-0", "s-1", "s-2", "s-3"]
    ballast.unlink()
    resume_to_the_end(out, 6)


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_disk_that_becomes_read_only_is_told_and_the_run_goes_on_later(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does this to a disk with errors; it refuses to when asked while a file is open, as the lock is."""
    real_open = Path.open

    def read_only(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:  # Any: as `Path.open`
        if mode[0] in "wax":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, mode, *rest, **named)

    with opened(f"{tmp_path}/{path}") as output:
        write(output, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", read_only)
            fault = fault_of(lambda: write(output, 2, 3), "read-only file system")
            assert "the 4 rows in 1 shard" in fault.details[0]
            fault_of(lambda: output.record_failure({"sample_id": "f"}), "read-only file system")
    resume_to_the_end(f"{tmp_path}/{path}", 4)


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_read_only_disk_is_refused_at_the_start(disk: Path, path: str) -> None:
    with opened(f"{disk}/{path}") as output:
        write(output, 0, 1)
    remount(disk, read_only=True)
    with pytest.raises(OutputError, match="read-only file system"):
        opened(f"{disk}/{path}", resume=True)
    assert samples_at(f"{disk}/{path}") == ["s-0", "s-1"]
    remount(disk, read_only=False)


@pytest.mark.parametrize("path", OUTPUTS)
@pytest.mark.parametrize("replaced", [True, False])
def test_a_directory_that_was_removed_while_it_grew_is_told_and_left_alone(
    tmp_path: Path, path: str, replaced: bool
) -> None:
    with opened(f"{tmp_path}/{path}") as output:
        write(output, 0, 1)
        shutil.rmtree(output.growing_path)
        if replaced:
            output.growing_path.mkdir()
            (output.growing_path / layout.LOCK_NAME).write_text("of another writer")
        for step in (
            lambda: write(output, 2, 3),
            lambda: output.record_failure({"sample_id": "s-4"}),
            output.finish,
        ):
            fault = fault_of(step, "was removed or replaced while it was being written")
            assert "are not there any more" in fault.details[0]
    if replaced:
        assert (output.growing_path / layout.LOCK_NAME).read_text() == "of another writer"
        assert len(list(output.growing_path.iterdir())) == 1
        (output.growing_path / layout.LOCK_NAME).unlink()
    resume_to_the_end(f"{tmp_path}/{path}", 4)


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("path", OUTPUTS)
def test_a_flush_that_fails_counts_as_not_written(
    tmp_path: Path, path: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk can be made to fail on demand here: the call that flushes reports what a broken or full one would."""
    real_fsync = os.fsync
    broken = False

    def fsync(descriptor: int) -> None:
        if broken:
            raise OSError(code, os.strerror(code))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with opened(f"{tmp_path}/{path}") as output:
        write(output, 0, 1)
        broken = True
        fault = fault_of(lambda: write(output, 2, 3), os.strerror(code).lower())
        assert "the 4 rows in 1 shard" in fault.details[0]
        fault_of(lambda: output.record_failure({"sample_id": "f"}), os.strerror(code).lower())
        broken = False
        assert samples_at(f"{tmp_path}/{path}") == ["s-0", "s-1"]
        assert failures_at(output.failures_path) == {}
    resume_to_the_end(f"{tmp_path}/{path}", 4)


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_directory_flush_that_fails_may_be_tried_again_without_doubling(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(f"{tmp_path}/{path}") as output:
        write(output, 0, 1)
        fill(output, samples(2))
        with monkeypatch.context() as patch:
            patch.setattr("managed_cli.storage.shards.fsync_directory", broken)
            output.add(samples(3)[0])
            pending = output.take_pending()
            fault_of(lambda: output.write_shard(pending), "input/output error")
        output.write_shard(pending)
        output.finish()
    resume_to_the_end(f"{tmp_path}/{path}", 4)


def test_a_quota_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_quota(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with opened(tmp_path / "out.parquet") as output:
        write(output, 0, 1)
        monkeypatch.setattr(parquet.pq.ParquetWriter, "write_table", over_quota)
        fault_of(lambda: write(output, 2, 3), "disk quota exceeded")
