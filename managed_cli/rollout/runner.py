"""The run: tasks in, rows out, one task group for everything that happens at once.

A sample's rows are buffered in the same step in which its reply is understood, and a fault elsewhere waits for replies
that came before it; what is buffered goes to disk by whole shards, and at the end, however it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from managed_cli.backends import in_turn
from managed_cli.backends._http import CountedSends
from managed_cli.errors import ManagedCliError, TooManyFailures
from managed_cli.managed.servers import Server
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import CountedRow, Progress
from managed_cli.rollout.pool import ServerPool, StoppedWaiting
from managed_cli.rollout.samples import BadLine, SettledLine
from managed_cli.rollout.stop import Stop
from managed_cli.storage.shards import ShardedOutput
from managed_cli.storage.standing import SampleStanding

SETTLED_PER_BREATH = 1000
"""Samples of earlier sessions that are passed over in one go: a few milliseconds."""

MOST_SERVERS_LOST = 3
"""A sample that its server went away from so often is failed: it may be what ends the servers."""

COLLECT_AFTER_ALLOCATIONS = 50_000
"""Container objects between two looks for cycles; some seconds of a run, and some megabytes at most."""

READ_AHEAD, READ_AHEAD_SECONDS = 16, 0.001
"""Tasks read at once, as long as that takes no longer: a line can hold a hundred thousand ids."""

FLUSH_SECONDS = 15.0
"""Rows do not wait longer than this for their shard to fill."""


class Sample(Protocol):
    """What a run knows of a task: whose rows these are, and where it stands in the input."""

    @property
    def sample_id(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def line(self) -> int: ...


AnySample = TypeVar("AnySample", bound=Sample)
AnyTask = TypeVar("AnyTask")


class Runner:
    """Does every task once and hands its rows to the output.

    Args:
        tasks: read a few ahead of those that are under way.
        do: the rows of one task, from a server; what is not a `ManagedCliError` is a bug.
        pool: prepared; this class does not close it.
        output: open; this class neither finishes nor closes it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tasks: Iterator[AnySample | BadLine | SettledLine],
        pool: ServerPool,
        output: ShardedOutput,
        progress: Progress,
        stop: Stop,
        *,
        do: Callable[[AnySample, Server, RolloutConfig], Awaitable[Sequence[CountedRow]]],
    ) -> None:
        self.config = config
        self.progress = progress
        self._tasks: Iterator[Sample | BadLine | SettledLine] = read_ahead(tasks)
        self._do: Callable[[Any, Server, RolloutConfig], Awaitable[Sequence[CountedRow]]] = do  # Any: one of `tasks`
        self._pool = pool
        self._output = output
        self._stop = stop
        self._writing = asyncio.Lock()
        self._failures = self._failures_in_a_row = 0
        self._limit_reached: TooManyFailures | None = None

    async def run(self) -> None:
        """Return when every task is settled, or the stop was obeyed; what is finished is on disk.

        Raises:
            ServerUnreachable, ServerRefused, ServerChanged: no further request can succeed.
            TooManyFailures: as many samples have failed as `config` allows, and others are still owed.
            OutputError: rows cannot be written.
        """
        collect_rarely()
        try:
            async with asyncio.TaskGroup() as tasks:
                workers = [tasks.create_task(self._work()) for _ in range(self.config.samples_in_flight())]
                watching = [self._pool.watch(member) for member in self._pool.members]
                beside = [self._flush_often(), self._obey_stop(workers), *watching]
                helpers = [tasks.create_task(work) for work in beside]
                await asyncio.wait(workers)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            faults, bugs = group.split(ManagedCliError)
            if faults is None or bugs is not None:
                raise
            raise _first(faults) from group
        finally:
            await self._write_pending()
        if self._limit_reached is not None and self.progress.done < self.progress.total:
            raise self._limit_reached

    async def _work(self) -> None:
        """Take one task after the other until there are none or the run is to stop."""
        await in_turn.turn(0)  # a thousand workers do not all send their first request before the loop comes round
        for task in self._tasks:
            if self._stop.asked.is_set():
                return
            standing = task.standing if isinstance(task, SettledLine) else self._output.standing(task.sample_id)
            if isinstance(task, SettledLine) or standing is not SampleStanding.OWED:
                is_recorded = standing is SampleStanding.RECORDED
                self.progress.count_earlier(recorded=is_recorded, failed=not is_recorded)
                if self.progress.earlier % SETTLED_PER_BREATH == 0:
                    await asyncio.sleep(0)  # the loop sees signals now and then
                continue
            if isinstance(task, BadLine):
                await self._record_failure(task, task.error, attempts=0)
                continue
            self.progress.in_flight[task.sample_id] = time.monotonic()
            try:
                await self._settle(task)
            except StoppedWaiting:
                return
            finally:
                self.progress.in_flight.pop(task.sample_id, None)
            if self._output.shard_due:
                await self._write_due()
            await in_turn.after_others()  # replies that are there are recorded before the next prompts are planned

    async def _settle(self, task: Sample) -> None:
        """The rows of `task` are buffered, or it stands among the failures."""
        with CountedSends() as sends:
            for servers_lost in range(1, MOST_SERVERS_LOST + 1):
                member = await self._pool.free_member()
                outages = member.outages
                try:
                    member.outstanding += 1
                    try:
                        rows = await self._do(task, member.server, self.config)
                    finally:
                        member.outstanding -= 1
                    lengths = self._output.add(rows)
                except ManagedCliError as error:
                    await in_turn.turn(0)  # replies that came before it are recorded before it can end the run
                    is_lost = await self._pool.is_to_blame(member, error, outages)
                    if is_lost and servers_lost < MOST_SERVERS_LOST:
                        continue
                    await self._record_failure(task, error, attempts=sends.count)
                    self._count_failure(error)
                else:
                    self._failures_in_a_row = 0
                    self.progress.count_rows(rows, *lengths)
                return

    def _count_failure(self, error: ManagedCliError) -> None:
        """One more sample that failed although it was tried; the run winds down where the user's limit is reached."""
        self._failures += 1
        self._failures_in_a_row += 1
        for option, limit, count, words in (
            ("--max-failures", self.config.max_failures, self._failures, "have failed"),
            (
                "--max-consecutive-failures",
                self.config.max_consecutive_failures,
                self._failures_in_a_row,
                "have failed one after the other",
            ),
        ):
            if limit is not None and count >= limit and self._limit_reached is None:
                self._limit_reached = TooManyFailures(
                    f"{count} samples {words}, as many as {option} allows",
                    details=[f"the last: {error.message}"],
                    hint="once the cause is mended, --resume --retry-failed goes on and tries them again",
                )
                self._stop.wind_down()

    async def _record_failure(self, task: Sample, error: ManagedCliError, *, attempts: int) -> None:
        failure = {
            "sample_id": task.sample_id,
            "source": task.source,
            "line": task.line,
            "error": type(error).__name__,
            "message": f"{error.message}; sample {task.sample_id} ({task.source}), nothing of it was recorded",
            "details": list(error.details),
            "hint": error.hint,
            "attempts": attempts,
        }
        self.progress.count_failure(error)
        await _to_the_end(lambda: self._output.record_failure(failure))

    async def _write_due(self) -> None:
        """As `_write_pending`, unless another worker has written the full shard while this one waited its turn."""
        async with self._writing:
            if self._output.shard_due:
                await self._write_taken()

    async def _write_pending(self) -> None:
        """Everything buffered is on disk as a shard."""
        async with self._writing:
            await self._write_taken()

    async def _write_taken(self) -> None:
        pending = self._output.take_pending()
        await _to_the_end(lambda: self._output.write_shard(pending))

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._write_pending()

    async def _obey_stop(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """After the first signal wait out the grace, or the second signal; then cancel what is still in flight."""
        await self._stop.asked.wait()
        self._pool.stop_waiting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.grace_seconds):
                await self._stop.now.wait()
        for worker in workers:
            worker.cancel()


