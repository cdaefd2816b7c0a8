"""`managed-cli rollout` as a person or a script runs it: a process with its own stdin, stdout, stderr and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.rollout.inputs_on_disk import json_lines
from tests.servers.process import REPOSITORY, RunningServer

RUN_SECONDS = 60.0
"""No run of these tests takes longer, however busy the machine is."""

POLL_SECONDS = 0.01
"""Between looks at a condition that another process brings about."""

EARLIER_RUNS = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "HF_TOKEN"}
"""Variables that would change what a run shows."""


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without the network: a tokenizer is never looked for outside."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in EARLIER_RUNS and not name.startswith("MANAGED_CLI_")
    }
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY), **changes}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "managed_cli", *map(str, arguments)]


def at(server: RunningServer) -> list[str]:
    """The options that name a fake server."""
    return ["--server-type", server.kind, "--base-url", server.url]


def rollout(
    *arguments: object, cwd: Path, stdin: bytes = b"", seconds: float = RUN_SECONDS, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The run, ended; relative paths are those of `cwd`."""
    done = subprocess.run(
        command("rollout", *arguments),
        input=stdin,
        capture_output=True,
        check=False,
        cwd=cwd,
        env=environment(**changes),
        timeout=seconds,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    )


def many_rollouts(
    runs: Sequence[Sequence[object]], *, cwd: Path, **changes: str
) -> list[subprocess.CompletedProcess[str]]:
    """Several runs in one process, one after the other: as `rollout`, in a fraction of the time."""
    arguments = [["rollout", *map(str, run)] for run in runs]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.many_runs"],
        input=json.dumps(arguments),
        capture_output=True,
        check=True,
        text=True,
        cwd=cwd,
        env=environment(**changes),
        timeout=RUN_SECONDS,
    )
    results = zip(arguments, json.loads(done.stdout), strict=True)
    return [subprocess.CompletedProcess(run, code, out, err) for run, (code, out, err) in results]


@contextmanager
def started_rollout(*arguments: object, cwd: Path, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """The run, under way; it is killed where it outlives the block or the time any run may take."""
    process = subprocess.Popen(
        command("rollout", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=environment(**changes),
    )
    killer = threading.Timer(RUN_SECONDS, process.kill)
    killer.start()
    try:
        yield process
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def eventually(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Return once `condition` holds.

    Raises:
        AssertionError: it does not in the time that any run may take, or `process` has ended before.
    """
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        if process is not None and process.poll() is not None:
            assert condition(), f"the run ended: {process.communicate()}"
            return
        time.sleep(POLL_SECONDS)


def write_prompts(path: Path, records: Sequence[object]) -> Path:
    path.write_bytes(json_lines(records))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:  # Any: columns' values
    """All rows of a file or a directory of shards, metadata parsed, in the order of sample ids and choices."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in rows:
        row["metadata"] = json.loads(row["metadata"])
    return sorted(rows, key=lambda row: (row["sample_id"], row["choice_index"], row["node_id"]))


def failures_of(path: Path) -> list[dict[str, Any]]:  # Any: JSON values
    failures = path.with_name(path.name + ".failures.jsonl")
    return [json.loads(line) for line in failures.read_text("utf-8").splitlines()] if failures.exists() else []


def sent_to(server: RunningServer) -> list[dict[str, Any]]:  # Any: as in `records`
    """The sampling requests so far, without the probes that come before the first sample."""
    return [entry for entry in server.records() if isinstance(entry["body"]["prompt"], list)]


def sent_to_any(server: RunningServer) -> int:
    """How many sampling requests of any kind the server has seen."""
    return int(server.stats()["generations"])


def one_message(stderr: str) -> str:
    """`stderr`, which is one message and neither a traceback nor a warning."""
    assert stderr.count("rror: ") == 1, stderr
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    return stderr


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """`inspect --check` of `path`."""
    return subprocess.run(
        command("inspect", "--check", path), capture_output=True, text=True, check=False, env=environment()
    )
