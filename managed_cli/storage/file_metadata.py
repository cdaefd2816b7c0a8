"""The footer of a Parquet file and what it says of row groups: found, held against ours, written for another place."""

from __future__ import annotations

import enum
import io
import os
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.storage.footer import Footer
from managed_cli.storage.pages import Column, ColumnChunk, Leaf, NotVouchedFor, has_shape
from managed_cli.storage.parquet import parquet_writer
from managed_cli.storage.reader import PARQUET_MAGIC
from managed_cli.storage.schema import RowFormat
from managed_cli.storage.thrift import List, MalformedThrift, Struct, Type, parse_struct, struct_bytes

LENGTH_BYTES = 4
"""Before the last magic: the size of the footer."""

MOST_ORDINAL = 2**15 - 1
"""Row groups after it have no ordinal, which is a 16-bit integer."""


class File(enum.IntEnum):
    """Parquet's `FileMetaData`: the ids of its fields."""

    VERSION = 1
    SCHEMA = 2
    ROWS = 3
    ROW_GROUPS = 4
    KEY_VALUES = 5
    CREATED_BY = 6
    COLUMN_ORDERS = 7


class Group(enum.IntEnum):
    """Parquet's `RowGroup`, likewise."""

    COLUMNS = 1
    UNCOMPRESSED_SIZE = 2
    ROWS = 3
    OFFSET = 5
    COMPRESSED_SIZE = 6
    ORDINAL = 7


class Chunk(enum.IntEnum):
    """Parquet's `ColumnChunk`, likewise."""

    OFFSET = 2
    METADATA = 3


_FILE: dict[int, int] = {
    File.VERSION: Type.I32,
    File.SCHEMA: Type.LIST,
    File.ROWS: Type.I64,
    File.ROW_GROUPS: Type.LIST,
    File.KEY_VALUES: Type.LIST,
    File.CREATED_BY: Type.BINARY,
    File.COLUMN_ORDERS: Type.LIST,
}
_GROUP: dict[int, int] = {
    Group.COLUMNS: Type.LIST,
    Group.UNCOMPRESSED_SIZE: Type.I64,
    Group.ROWS: Type.I64,
    Group.OFFSET: Type.I64,
    Group.COMPRESSED_SIZE: Type.I64,
}
_GROUP_MAY_HAVE: dict[int, int] = {Group.ORDINAL: Type.I16}
_CHUNK: dict[int, int] = {Chunk.OFFSET: Type.I64, Chunk.METADATA: Type.STRUCT}
"""Fields that are not among these tell of encryption, of other files, or of bytes elsewhere in the file."""

_LEAF_TYPES = {"INT32": (1, 4), "INT64": (2, 8), "FLOAT": (4, 4), "DOUBLE": (5, 8), "BYTE_ARRAY": (6, None)}
"""pyarrow's name of a physical type → Parquet's number of it, and the bytes of a value."""


def find_footer(file: BinaryIO, start: int = 0) -> tuple[Struct, int] | None:
    """The footer of the Parquet file that is `file` from `start` to its end, and where it begins; None without one.

    Its row groups are left as their bytes.
    """
    tail = LENGTH_BYTES + len(PARQUET_MAGIC)
    end = file.seek(0, os.SEEK_END) - tail
    if end < start + len(PARQUET_MAGIC):
        return None
    file.seek(end)
    last = file.read(tail)
    begin = end - int.from_bytes(last[:LENGTH_BYTES], "little")
    if last[LENGTH_BYTES:] != PARQUET_MAGIC or begin < start + len(PARQUET_MAGIC):
        return None
    file.seek(begin)
    try:
        footer, size = parse_struct(file.read(end - begin), unparsed=File.ROW_GROUPS)
    except MalformedThrift:
        return None
    return (footer, begin) if begin + size == end else None


