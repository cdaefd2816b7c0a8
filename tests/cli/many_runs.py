"""Many runs of the command line in one process, for tests that need many: the imports are paid for once.

Reads a JSON list of argument lists from stdin; prints a JSON list of `[exit code, stdout, stderr]`.
"""

import contextlib
import io
import json
import sys

from managed_cli.cli.app import run


def captured(arguments: list[str]) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run(arguments)
    return code, stdout.getvalue(), stderr.getvalue()


if __name__ == "__main__":
    json.dump([captured(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
