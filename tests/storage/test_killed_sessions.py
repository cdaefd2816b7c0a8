"""A run that is killed and resumed until it is done: the rows of an undisturbed run, each exactly once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from managed_cli.errors import OutputError
from managed_cli.storage.check import check_recording
from managed_cli.storage.layout import output_place, shards_in
from managed_cli.storage.reader import open_recording
from managed_cli.storage.recorded_ids import sample_ids_of
from tests.storage.forking import FAILS_ALWAYS, FAILS_FIRST, Recorders, recorders, sample_of
from tests.storage.rows import failures_at, rows_at, rows_of

KILLS = int(os.environ.get("MANAGED_CLI_KILLS", "40"))
"""Kills per storm; a night's worth is 5000."""

OUTPUTS = ["out.parquet", "rows/"]

LONGEST_SESSION_SECONDS = 0.25
"""Kills come within it, so that some hit a session that has just begun and some one that is about to finish."""


@pytest.fixture(scope="module")
def forked() -> Iterator[Recorders]:
    with recorders() as processes:
        yield processes


def recorded_samples(path: str) -> set[str]:
    """Samples whose rows stand on disk at `path`, all of them whole."""
    try:
        recording = open_recording(path)
    except OutputError:
        return set()
    assert check_recording(recording).ok
    growing = output_place(path).growing
    files = {file.path for file in recording.files}
    if growing.is_dir():
        files.update(shards_in(growing))
    return set(sample_ids_of(files))


def assert_as_undisturbed(path: str, samples: int, *, is_retried: bool) -> None:
    fails = {index for index in range(samples) if index % FAILS_ALWAYS == 0}
    if not is_retried:
        fails |= {index for index in range(samples) if index % FAILS_FIRST == 0}
    assert rows_at(path) == rows_of(sample_of(index) for index in range(samples) if index not in fails)
    assert failures_at(output_place(path).failures).keys() == {f"s-{index}" for index in fails}
    recording = open_recording(path)
    assert recording.state == "finished"
    assert check_recording(recording).ok
    assert sum(session.rows for session in recording.sessions()) == recording.rows
    assert recording.summary().samples + recording.failed_samples() == samples


def assert_nothing_else_is_left(directory: Path, path: str) -> None:
    place = output_place(f"{directory}/{path}")
    assert sorted(directory.iterdir()) == sorted({place.final, *([place.failures] if place.single_file else [])})
    if not place.single_file:
        others = {entry.name for entry in place.final.iterdir() if not entry.name.startswith("shard-")}
        assert others == {".failures.jsonl"}


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_storm_of_kills_loses_nothing_and_doubles_nothing(tmp_path: Path, path: str, forked: Recorders) -> None:
    out, samples, safe = f"{tmp_path}/{path}", 120, set[str]()
    for kill in range(KILLS):
        # Once a round of retries is through, more input comes: a finished output is killed while it grows, too.
        pid = forked.start(out, samples, retry_failed=bool(kill % 2))
        time.sleep(random.uniform(0, LONGEST_SESSION_SECONDS))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            samples += 20
        if forked.ended() == 0:
            samples += 20
        now = recorded_samples(out)
        assert safe <= now
        safe = now
    assert forked.run(out, samples) == 0
    assert forked.run(out, samples, retry_failed=True) == 0
    assert_as_undisturbed(out, samples, is_retried=True)
    assert_nothing_else_is_left(tmp_path, path)


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_kill_before_any_step_of_a_first_session_is_made_good(tmp_path: Path, path: str, forked: Recorders) -> None:
    out, samples = f"{tmp_path}/{path}", 11
    for steps in range(1000):
        ended = forked.run(out, samples, steps=steps)
        assert ended in (0, -signal.SIGKILL)
        safe = recorded_samples(out)
        assert forked.run(out, samples) == 0
        assert safe <= recorded_samples(out)
        assert_as_undisturbed(out, samples, is_retried=False)
        assert_nothing_else_is_left(tmp_path, path)
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if ended == 0:
            break
    assert steps > 12, "the steps were not met, so nothing was tested"


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_kill_before_any_step_of_a_finished_run_that_grows_is_made_good(
    tmp_path: Path, path: str, forked: Recorders
) -> None:
    finished, work = tmp_path / "finished", tmp_path / "work"
    finished.mkdir()
    assert forked.run(f"{finished}/{path}", 6) == 0
    before = recorded_samples(f"{finished}/{path}")
    for steps in range(1000):
        shutil.copytree(finished, work)
        ended = forked.run(f"{work}/{path}", 11, retry_failed=True, steps=steps)
        assert ended in (0, -signal.SIGKILL)
        safe = recorded_samples(f"{work}/{path}")
        assert before <= safe
        for _ in range(2):  # what failed for the first time just before the kill is retried by the second
            assert forked.run(f"{work}/{path}", 11, retry_failed=True) == 0
        assert safe <= recorded_samples(f"{work}/{path}")
        assert_as_undisturbed(f"{work}/{path}", 11, is_retried=True)
        assert_nothing_else_is_left(work, path)
        shutil.rmtree(work)
        if ended == 0:
            break
    assert steps > 12, "the steps were not met, so nothing was tested"
