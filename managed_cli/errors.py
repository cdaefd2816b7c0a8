"""Everything that can go wrong, and whose fault it is.

ManagedCliError                  base: message, detail lines, a hint, an exit code
├── ConfigError                  2  an option or argument that cannot be meant
├── InputError                   5  the prompts: file, line and field are named
├── ServerError                  4  the server's side
│   ├── ServerUnreachable        4  no connection, or it went away before a reply
│   ├── ServerRefused            4  it answered and said no (HTTP 4xx, 5xx)
│   ├── ServerChanged            4  another model, or another context, than the run began with
│   ├── RequestTimedOut          4  it took longer than the user allows for one reply
│   ├── ServerContractError      4  it answered, but not what it promises
│   └── PromptRejected           4  this one prompt cannot be sent there (too long, unknown id)
├── TokenizerError               4  no tokenizer, or one that disagrees with the server
├── TooManyFailures              3  the limit that the user set on failed samples is reached
├── AlignmentError               1  arrays of a row that do not belong together
├── OutputError                  6  the output cannot be written or read, or belongs to another run
├── ContextClosed                2  a managed context used after it was closed or reset
└── Interrupted            130/143  SIGINT or SIGTERM; what is finished is on disk
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

DOCTOR_HINT = "`managed-cli doctor` shows what this server returns, and what to do about it"
"""For breaches of the contract that say no more themselves."""


class ExitCode(enum.IntEnum):
    """What the process says to the shell when it ends."""

    OK = 0
    BUG = 1
    USAGE = 2
    SOME_FAILED = 3
    SERVER = 4
    INPUT = 5
    OUTPUT = 6
    SIGINT = 130
    SIGTERM = 143


class ManagedCliError(Exception):
    """A fault with a place and a remedy; `str()` is the message alone.

    Args:
        message: one line: subject, place, what was expected, what came.
        details: further lines, shown indented.
        hint: what to do about it, one line.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint

    def report(self) -> str:
        """The whole text for a person: `error: …`, the details, the hint."""
        lines = [f"error: {self.message}", *(f"  {line}" for line in self.details)]
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)


class ConfigError(ManagedCliError):
    """An option or argument that cannot be meant."""

    exit_code = ExitCode.USAGE


class InputError(ManagedCliError):
    """Prompts that cannot be read or understood."""

    exit_code = ExitCode.INPUT


class ServerError(ManagedCliError):
    """The server's side of a fault."""

    exit_code = ExitCode.SERVER


class ServerUnreachable(ServerError):
    """No connection, or the server went away before it replied.

    Attributes:
        is_silent: it took the connection, and nothing came in the time that the question has.
    """

    is_silent: bool = False


class ServerRefused(ServerError):
    """The server answered with an HTTP error.

    Attributes:
        status: the HTTP status code.
    """

    def __init__(self, message: str, *, status: int, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, details=details, hint=hint)
        self.status = status


class ServerChanged(ServerError):
    """The server is not what the run began with, or not what the run's other servers are."""


class RequestTimedOut(ServerError):
    """One reply took longer than the user allows; it is not asked for again, since a slow answer is no fault."""


class ServerContractError(ServerError):
    """The server answered, but not what it promises; nothing of the reply is recorded."""


class PromptRejected(ServerError):
    """A prompt that must not be sent to this server: too long, or with an id outside its vocabulary."""


class TokenizerError(ManagedCliError):
    """No tokenizer, or one that does not agree with the server."""

    exit_code = ExitCode.SERVER


class TooManyFailures(ManagedCliError):
    """As many samples have failed as the user allows; the run can be resumed."""

    exit_code = ExitCode.SOME_FAILED


class AlignmentError(ManagedCliError):
    """Tokens, mask and logprobs of one row that do not belong together."""


class OutputError(ManagedCliError):
    """The output cannot be written or read, or belongs to another run."""

    exit_code = ExitCode.OUTPUT


class ContextClosed(ManagedCliError):
    """A managed context was used after it was closed, or a reply came after `reset()`."""

    exit_code = ExitCode.USAGE


class Interrupted(ManagedCliError):
    """The run was stopped by a signal; what was finished is on disk.

    Attributes:
        exit_code: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(
        self, message: str, *, exit_code: ExitCode, details: Sequence[str] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, details=details, hint=hint)
        self.exit_code = exit_code
