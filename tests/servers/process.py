"""Fake servers for tests: started as processes, stopped by id, their word for what they got and gave."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.servers.faulty import Setting
from tests.servers.tokenizer import shared_tokenizer_directory

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 30.0
STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A fake server that listens."""

    kind: str
    url: str
    tokenizer_dir: Path
    process: subprocess.Popen[str]
    record_file: Path

    def records(self) -> list[dict[str, Any]]:
        """Every generation request so far, as `number, path, status, fault, body, reply`; in the order answered."""
        if not self.record_file.exists():
            return []
        return [json.loads(line) for line in self.record_file.read_text(encoding="utf-8").splitlines()]

    def stats(self) -> dict[str, Any]:
        """`requests` by path, `generations`, `in_flight`, `max_in_flight`, `connections`, `faults`."""
        with urllib.request.urlopen(f"{self.url}/_fake/stats", timeout=START_SECONDS) as reply:
            counts: dict[str, Any] = json.load(reply)
        return counts


@contextmanager
def running_server(kind: str, *options: object, record: bool = True) -> Iterator[RunningServer]:
    """A server of that kind for the length of the block; `options` as on the command line of `tests.servers.fake`.

    Raises:
        RuntimeError: it did not start; the message holds what it wrote on stderr.
    """
    arguments = [str(option) for option in options]
    with tempfile.TemporaryDirectory(prefix="managed-cli-fake-", ignore_cleanup_errors=True) as directory:
        record_file, errors_file = Path(directory, "record.jsonl"), Path(directory, "stderr.txt")
        command = [sys.executable, "-m", "tests.servers.fake", kind, *arguments]
        if record:
            command += ["--record", str(record_file)]
        with errors_file.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            url = _wait_for_address(process)
            if url is None:
                written = errors_file.read_text(encoding="utf-8")
                raise RuntimeError(f"fake {kind} server did not start: {' '.join(command)}\n{written}")
            tokenizer = Path(arguments[arguments.index("--tokenizer") + 1]) if "--tokenizer" in arguments else None
            yield RunningServer(kind, url, tokenizer or shared_tokenizer_directory(), process, record_file)
        except BaseException:
            sys.stderr.write(errors_file.read_text(encoding="utf-8"))
            raise
        finally:
            stop(process)


@dataclass(frozen=True, slots=True)
class FaultyServers:
    """Ports with one fault each, in front of one sound server; `urls` by the names of their settings."""

    urls: Mapping[str, str]
    sound: RunningServer
    process: subprocess.Popen[str]

    def hits(self, name: str, act: str = "") -> dict[str, int]:
        """How often each prompt, or each path, met the fault of that port; after `act`, "down" or "up", if given."""
        with urllib.request.urlopen(f"{self.urls['control']}/{name}/{act}", timeout=START_SECONDS) as reply:
            counts: dict[str, int] = json.load(reply)
        return counts


@contextmanager
def faulty_servers(sound: RunningServer, settings: Mapping[str, Setting]) -> Iterator[FaultyServers]:
    """A port for each setting in front of `sound`, for the length of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.faulty", sound.url],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({name: asdict(setting) for name, setting in settings.items()}))
        process.stdin.close()
        yield FaultyServers(json.loads(process.stdout.readline()), sound, process)
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends the process by its id: first politely, then for good."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_for_address(process: subprocess.Popen[str]) -> str | None:
    """The address that the server prints; None if it ends, or says nothing for too long."""
    assert process.stdout is not None
    killer = threading.Timer(START_SECONDS, process.kill)
    killer.start()
    try:
        line = process.stdout.readline()
    finally:
        killer.cancel()
    return line.removeprefix("listening ").strip() if line.startswith("listening ") else None
