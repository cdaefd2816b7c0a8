"""`managed-cli inspect` as a person or a script runs it: a process, on a pipe or on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import Any

from tests.storage.rows import REPOSITORY

ESCAPE = "\x1b"


def environment(**changes: str) -> dict[str, str]:
    ours = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"}
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return {**kept, "TERM": "xterm-256color", "PAGER": "cat", **changes}


def inspect(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "managed_cli", "inspect", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment(**changes)
    )


def shown(*arguments: object, **changes: str) -> str:
    run = inspect(*arguments, **changes)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return run.stdout


def document(*arguments: object) -> dict[str, Any]:  # Any: JSON values
    value: dict[str, Any] = json.loads(shown(*arguments, "--json"))  # Any: as above
    return value


def on_a_terminal(*arguments: object, columns: int = 80, **changes: str) -> str:
    """What the command writes to a pseudo-terminal of that width."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "managed_cli", "inspect", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment(COLUMNS=str(columns), **changes),
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: EIO once the other side is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait() == 0, process.communicate()[1]
    assert process.stderr is not None
    process.stderr.close()
    return written.decode().replace("\r\n", "\n")
