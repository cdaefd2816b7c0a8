"""One writer per output: an flock'ed file that names its holder.

The kernel drops the lock when its process dies, however it dies, so a stale file is never in the way.
The file stays beside an output that did not finish, and goes when it has finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
from pathlib import Path

from managed_cli.errors import OutputError
from managed_cli.storage.layout import LOCK_NAME

_LOCK_TRIES = 10
"""A finishing writer removes the file that we have just opened; each try then begins with a fresh one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """Who holds, or held, a lock.

    Attributes:
        pid: None where the file does not say.
        has_let_go: whether it said itself that it writes no longer, as a process that lives on may.
    """

    pid: int | None
    host: str
    has_let_go: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "another process"

    def may_be_alive(self) -> bool:
        """False once the process has let go or is known to be gone; of another host nothing is known."""
        if self.has_let_go:
            return False
        if self.host != socket.gethostname() or self.pid is None:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it lives, under another user
            return True
        return True


def find_writer(directory: Path) -> Writer | None:
    """Who writes or wrote last in `directory`; None when nobody, or when what was written there is finished."""
    try:
        return _parsed_writer((directory / LOCK_NAME).read_text(encoding="utf-8"))
    except OSError:
        return None


def _parsed_writer(text: str) -> Writer:
    try:
        facts = json.loads(text)
        return Writer(pid=int(facts["pid"]), host=str(facts["host"]), has_let_go=facts.get("has_let_go") is True)
    except (ValueError, KeyError, TypeError):  # being written at this moment
        return Writer(pid=None, host=socket.gethostname())


class WriterLock:
    """The lock on one directory, held until `release`.

    Attributes:
        found: a file of an earlier writer stood there: what it wrote is not finished.
    """

    def __init__(self, path: Path, descriptor: int, *, found: bool) -> None:
        self.found = found
        self._path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, directory: Path) -> WriterLock:
        """The lock on `directory`, which exists.

        Raises:
            OutputError: another process holds it, or this one does already.
            OSError: the file cannot be made.
        """
        path = directory / LOCK_NAME
        for _ in range(_LOCK_TRIES):
            directory.mkdir(exist_ok=True)
            found = path.exists()
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # a writer that finished has just removed the directory
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = _parsed_writer(os.pread(descriptor, 4096, 0).decode("utf-8", "replace"))
                os.close(descriptor)
                raise OutputError(
                    f"`{directory}/` is being written by {holder}",
                    details=("nothing there was touched",),
                    hint="wait until it ends, or choose another `--out`",
                ) from error
            if _is_same_file(descriptor, path):
                lock = cls(path, descriptor, found=found)
                try:
                    lock._name_holder()
                except OSError:
                    lock.release(remove=not found)
                    raise
                return lock
            os.close(descriptor)
        raise OutputError(f"`{directory}/` is being written by other processes in turn; none of it was touched")

    def _name_holder(self, *, has_let_go: bool = False) -> None:
        assert self._descriptor is not None
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "has_let_go": has_let_go}
        text = json.dumps(facts).encode()
        os.pwrite(self._descriptor, text, 0)  # first, as what is cut off first may find no room again on a full disk
        os.ftruncate(self._descriptor, len(text))

    def is_in_place(self) -> bool:
        """Whether the lock still stands where it was made: false once the directory was removed or replaced."""
        return self._descriptor is not None and _is_same_file(self._descriptor, self._path)

    def release(self, *, remove: bool) -> None:
        """Let go; `remove` also takes the file away, as a finished output has none. Twice is once."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # a full or read-only disk: the file is stale then, and in nobody's way
            if not remove:
                self._name_holder(has_let_go=True)
            elif self.is_in_place():
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the file that was opened, and not one made after it was removed."""
    try:
        named = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(descriptor), named)
