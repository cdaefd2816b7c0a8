"""A command on a pseudo-terminal: what it writes there."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence

from tests.storage.rows import REPOSITORY


def all_written_to(ours: int) -> bytes:
    """What comes on this end of a terminal until the other is closed; then it is closed as well."""
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
    return written


def written_to_a_terminal(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """All that the command writes to a terminal, at exit code 0; `COLUMNS` of the variables is its width."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=REPOSITORY, env=dict(variables)
    )
    os.close(theirs)
    written = all_written_to(ours)
    assert process.wait() == 0, process.communicate()[1]
    assert process.stderr is not None
    process.stderr.close()
    return written.decode().replace("\r\n", "\n")
