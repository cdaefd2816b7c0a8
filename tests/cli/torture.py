"""A rollout that is ended from outside again and again, and what stands on its disk after each end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from managed_cli.errors import ExitCode, OutputError
from managed_cli.storage.check import check_recording
from managed_cli.storage.failures import failure_lines
from managed_cli.storage.layout import (
    FAILURES_TEMP_NAME,
    LOCK_NAME,
    MERGED_MARK_NAME,
    MERGED_TEMP_NAME,
    OutputPlace,
    output_place,
    shard_name,
    shard_temp_name,
    shards_in,
)
from managed_cli.storage.reader import open_recording
from tests.cli.rollout_command import RUN_SECONDS, check, rollout, started_rollout

Row = dict[str, Any]
"""A row's columns by name, or the JSON object of a failure."""  # Any: columns have several types

Identity = tuple[str, int, str]
"""Sample, choice and node: no two rows share it."""

LOOK_SECONDS = 0.001
"""Between looks at the disk: a shard is under its temporary name for a few milliseconds only."""

START_SECONDS = 0.7
"""About what a run needs until its first request."""

RUN_ON_SECONDS = 0.4
"""A run is ended within so long after its first shard; it has about twice as long to go then."""

SHARD_SECONDS = 0.004
"""About what it takes to write, fsync and rename a shard."""

FINISH_SECONDS = 0.04
"""About what it takes from the last row to the finished file."""

CLEARING = 0.5
"""How often a run that finishes is ended only when its shards, merged by then, are taken away."""

CLEAR_SECONDS = 0.004
"""About what it takes to take them away."""

PREPARE_SECONDS = 0.25
"""About what a run with nothing left to sample needs from its lock to the finished file."""

SECOND_SIGNAL_SECONDS = 0.15
"""The second signal comes within so long after the first: before the requests in flight end, or after."""


class How(enum.Enum):
    """What ends a session."""

    KILL = "kill -9"
    TERM = "SIGTERM"
    TWICE = "two signals"


class When(enum.Enum):
    """Where in its life a session is ended."""

    START = "at its start"
    RUNNING = "while it samples"
    SHARD = "while it writes a shard"
    FINISH = "while it finishes"


WEIGHTS = {When.START: 2, When.RUNNING: 3, When.SHARD: 3, When.FINISH: 3}
"""How often a moment is chosen."""


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """What a reader finds; failures without what differs from run to run.

    Attributes:
        left: names that no finished output has.
    """

    rows: dict[Identity, Row]
    failures: dict[str, Row]
    left: frozenset[str]


def rows_by_identity(batches: Iterator[Any]) -> dict[Identity, Row]:  # Any: record batches
    """All rows by identity.

    Raises:
        AssertionError: two rows have the same one.
    """
    rows: dict[Identity, Row] = {}
    for row in (row for batch in batches for row in batch.to_pylist()):
        identity = (row["sample_id"], row["choice_index"], row["node_id"])
        assert identity not in rows, f"{identity} stands there twice"
        rows[identity] = {**row, "metadata": json.loads(row["metadata"])}
    return rows


def look(out: str) -> OnDisk:
    """What stands at `out`: rows that pass every check, failures without their time, and what is no data."""
    place = output_place(out)
    failures = {sample_id: json.loads(line) for sample_id, line in failure_lines(place.failures)}
    for failure in failures.values():
        del failure["time"]  # when it failed differs from run to run
        # All requests for a sample are counted. The one for the id of a harmless token, which llama.cpp is asked when
        # a logprob is missing, is that of whichever sample needs it first in a session.
        del failure["attempts"]
    names = {entry.name for entry in place.growing.iterdir()} if place.growing.is_dir() else set[str]()
    if not place.single_file and names:
        names -= {place.failures.name, *(shard.name for shard in shards_in(place.growing))}
    rows: dict[Identity, Row] = {}
    # A finished output that grows stands there twice: as it was, and with what has come to it.
    for path in (place.final, place.growing) if place.single_file else (place.final,):
        if path.exists():
            with contextlib.suppress(OutputError):  # it holds no shard yet
                recording = open_recording(path)
                assert check_recording(recording).ok
                found = rows_by_identity(recording.iter_batches())
                assert all(rows.get(identity, row) == row for identity, row in found.items())
                rows |= found
    return OnDisk(rows, failures, frozenset(names))


