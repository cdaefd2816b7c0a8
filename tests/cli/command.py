"""`managed-cli inspect` as a person or a script runs it: a process, on a pipe or on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.cli.terminal import written_to_a_terminal
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
    command = [sys.executable, "-m", "managed_cli", "inspect", *map(str, arguments)]
    return written_to_a_terminal(command, environment(COLUMNS=str(columns), **changes))
