"""Files of one kind into one file, without decoding and encoding their rows again.

The bytes of row groups are copied as they are stored, every page checked on the way, and a footer is written that says
where they lie now. What our own writer would not write so today, and runs of row groups that are small enough to be
one, are decoded and encoded: whatever is wrong with them is found by reading them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from managed_cli.errors import OutputError
from managed_cli.storage.file_metadata import File, RowGroup, Template, find_footer, moved
from managed_cli.storage.footer import Footer
from managed_cli.storage.pages import DamagedPages, NotVouchedFor
from managed_cli.storage.parquet import is_small, parquet_writer, refuse_other_count, whole_file, write_row_groups
from managed_cli.storage.reader import PARQUET_MAGIC, described_files, read_faults_told
from managed_cli.storage.schema import ROLLOUTS, RowFormat
from managed_cli.storage.thrift import parse_struct

PIECE_BYTES = 256 * 1024
"""Bytes in memory at a time, which are still in the processor's cache when they are written."""

_NOTHING_PUT = "the file stays as it is, and nothing was put in its place"


def write_joined(path: Path, files: Iterable[Path], footer: Footer, row_format: RowFormat = ROLLOUTS) -> None:
    """`path` is a complete Parquet file of all rows of `files`, in order, flushed to the disk itself.

    Memory is a fraction of a MB, and one row group where small ones are made one; and 3 kB of footer a row group.

    Raises:
        OSError: the disk is full, read-only, …; `path` is then gone.
        OutputError: one of `files` is damaged, or they have not the rows that `footer` counts; likewise.
    """
    with whole_file(path) as target:
        joining = _Joining(target, Template.of(footer, row_format), row_format)
        for file in files:
            joining.add(file)
        refuse_other_count(joining.end(), footer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A row group that waits for what follows it.

    Attributes:
        index: its number in the file; None for all that are there.
        can_be_copied: as far as its footer says.
    """

    path: Path
    index: int | None
    can_be_copied: bool


class _Joining:
    """A file that grows by row groups at the end of `target`."""

    def __init__(self, target: BinaryIO, template: Template, row_format: RowFormat) -> None:
        self._target = target
        self._template = template
        self._row_format = row_format
        self._held: list[_Held] = []
        self._rows = 0
        self._row_groups: list[bytes] = []
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        target.write(PARQUET_MAGIC)

    def add(self, path: Path) -> None:
        """The rows of the file `path` follow, or are held until the next ones are known."""
        with _opened(path) as source:
            with read_faults_told(path):
                found = find_footer(source)
            if found is None or not self._template.is_of(found[0]):
                self._held.append(_Held(path, None, can_be_copied=False))
                return
            footer, footer_begin = found
            for index, written in enumerate(footer[File.ROW_GROUPS][1].values):
                group = self._template.find_row_group(written, footer_begin)
                if group is not None and not is_small(group.rows, group.arrow_size):
                    self._settle_held()
                    if self._has_copied(group, index, path, source):
                        continue
                    group = None
                self._held.append(_Held(path, index, can_be_copied=group is not None))

    def end(self) -> int:
        """How many rows came together; the file is complete."""
        self._settle_held()
        self._target.write(self._template.end_of_file(self._rows, self._row_groups))
        return self._rows

    def _settle_held(self) -> None:
        held, self._held = self._held, []
        if held and not (len(held) == 1 and held[0].can_be_copied and self._has_copied_alone(held[0])):
            self._encode(held)

    def _has_copied_alone(self, held: _Held) -> bool:
        with _opened(held.path) as source:
            with read_faults_told(held.path):
                found = find_footer(source)
            if found is None or held.index is None or held.index >= len(found[0][File.ROW_GROUPS][1].values):
                return False  # the file has changed, which reading it tells
            footer, footer_begin = found
            group = self._template.find_row_group(footer[File.ROW_GROUPS][1].values[held.index], footer_begin)
            return group is not None and self._has_copied(group, held.index, held.path, source)

    def _has_copied(self, group: RowGroup, index: int, path: Path, source: BinaryIO) -> bool:
        """Whether `group`, number `index` of `path`, is at the end now; without having to be decoded."""
        start = self._target.tell()
        try:
            for piece in _pieces(group, index, path, source, self._buffer):
                self._target.write(piece)
        except NotVouchedFor:
            self._target.seek(start)
            self._target.truncate()
            return False
        self._row_groups.append(group.moved_to(start, len(self._row_groups)))
        self._rows += group.rows
        return True

    def _encode(self, held: Sequence[_Held]) -> None:
        """Write the rows of `held` as a file of their own at the end, of which only the row groups stay."""
        start = self._target.tell() - len(PARQUET_MAGIC)
        self._target.seek(start)
        overwritten = self._target.read(len(PARQUET_MAGIC))  # by that file's magic
        self._target.seek(start)
        with parquet_writer(self._target, self._row_format) as writer:
            self._rows += write_row_groups(writer, _batches(held, self._row_format), self._row_format)
        found = find_footer(self._target, start)
        assert found is not None, "pyarrow writes footers that end where they say"
        footer, footer_begin = found
        for written in footer[File.ROW_GROUPS][1].values:
            self._row_groups.append(moved(parse_struct(written)[0], start, len(self._row_groups)))
        self._target.seek(start)
        self._target.write(overwritten)
        self._target.seek(footer_begin)
        self._target.truncate()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with read_faults_told(path):
        file = path.open("rb")
    with file:
        yield file


def _pieces(
    group: RowGroup, index: int, path: Path, source: BinaryIO, buffer: memoryview
) -> Iterator[bytes | memoryview]:
    """All bytes of `group`, which stands in `source`, as `ColumnChunk.pieces` gives them."""
    for chunk in group.chunks:
        try:
            with read_faults_told(path):
                yield from chunk.pieces(source, buffer)
        except DamagedPages as error:
            raise OutputError(
                f"`{path}` cannot be read: {error}",
                details=(f"it is in row group {index}, column {chunk.name}", _NOTHING_PUT),
            ) from error


def _batches(held: Sequence[_Held], row_format: RowFormat) -> Iterator[pa.RecordBatch]:
    """The rows of `held`; one file at a time is described, since what footers say adds up."""
    for path, of_file in itertools.groupby(held, key=lambda each: each.path):
        for file in described_files([path], row_format):
            for each in of_file:
                for batch in file.iter_batches(row_group=each.index, threads=False):
                    yield _of_schema(batch, row_format, path)


def _of_schema(batch: pa.RecordBatch, row_format: RowFormat, path: Path) -> pa.RecordBatch:
    """`batch` with the nullability of our columns, which another program may have left out."""
    if batch.schema.equals(row_format.schema):
        return batch
    try:
        return batch.cast(row_format.schema)
    except ValueError as error:  # of pyarrow too
        raise OutputError(f"`{path}` cannot be read: {error}", details=(_NOTHING_PUT,)) from error
