"""Lines of an input, numbered: plain, gzip or zstd, from a file, a pipe or stdin. No line is understood here."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib
import io
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from managed_cli.errors import InputError

STDIN_ARGUMENT = "-"
"""What stands for stdin on the command line."""

STDIN_NAME = "<stdin>"
"""What stdin is called in messages and rows."""

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line that is read: no context window holds more text, and a longer one could fill the memory."""

READ_BYTES = 1024 * 1024
"""How much is read from the disk at once: large enough that system calls do not count."""

ZSTD_READ_BYTES = 64 * 1024
"""Compressed bytes taken at once: all they hold is in memory together, and text can shrink a thousandfold."""

ZSTD_MAX_WINDOW_BYTES = 2**31
"""Largest window there is, so that files written with `zstd --long=31` can be read."""

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
                if is_overlong(line):
                    _skip_line(stream)
                yield number, line.removeprefix(UTF8_BOM) if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{source.name}: the compressed data is broken after line {number}",
            details=[str(error)],
            hint="`gzip --test` or `zstd --test` checks the file; copy or compress it again",
        ) from error
    except OSError as error:
        raise InputError(f"{source.name} cannot be read: {error.strerror}") from error


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
            yield io.BufferedReader(_ZstdReader(file, source.name), READ_BYTES)
        elif magic == PARQUET_MAGIC:
            raise InputError(
                f"{source.name} is a Parquet file, expected JSON lines",
                hint="`duckdb -c \"copy (from 'FILE') to 'prompts.jsonl' (format json)\"` writes one as JSON lines",
            )
        else:
            yield file


class _ZstdReader(io.RawIOBase):
    """The decompressed bytes of one or more zstd frames.

    `zstandard.stream_reader` ends a cut file silently; this raises EOFError, as gzip does.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        try:
            self._zstandard: Any = importlib.import_module("zstandard")  # Any: an optional package
        except ImportError as error:
            raise InputError(
                f"{name} is compressed with zstd, and the package `zstandard` is not installed",
                hint="`pip install zstandard`, or pipe it in: `zstd -dc FILE | managed-cli rollout -`",
            ) from error
        self._file = file
        self._frame: Any = None  # Any: `zstandard.ZstdDecompressionObj`; None between frames
        self._ready = b""
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:  # Any: `collections.abc.Buffer` comes with Python 3.12
        """How many bytes were written into `buffer`; 0 at the end."""
        while self._position == len(self._ready):
            compressed = self._left_over() or self._file.read(ZSTD_READ_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the zstd data ends before its end mark")
                return 0
            self._ready, self._position = self._decompressed(compressed), 0
        count = min(len(buffer), len(self._ready) - self._position)
        buffer[:count] = self._ready[self._position : self._position + count]
        self._position += count
        return count

    def _left_over(self) -> bytes:
        """Bytes after the end of a frame, which begin the next one."""
        if self._frame is None or not self._frame.eof:
            return b""
        rest: bytes = self._frame.unused_data
        self._frame = None
        return rest

    def _decompressed(self, compressed: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW_BYTES).decompressobj()
        try:
            text: bytes = self._frame.decompress(compressed)
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        return text