class Template:
    """What a file of ours with this footer says beside its row groups, from a file without rows that was just written.

    Taken from pyarrow as it is now, so that nothing of what it writes need be known here.
    """

    def __init__(self, struct: Struct, leaves: list[Leaf]) -> None:
        self._struct = struct
        self._leaves = leaves

    @classmethod
    def of(cls, footer: Footer, row_format: RowFormat) -> Self:
        """The template of `footer` over rows of `row_format`."""
        file = io.BytesIO()
        with parquet_writer(file, row_format) as writer:
            writer.add_key_value_metadata(footer.key_values())
        found = find_footer(file)
        assert found is not None, "pyarrow writes footers that end where they say"
        return cls(found[0], _leaves(pq.read_metadata(pa.BufferReader(file.getvalue())).schema))

    def is_of(self, footer: Struct) -> bool:
        """Whether `footer` is of a file that the same writer wrote with the same schema."""
        same = (File.VERSION, File.SCHEMA, File.CREATED_BY, File.COLUMN_ORDERS)
        return has_shape(footer, _FILE) and all(footer[field] == self._struct.get(field) for field in same)

    def find_row_group(self, written: bytes | Struct, footer_begin: int) -> RowGroup | None:
        """A row group of a file whose footer is of this template; None where it is not as our writer writes them."""
        if not isinstance(written, bytes):
            return None
        try:
            group = RowGroup(parse_struct(written)[0], self._leaves)
        except NotVouchedFor:
            return None
        return group if len(PARQUET_MAGIC) <= group.start <= group.end <= footer_begin else None

    def end_of_file(self, rows: int, row_groups: list[bytes]) -> bytes:
        """What follows the last row group."""
        groups = List(Type.STRUCT, row_groups)
        footer = struct_bytes(self._struct | {File.ROWS: (Type.I64, rows), File.ROW_GROUPS: (Type.LIST, groups)})
        return footer + len(footer).to_bytes(LENGTH_BYTES, "little") + PARQUET_MAGIC


class RowGroup:
    """A row group whose column chunks lie one after the other, from `start` to `end`.

    Raises:
        NotVouchedFor: it is not as our writer writes them.
    """

    def __init__(self, struct: Struct, leaves: list[Leaf]) -> None:
        if not has_shape(struct, _GROUP, _GROUP_MAY_HAVE):
            raise NotVouchedFor
        self._struct = struct
        self.rows: int = struct[Group.ROWS][1]
        self.start: int = struct[Group.OFFSET][1]
        self.end = self.start
        self.chunks: list[ColumnChunk] = []
        columns = struct[Group.COLUMNS][1]
        if columns.element_type != Type.STRUCT or len(columns.values) != len(leaves):
            raise NotVouchedFor
        for column, leaf in zip(columns.values, leaves, strict=True):
            # pyarrow 17 writes a column's metadata behind its pages too, and their place here; later ones write 0.
            if not has_shape(column, _CHUNK) or column[Chunk.OFFSET][1] != 0:
                raise NotVouchedFor
            chunk = ColumnChunk(column[Chunk.METADATA][1], leaf, self.rows)
            if chunk.start != self.end or chunk.size <= 0:
                raise NotVouchedFor
            self.end += chunk.size
            self.chunks.append(chunk)
        uncompressed = sum(chunk.uncompressed_size for chunk in self.chunks)
        sizes = (struct[Group.UNCOMPRESSED_SIZE][1], struct[Group.COMPRESSED_SIZE][1])
        if sizes != (uncompressed, self.end - self.start):
            raise NotVouchedFor

    @property
    def arrow_size(self) -> int:
        """Bytes of its rows in Arrow, about."""
        return sum(chunk.arrow_size for chunk in self.chunks)

    def moved_to(self, start: int, ordinal: int) -> bytes:
        """Its struct where it begins at `start`."""
        return moved(self._struct, start - self.start, ordinal)


def moved(group: Struct, distance: int, ordinal: int) -> bytes:
    """The struct of a row group whose bytes are `distance` further on, as number `ordinal` of its file."""
    chunks = [
        _further(chunk, distance, Chunk.OFFSET)
        | {
            Chunk.METADATA: (
                Type.STRUCT,
                _further(chunk[Chunk.METADATA][1], distance, Column.DATA_PAGE_OFFSET, Column.DICTIONARY_PAGE_OFFSET),
            )
        }
        for chunk in group[Group.COLUMNS][1].values
    ]
    there = _further(group, distance, Group.OFFSET) | {Group.COLUMNS: (Type.LIST, List(Type.STRUCT, chunks))}
    if there.pop(Group.ORDINAL, None) is not None and ordinal <= MOST_ORDINAL:
        there[Group.ORDINAL] = (Type.I16, ordinal)
    return struct_bytes(there)


def _further(struct: Struct, distance: int, *offsets: int) -> Struct:
    """`struct` with `distance` added to these of its fields; to none that is 0, which stands for nowhere."""
    return struct | {
        field: (struct[field][0], struct[field][1] + distance)
        for field in offsets
        if field in struct and struct[field][1]
    }


def _leaves(schema: Any) -> list[Leaf]:  # Any: pyarrow publishes no types; a ParquetSchema
    leaves = []
    for index in range(len(schema)):
        column = schema.column(index)
        type, width = _LEAF_TYPES[column.physical_type]
        path = tuple(name.encode() for name in column.path.split("."))
        repetition, definition = column.max_repetition_level, column.max_definition_level
        leaves.append(Leaf(path, type, width, repetition_levels=repetition, definition_levels=definition))
    return leaves