@dataclasses.dataclass
class Tally:
    """What the disturbances met."""

    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    sessions: int = 0
    outputs: int = 0

    def __str__(self) -> str:
        lines = [f"{self.sessions} sessions, {self.outputs} finished outputs"]
        for name, counts in (("ended", self.ended), ("met", self.met)):
            lines += [f"  {name}: {what}: {count}" for what, count in sorted(counts.items())]
        return "\n".join(lines)


def shell_status(returncode: int) -> int:
    """What a shell shows: a process that a signal ended has 128 and its number."""
    return returncode if returncode >= 0 else 128 - returncode


class Storm:
    """One output, and the command that goes on with it."""

    def __init__(self, out: str, arguments: Sequence[object], cwd: Path, chance: random.Random, tally: Tally) -> None:
        self.out = out
        self.cwd = cwd
        self._arguments = (*arguments, "--out", out, "--resume")
        self._chance = chance
        self._tally = tally

    @property
    def path(self) -> str:
        """Where the output goes, for this process."""
        return f"{self.cwd}/{self.out}"

    @property
    def place(self) -> OutputPlace:
        return output_place(self.path)

    def disturb(self, how: How, rows: int) -> OnDisk:
        """What stands there after one more session, which is ended by `how` unless it ends by itself before.

        Args:
            rows: how many there are once all samples are settled.

        Raises:
            AssertionError: it ended otherwise than such a session may, or said what it should not.
        """
        before = look(self.path)
        when = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        with started_rollout(*self._arguments, cwd=self.cwd) as run:
            self._wait(when, run, before, rows)
            signals = self._send(how, run)
            stderr = run.communicate()[1]
        after = look(self.path)
        self._count(how, when, run.returncode, before, after)
        self._assert_ended_well(run.returncode, signals, stderr, after)
        return after

    def finish(self) -> OnDisk:
        """What stands there after a session that is let run to its end."""
        done = rollout(*self._arguments, cwd=self.cwd)
        assert done.returncode == ExitCode.SOME_FAILED, done.stderr
        self._tally.sessions += 1
        return look(self.path)

    def assert_finished(self) -> None:
        """`inspect --check` passes, and nothing but the output is left."""
        self._tally.outputs += 1
        done = check(Path(self.path))
        assert done.returncode == 0, done.stdout + done.stderr
        place = self.place
        beside = {entry.name for entry in self.cwd.iterdir() if not entry.name.startswith("in.jsonl")}
        if place.single_file:
            assert beside == {place.final.name, place.failures.name}
        else:
            assert beside == {place.final.name}
            assert set(place.final.iterdir()) == {*shards_in(place.final), place.failures}

    def _wait(self, when: When, run: subprocess.Popen[str], before: OnDisk, rows: int) -> None:
        """Return at a moment of that kind, or once the run has ended."""
        growing, chance = self.place.growing, self._chance
        if when is When.START:
            time.sleep(chance.uniform(0, START_SECONDS))
            return
        held = _until(lambda: _holder(growing) == run.pid, run)
        first = _next_shard(growing)
        if when is When.RUNNING:
            within, seen = RUN_ON_SECONDS, held and _until(lambda: (growing / shard_name(first)).exists(), run)
        elif when is When.SHARD:
            number = first + chance.randrange(4)
            names = (growing / shard_temp_name(number), growing / shard_name(number))
            within, seen = SHARD_SECONDS, held and _until(lambda: any(name.exists() for name in names), run)
        elif self.place.single_file and MERGED_MARK_NAME not in before.left and chance.random() < CLEARING:
            within, seen = CLEAR_SECONDS, _until(self.place.merged_mark.exists, run)
        elif len(before.rows) == rows:
            within, seen = PREPARE_SECONDS, held
        else:
            within, seen = FINISH_SECONDS, held and _until(lambda: _rows_in(growing) >= rows, run)
        if seen:
            time.sleep(chance.uniform(0, within))

    def _send(self, how: How, run: subprocess.Popen[str]) -> list[signal.Signals]:
        """What was sent; to a process that has ended nothing is."""
        if how is How.KILL:
            signals = [signal.SIGKILL]
        elif how is How.TERM:
            signals = [signal.SIGTERM]
        else:
            signals = self._chance.choices([signal.SIGINT, signal.SIGTERM], k=2)
        for number in signals:
            if number is not signals[0] or len(signals) > 1:
                time.sleep(self._chance.uniform(0, SECOND_SIGNAL_SECONDS))
            run.send_signal(number)
        return signals

    def _count(self, how: How, when: When, returncode: int, before: OnDisk, after: OnDisk) -> None:
        tally = self._tally
        tally.sessions += 1
        tally.ended[f"{how.value}, {returncode}"] += 1
        if returncode == ExitCode.SOME_FAILED:
            tally.met[f"{how.value}: a run that had ended"] += 1
            return
        tally.met[f"{how.value}: a run alive"] += 1
        tally.met[f"{how.value}: a run alive {when.value}"] += 1
        has_recorded = len(after.rows) > len(before.rows) or len(after.failures) > len(before.failures)
        tally.met[f"{how.value}: that had recorded something"] += has_recorded
        if how is How.KILL:
            tally.met["left behind: a torn shard"] += any(name.startswith(".shard") for name in after.left)
            tally.met["left behind: a torn merge"] += MERGED_TEMP_NAME in after.left
            tally.met["left behind: shards beside the merged file"] += MERGED_MARK_NAME in after.left
            tally.met["left behind: torn failures"] += FAILURES_TEMP_NAME in after.left
            tally.met["left behind: a lock"] += LOCK_NAME in after.left

    def _assert_ended_well(
        self, returncode: int, signals: Sequence[signal.Signals], stderr: str, after: OnDisk
    ) -> None:
        assert "error: " not in stderr, stderr
        # Until the command is imported SIGINT is Python's own, which may end an import with a traceback, or go on.
        at_start, began, told = stderr.partition("in.jsonl: ")
        is_python_interrupted = signal.SIGINT in signals and "KeyboardInterrupt" in at_start
        self._tally.met["Python interrupted at its start"] += is_python_interrupted
        assert "Traceback" not in (told if is_python_interrupted else stderr), stderr
        status = shell_status(returncode)
        if status == ExitCode.SOME_FAILED:
            assert not after.left
            return
        allowed = {128 + number for number in signals}
        if began and returncode > 0 and not is_python_interrupted:
            allowed = {128 + signals[0]}  # from there on, the run itself obeys the first signal
        assert status in allowed, (returncode, signals, stderr)


def _until(condition: Callable[[], bool], run: subprocess.Popen[str]) -> bool:
    """Whether `condition` came about before the run ended."""
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        if run.poll() is not None:
            return False
        assert time.monotonic() < deadline, "neither did the condition come about, nor did the run end"
        time.sleep(LOOK_SECONDS)
    return True


def _holder(growing: Path) -> int | None:
    """The process that the lock names; None while it names none."""
    try:
        return int(json.loads((growing / LOCK_NAME).read_text("utf-8"))["pid"])
    except (OSError, ValueError):
        return None


def _next_shard(growing: Path) -> int:
    """How many shards with rows there are."""
    return sum(_rows_of(shard) > 0 for shard in _shards(growing))


def _rows_in(growing: Path) -> int:
    """Rows in shards."""
    return sum(_rows_of(shard) for shard in _shards(growing))


def _shards(growing: Path) -> list[Path]:
    """The shards of a run under way, which may be taking them away, and the directory with them."""
    try:
        return shards_in(growing)
    except FileNotFoundError:
        return []


def _rows_of(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except FileNotFoundError:
        return 0
