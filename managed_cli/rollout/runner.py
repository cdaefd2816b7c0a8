"""The run: tasks in, rows out, one task group for everything that happens at once.

A sample's rows are buffered in the same step in which its reply is understood, so nothing that was received can be
lost to a fault elsewhere; what is buffered goes to disk by whole shards, and at the end, however it comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from managed_cli.backends.base import refusal_is_final
from managed_cli.errors import AlignmentError, ConfigError, InputError, ManagedCliError, ServerError
from managed_cli.managed.servers import Server
from managed_cli.node import SequenceNode
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import Progress
from managed_cli.rollout.sample_run import roll_out, sampled_tokens
from managed_cli.rollout.samples import Task
from managed_cli.rollout.stop import Stop
from managed_cli.storage.shards import ShardedOutput

FLUSH_SECONDS = 15.0
"""Rows do not wait longer than this for their shard to fill."""


class Runner:
    """Samples every task once and hands its rows to the output.

    Args:
        tasks: read as they are needed.
        output: open; this class neither finishes nor closes it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tasks: Iterator[Task],
        server: Server,
        output: ShardedOutput,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self.config = config
        self.progress = progress
        self._tasks = tasks
        self._server = server
        self._output = output
        self._stop = stop
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Return when every task is settled, or the stop was obeyed; what is finished is on disk.

        Raises:
            ServerUnreachable, ServerRefused: no further request can succeed.
            OutputError: rows cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                workers = [tasks.create_task(self._work()) for _ in range(self.config.samples_in_flight())]
                helpers = [tasks.create_task(self._flush_often()), tasks.create_task(self._obey_stop(workers))]
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

    async def _work(self) -> None:
        """Take one task after the other until there are none or the run is to stop."""
        for task in self._tasks:
            if self._stop.asked.is_set():
                return
            self.progress.in_flight[task.sample_id] = time.monotonic()
            try:
                rows = await roll_out(task, self._server, self.config)
            except (ServerError, InputError, AlignmentError, ConfigError) as error:
                if isinstance(error, ServerError) and refusal_is_final(error):
                    raise
                await self._record_failure(task, error)
            else:
                self._output.add(rows)
                self._count(rows)
            finally:
                self.progress.in_flight.pop(task.sample_id, None)
            if self._output.shard_due:
                await self._write_pending()

    def _count(self, rows: Sequence[SequenceNode]) -> None:
        progress = self.progress
        sampled = sampled_tokens(rows)
        progress.recorded += 1
        progress.rows += len(rows)
        progress.completion_tokens += sampled
        progress.prompt_tokens += sum(len(row.tokens) for row in rows) - sampled
        for row in rows:
            reason = row.metadata["finish_reason"]
            progress.finish_reasons[reason] = progress.finish_reasons.get(reason, 0) + 1
            fork = row.metadata.get("fork_reason")
            if fork:
                progress.fork_reasons[fork] = progress.fork_reasons.get(fork, 0) + 1

    async def _record_failure(self, task: Task, error: ManagedCliError) -> None:
        self.progress.count_failure(error)
        failure = {
            "sample_id": task.sample_id,
            "source": task.source,
            "error": type(error).__name__,
            "message": error.message,
            "details": list(error.details),
        }
        await asyncio.to_thread(self._output.record_failure, failure)

    async def _write_pending(self) -> None:
        """Everything buffered is on disk as a shard; a cancellation does not interrupt the writing."""
        async with self._writing:
            pending = self._output.take_pending()
            await asyncio.shield(asyncio.to_thread(self._output.write_shard, pending))

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._write_pending()

    async def _obey_stop(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """After the first signal wait out the grace, or the second signal; then cancel what is still in flight."""
        await self._stop.asked.wait()
        try:
            async with asyncio.timeout(self.config.grace_seconds):
                await self._stop.now.wait()
        except TimeoutError:
            pass
        for worker in workers:
            worker.cancel()


def _first(errors: BaseExceptionGroup[ManagedCliError]) -> ManagedCliError:
    """The first error inside a group of groups."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
