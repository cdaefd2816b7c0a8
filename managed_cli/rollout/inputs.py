"""Lines of an input, numbered: plain, gzip or zstd, from a file, a pipe or stdin. No line is understood here."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from managed_cli.errors import InputError

STDIN_ARGUMENT = "-"
"""What stands for stdin on the command line."""

STDIN_NAME = "<stdin>"
"""What stdin is called in messages and rows."""

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line that is read: no context window holds more text, and a longer one could fill the memory."""

READ_BYTES = 1024 * 1024
"""How much is read from the disk at once: large enough that system calls do not count."""

ZSTD_WINDOW_FAULT = "requires too much memory"
"""What libzstd says of a window over 128 MiB, which `zstd --long=28` and more make; Arrow cannot lift the limit."""

UTF8_BOM = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PARQUET_MAGIC = b"PAR1"
MAGIC_BYTES = 4
"""Length of the longest magic number above."""


@dataclasses.dataclass(frozen=True, slots=True)
class InputSource:
    """A file that can be read more than once, and what it is called.

    Attributes:
        path: where the bytes are; a temporary file for stdin and pipes.
        name: the name in messages: the path as the user wrote it, or `<stdin>`.
    """

    path: Path
    name: str

    @classmethod
    def of(cls, path: Path | InputSource) -> InputSource:
        """`path` as a source of that name; a source as it is."""
        return path if isinstance(path, InputSource) else cls(path, str(path))

    @property
    def label(self) -> str:
        """The name in rows: the file's name alone, so that rows do not tell where the run was started."""
        return Path(self.name).name


@contextlib.contextmanager
def input_source(argument: str) -> Iterator[InputSource]:
    """The source for a command-line argument; `-` and pipes are spooled first, so that they can be read twice."""
    if argument == STDIN_ARGUMENT:
        with spooled_stdin() as source:
            yield source
    elif _is_stream(Path(argument)):
        with Path(argument).open("rb") as stream, _spooled(stream, argument) as source:
            yield source
    else:
        yield InputSource(Path(argument), argument)


@contextlib.contextmanager
def spooled_stdin() -> Iterator[InputSource]:
    """All of stdin as a temporary file, removed at the end.

    Raises:
        InputError: the temporary directory does not take it.
    """
    with _spooled(sys.stdin.buffer, STDIN_NAME) as source:
        yield source


@contextlib.contextmanager
def _spooled(stream: BinaryIO, name: str) -> Iterator[InputSource]:
    with tempfile.NamedTemporaryFile(prefix="managed-cli-", suffix=".jsonl") as spool:
        try:
            shutil.copyfileobj(stream, spool, READ_BYTES)
            spool.flush()
        except OSError as error:
            raise InputError(
                f"{name} cannot be kept in {spool.name}: {error.strerror}",
                hint="it is read twice; `TMPDIR` names another directory for it",
            ) from error
        yield InputSource(Path(spool.name), name)


def _is_stream(path: Path) -> bool:
    """Whether `path` can be read only once: a FIFO, a socket or a device."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # opening it says what is wrong, better than this could
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def numbered_lines(source: InputSource) -> Iterator[tuple[int, bytes]]:
    """Physical lines from 1, with their line ends, without a byte order mark.

    Of a line over `MAX_LINE_BYTES` only the start is given; `is_overlong` tells.

    Raises:
        InputError: the file is missing, a directory, unreadable, or its compressed data is broken.
    """
    number = 0
    try:
        with _opened(source) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES and is_overlong(line):
                    _skip_line(stream)
                yield number, line.removeprefix(UTF8_BOM) if number == 1 else line
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{source.name} cannot be read: {error.strerror}") from error
        # An OSError without a number is not the system's: `gzip.BadGzipFile`, or what Arrow raises for zstd.
        raise _broken_compression(source, number, str(error)) from error


def _broken_compression(source: InputSource, lines_read: int, reason: str) -> InputError:
    if ZSTD_WINDOW_FAULT in reason:
        return InputError(
            f"{source.name} is compressed with a longer zstd window than can be read here",
            details=[reason],
            hint="pipe it in: `zstd -dc --long=31 FILE | managed-cli rollout -`",
        )
    return InputError(
        f"{source.name}: the compressed data is broken after line {lines_read}",
        details=[reason],
        hint="`gzip --test` or `zstd --test` checks the file; copy or compress it again",
    )


def is_overlong(line: bytes) -> bool:
    """Whether `line` is only the start of a line over `MAX_LINE_BYTES`."""
    return len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(READ_BYTES)) and not rest.endswith(b"\n"):
        pass


@contextlib.contextmanager
def _opened(source: InputSource) -> Iterator[BinaryIO]:
    """The decompressed bytes; compression is told by the first bytes, not by the name."""
    try:
        file = io.BufferedReader(io.FileIO(source.path), READ_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{source.name}: there is no such file", hint="`-` reads the prompts from stdin") from error
    except IsADirectoryError as error:
        raise InputError(f"{source.name} is a directory, expected a file of JSON lines") from error
    with file:
        magic = file.peek(MAGIC_BYTES)[:MAGIC_BYTES]
        if magic.startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield io.BufferedReader(cast(io.RawIOBase, unzipped), READ_BYTES)
        elif magic == ZSTD_MAGIC:
            with pa.input_stream(file, compression="zstd") as unzipped:
                yield io.BufferedReader(unzipped, READ_BYTES)
        else:
            yield file
