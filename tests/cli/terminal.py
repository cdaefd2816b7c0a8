"""A command on a pseudo-terminal: what it writes there."""

from __future__ import annotations

import os
import pty
import subprocess

from tests.cli.rollout_command import command, environment


def written_to_a_terminal(*arguments: object, columns: int, **changes: str) -> str:
    """All that the command writes to a terminal of that width, without colour, at exit code 0."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(COLUMNS=str(columns), TERM="xterm-256color", NO_COLOR="1", **changes),
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
