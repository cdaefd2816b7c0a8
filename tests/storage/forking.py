"""Recorders that are killed: a process that has imported everything forks one for each request, in milliseconds.

A request is one line of JSON on stdin, `{"path": …, "samples": …, "retry_failed": …, "steps": …}`. The answers are the
pid of the recorder, and how it ended: its exit status, or the negative signal. `steps` makes it kill itself before the
step on the disk of that number; null leaves it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from managed_cli.storage.failures import failure_lines
from managed_cli.storage.schema import record_batch
from managed_cli.storage.standing import SampleStanding
from tests.storage.rows import REPOSITORY, fill, make_sample, opened

ROWS_PER_SHARD = 6

FAILS_FIRST, FAILS_ALWAYS = 5, 7
"""Samples whose number is divisible by it: fail on the first try, or on every try."""

STEPS = {
    os: ("fsync", "truncate", "write"),
    Path: ("rename", "unlink", "rmdir", "touch", "hardlink_to", "mkdir"),
}
"""Whatever changes the disk."""


def record(path: str, count: int, *, retry_failed: bool) -> None:
    """A session that settles every sample that is owed, as a run does."""
    with opened(path, rows_per_shard=ROWS_PER_SHARD, resume=True, retry_failed=retry_failed) as output:
        failed_before = {sample_id for sample_id, _ in failure_lines(output.failures_path)}
        for index in range(count):
            sample_id = f"s-{index}"
            if output.standing(sample_id) is not SampleStanding.OWED:
                continue
            is_first_try = sample_id not in failed_before
            if index % FAILS_ALWAYS == 0 or (index % FAILS_FIRST == 0 and is_first_try):
                output.record_failure({"sample_id": sample_id, "error": "ServerContractError"})
            else:
                fill(output, [sample_of(index)])
        output.finish()


def sample_of(index: int) -> list[Any]:  # Any: SequenceNode, of pydantic
    return make_sample(index, choices=1 + index % 3)


def kill_before_step(number: int) -> None:
    """This process dies before it changes the disk for the `number`-th time, counted from 0."""
    left = number

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:  # Any: whatever `step` takes and gives
        def counted(*args: Any, **named: Any) -> Any:  # Any: as above
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return step(*args, **named)

        return counted

    for owner, names in STEPS.items():
        for name in names:
            setattr(owner, name, counting(getattr(owner, name)))


def serve() -> None:
    """Answer requests until stdin ends."""
    record_batch(sample_of(0))  # pyarrow imports pandas on its first array, where there is one
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if request["steps"] is not None:
                kill_before_step(request["steps"])
            status = 1
            try:
                record(request["path"], request["samples"], retry_failed=request["retry_failed"])
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Recorders:
    """The other end of `serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, path: Path | str, samples: int, *, retry_failed: bool = False, steps: int | None = None) -> int:
        """The pid of a recorder that has just begun."""
        request = {"path": str(path), "samples": samples, "retry_failed": retry_failed, "steps": steps}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def ended(self) -> int:
        """How the recorder that was started last ended; waits for it."""
        return self._answer()

    def run(self, path: Path | str, samples: int, *, retry_failed: bool = False, steps: int | None = None) -> int:
        """How a recorder ended that was let run."""
        self.start(path, samples, retry_failed=retry_failed, steps=steps)
        return self.ended()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def recorders() -> Iterator[Recorders]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.storage.forking"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        yield Recorders(process)
    finally:
        process.communicate()


if __name__ == "__main__":
    serve()
