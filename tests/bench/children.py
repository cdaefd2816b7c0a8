"""Processes whose cost is measured: pinned to a core, their own CPU time and peak memory read when they end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.canned import REPOSITORY

MEASURED_CORE, SERVER_CORE = 0, 1
"""The recorder has a core for itself, as far as the machine allows, and the replay server another."""

RUN_SECONDS = 1500.0


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What one process has used. Seconds; megabytes of 10^6 bytes."""

    cpu: float
    wall: float
    peak_mb: float


def pin(core: int) -> None:
    """This process runs on that core alone, where the machine has it."""
    if core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})


def environment() -> dict[str, str]:
    """This process's environment, without the network and without settings of the recorder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MANAGED_CLI_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1"}


def measured(command: Sequence[object], *, cwd: Path, core: int = MEASURED_CORE) -> Cost:
    """The cost of a command that succeeds.

    Raises:
        RuntimeError: it does not; the message holds what it wrote.
    """
    with (cwd / "stdout.txt").open("wb+") as out, (cwd / "stderr.txt").open("wb+") as err:
        started = time.monotonic()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=lambda: pin(core),
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            err.seek(0)
            said = err.read().decode("utf-8", "replace")
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{said}")
    return Cost(cpu=usage.ru_utime + usage.ru_stime, wall=wall, peak_mb=usage.ru_maxrss * 1024 / 1e6)


@contextlib.contextmanager
def replay_server(kind: str, tokenizer: Path, *warm: str, replies: int = 48) -> Iterator[str]:
    """The address of a replay server for the length of the block; `warm` are sizes such as `8x512`."""
    options = [option for size in warm for option in ("--warm", size)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.bench.replay",
            kind,
            "--tokenizer",
            tokenizer,
            "--replies",
            str(replies),
            *options,
        ],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: pin(SERVER_CORE),
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("listening "):
            raise RuntimeError(f"the replay server for {kind} did not start")
        yield line.removeprefix("listening ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()