def read_ahead(tasks: Iterator[AnyTask]) -> Iterator[AnyTask]:
    """The same tasks, up to `READ_AHEAD` of them read at once, in less time for each.

    An input that cannot be read any further is told after the tasks before that.
    """
    while True:
        taken: list[AnyTask] = []
        latest = time.monotonic() + READ_AHEAD_SECONDS
        try:
            for task in itertools.islice(tasks, READ_AHEAD):
                taken.append(task)
                if time.monotonic() > latest:
                    break
        except ManagedCliError:
            yield from taken
            raise
        if not taken:
            return
        yield from taken


def collect_rarely() -> None:
    """Let Python look for reference cycles seldom, and never among what was loaded before the run.

    Replies and rows are lists of numbers without cycles: looking through those in flight at the usual pace took a fifth
    of a run's time (256 in flight, 8 choices of 512 tokens), and half of it for TRL's nested lists.
    """
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_ALLOCATIONS, 50, 50)


async def _to_the_end(work: Callable[[], None]) -> None:
    """`work()` in a thread, waited for even when cancelled: what it writes is on disk before anything else happens."""
    writing = asyncio.ensure_future(asyncio.to_thread(work))  # ends before this function does
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError as error:
            cancelled = error
    writing.result()
    if cancelled is not None:
        raise cancelled


def _first(errors: BaseExceptionGroup[ManagedCliError]) -> ManagedCliError:
    """The first error inside a group of groups."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
