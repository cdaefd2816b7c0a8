"""`managed-cli` in a process that watches its own event loop: `stalled.py REPORT ARGUMENTS…`.

REPORT is JSON: the callbacks that held the loop longest, and how late a task came that asks for every second
millisecond, in milliseconds. A late task has waited for everything that was ready before it.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import time
from pathlib import Path
from typing import Any

from managed_cli.cli.app import run
from managed_cli.rollout.runner import Runner

PERIOD_SECONDS = 0.002
KEPT = 20


def name_of(handle: Any) -> str:  # Any: a handle of asyncio
    """What the handle calls; a task by its coroutine. Never by `repr`, which reads what is not there yet."""
    task = getattr(handle._callback, "__self__", None)
    named = task.get_coro() if isinstance(task, asyncio.Task) else handle._callback
    return str(getattr(named, "__qualname__", type(named).__name__))


class Watch:
    """The longest callbacks, and the latest heartbeats."""

    def __init__(self) -> None:
        self.callbacks: list[tuple[float, str]] = []
        self.late: list[float] = []
        self.beats = 0

    def callback(self, milliseconds: float, what: str) -> None:
        """One callback that took so long."""
        push = heapq.heappush if len(self.callbacks) < KEPT else heapq.heappushpop
        push(self.callbacks, (milliseconds, what))

    async def beat(self) -> None:
        """Ask for every second millisecond, and note how late it comes."""
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(PERIOD_SECONDS)
            self.beats += 1
            self.late.append(1000.0 * (time.perf_counter() - asked - PERIOD_SECONDS))


def main() -> int:
    """The exit code of `managed-cli`."""
    report, *arguments = sys.argv[1:]
    watch, plain_run, plain_work = Watch(), asyncio.Handle._run, Runner.run

    def timed(handle: Any) -> None:  # Any: a handle of asyncio
        started = time.perf_counter()
        plain_run(handle)
        took = 1000.0 * (time.perf_counter() - started)
        if took > 5.0:
            watch.callback(took, name_of(handle))

    async def watched(runner: Runner) -> None:
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        beating = asyncio.create_task(watch.beat())
        try:
            await plain_work(runner)
        finally:
            beating.cancel()
            asyncio.Handle._run = plain_run  # type: ignore[method-assign]

    Runner.run = watched  # type: ignore[method-assign]
    code = run(arguments)
    late = sorted(watch.late, reverse=True)
    found = {
        "callbacks_ms": sorted(watch.callbacks, reverse=True),
        "late_ms": late[:KEPT],
        "late_p99_ms": late[len(late) // 100] if late else None,
        "beats": watch.beats,
    }
    Path(report).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
