"""The pages of a column chunk, handed on as they are stored, and vouched for without being decoded.

A page's checksum is over its stored bytes, not over its header. What the header says is held against the footer, which
says it again: how many values, how many bytes before compression, which encodings, and the statistics.
"""

from __future__ import annotations

import collections
import enum
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from managed_cli.storage.thrift import List, MalformedThrift, Struct, Type, parse_struct, struct_bytes

HEADER_BYTES = 32 * 1024
"""Most bytes that a page's header may have; pyarrow writes four statistics of at most 4096 bytes into it."""

ZSTD = 6
"""Parquet's number of the compression that our writer asks for."""

RLE = 3
"""Parquet's number of the encoding of repetition and definition levels."""


class NotVouchedFor(Exception):
    """What is stored may well be right, but only decoding it can tell."""


class DamagedPages(Exception):
    """What is stored is not what was written; the text says where the two differ."""


class Column(enum.IntEnum):
    """Parquet's `ColumnMetaData`: the ids of its fields."""

    TYPE = 1
    ENCODINGS = 2
    PATH = 3
    CODEC = 4
    VALUES = 5
    UNCOMPRESSED_SIZE = 6
    COMPRESSED_SIZE = 7
    DATA_PAGE_OFFSET = 9
    DICTIONARY_PAGE_OFFSET = 11
    STATISTICS = 12
    ENCODING_STATS = 13
    SIZE_STATISTICS = 16


class Sizes(enum.IntEnum):
    """Parquet's `SizeStatistics`, likewise."""

    TEXT_BYTES = 1
    REPETITION_LEVELS = 2
    DEFINITION_LEVELS = 3


class Page(enum.IntEnum):
    """Parquet's `PageHeader`, likewise."""

    TYPE = 1
    UNCOMPRESSED_SIZE = 2
    COMPRESSED_SIZE = 3
    CRC = 4
    DATA = 5
    DICTIONARY = 7
    DATA_V2 = 8


class DataPage(enum.IntEnum):
    """Parquet's `DataPageHeader`, likewise; of a `DictionaryPageHeader` the first two are the same."""

    VALUES = 1
    ENCODING = 2
    DEFINITION_ENCODING = 3
    REPETITION_ENCODING = 4
    STATISTICS = 5


class PageType(enum.IntEnum):
    """Parquet's kinds of pages."""

    DATA = 0
    DICTIONARY = 2
    DATA_V2 = 3


_COLUMN: dict[int, int] = {
    Column.TYPE: Type.I32,
    Column.ENCODINGS: Type.LIST,
    Column.PATH: Type.LIST,
    Column.CODEC: Type.I32,
    Column.VALUES: Type.I64,
    Column.UNCOMPRESSED_SIZE: Type.I64,
    Column.COMPRESSED_SIZE: Type.I64,
    Column.DATA_PAGE_OFFSET: Type.I64,
    Column.ENCODING_STATS: Type.LIST,
}
_COLUMN_MAY_HAVE: dict[int, int] = {
    Column.DICTIONARY_PAGE_OFFSET: Type.I64,
    Column.STATISTICS: Type.STRUCT,
    Column.SIZE_STATISTICS: Type.STRUCT,
}
"""Other fields, such as a Bloom filter's place, tell of bytes elsewhere in the file."""

_SIZES: dict[int, int] = {
    Sizes.TEXT_BYTES: Type.I64,
    Sizes.REPETITION_LEVELS: Type.LIST,
    Sizes.DEFINITION_LEVELS: Type.LIST,
}
_PAGE: dict[int, int] = {
    Page.TYPE: Type.I32,
    Page.UNCOMPRESSED_SIZE: Type.I32,
    Page.COMPRESSED_SIZE: Type.I32,
    Page.CRC: Type.I32,
}
_DATA_PAGE: dict[int, int] = {field: Type.I32 for field in DataPage if field != DataPage.STATISTICS}
_DICTIONARY_PAGE: dict[int, int] = {
    DataPage.VALUES: Type.I32,
    DataPage.ENCODING: Type.I32,
    3: Type.FALSE,  # whether it is sorted
}
_ENCODING_STAT: dict[int, int] = {1: Type.I32, 2: Type.I32, 3: Type.I32}
"""Type of page, encoding, how many such pages."""


def has_shape(struct: Struct, must_have: Mapping[int, int], may_have: Mapping[int, int] | None = None) -> bool:
    """Whether these fields are there with these types, and no others."""
    allowed = {**must_have, **(may_have or {})}
    return must_have.keys() <= struct.keys() and all(
        allowed.get(field_id) == type for field_id, (type, _) in struct.items()
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column as Parquet stores it.

    Attributes:
        path: its names from the root, such as `tokens`, `list`, `element`.
        type: Parquet's number of its physical type.
        width: bytes of a value; None for texts.
        repetition_levels: how many lists a value stands in.
        definition_levels: these, and what may be null around it.
    """

    path: tuple[bytes, ...]
    type: int
    width: int | None
    repetition_levels: int
    definition_levels: int


class ColumnChunk:
    """One column of one row group, as its footer describes it.

    Raises:
        NotVouchedFor: the footer says what our writer does not, or lacks what is needed to check its pages.
    """

    def __init__(self, metadata: Struct, leaf: Leaf, rows: int) -> None:
        if not has_shape(metadata, _COLUMN, _COLUMN_MAY_HAVE):
            raise NotVouchedFor
        self._leaf = leaf
        self._dictionary_at = metadata.get(Column.DICTIONARY_PAGE_OFFSET, (0, None))[1]
        self._data_at: int = metadata[Column.DATA_PAGE_OFFSET][1]
        self._statistics = metadata.get(Column.STATISTICS, (0, {}))[1]
        self.uncompressed_size: int = metadata[Column.UNCOMPRESSED_SIZE][1]
        self._kinds = _kinds_of_pages(metadata[Column.ENCODING_STATS][1])
        self.values: int = metadata[Column.VALUES][1]
        self.start: int = self._data_at if self._dictionary_at is None else self._dictionary_at
        self.size: int = metadata[Column.COMPRESSED_SIZE][1]
        encodings = metadata[Column.ENCODINGS][1]
        if (
            metadata[Column.PATH][1] != List(Type.BINARY, list(leaf.path))
            or (metadata[Column.TYPE][1], metadata[Column.CODEC][1]) != (leaf.type, ZSTD)
            or encodings.element_type != Type.I32
            or set(encodings.values) != {RLE} | {encoding for _, encoding in self._kinds}
            or not (leaf.repetition_levels or self.values == rows)
            or not self._can_be_sizes(metadata.get(Column.SIZE_STATISTICS, (0, {}))[1], rows)
        ):
            raise NotVouchedFor

    def _can_be_sizes(self, sizes: Struct, rows: int) -> bool:
        """Whether `sizes`, which stand in no page's header, can be those of the chunk; readers refuse other shapes."""
        if not has_shape(sizes, {}, _SIZES) or (Sizes.TEXT_BYTES in sizes and self._leaf.width is not None):
            return False
        no_levels = List(Type.I64, [])
        of_repetition = sizes.get(Sizes.REPETITION_LEVELS, (0, no_levels))[1]
        of_definition = sizes.get(Sizes.DEFINITION_LEVELS, (0, no_levels))[1]
        return (
            sizes.get(Sizes.TEXT_BYTES, (0, 0))[1] >= 0
            and _can_be_counts(of_repetition, self._leaf.repetition_levels, self.values)
            and _can_be_counts(of_definition, self._leaf.definition_levels, self.values)
            and (not of_repetition.values or of_repetition.values[0] == rows)
        )

    @property
    def name(self) -> str:
        """Its path as messages show it."""
        return b".".join(self._leaf.path).decode("utf-8", "replace")

    @property
    def arrow_size(self) -> int:
        """Bytes of its values in Arrow, about; too few where texts are in a dictionary."""
        return self.uncompressed_size if self._leaf.width is None else self.values * self._leaf.width

    def pieces(self, source: BinaryIO, buffer: memoryview) -> Iterator[bytes | memoryview]:
        """All of its bytes, in order, each piece to be used before the next is asked for; they are right if it ends.

        Args:
            buffer: what pieces may be in; its size is the most that one of them has.

        Raises:
            NotVouchedFor: pages without a checksum, or with statistics that are not the column chunk's.
            DamagedPages: the pages are not those that the footer speaks of, or not as they were written.
        """
        pages: list[_Page] = []
        at, end = self.start, self.start + self.size
        while at < end:
            page = _page_at(source, at, end)
            self._refuse_misplaced(page, at, pages)
            pages.append(page)
            yield page.header
            if page.is_dictionary:
                stored = b"".join(map(bytes, page.stored(source, buffer)))
                self._refuse_other_dictionary(page, stored)
                yield stored
            else:
                yield from page.stored(source, buffer)
            at += len(page.header) + page.size
        self._refuse_other_sums(pages)

    def _refuse_misplaced(self, page: _Page, at: int, before: Sequence[_Page]) -> None:
        if page.is_dictionary != (not before and self._dictionary_at is not None):
            raise DamagedPages("a dictionary stands where none should be, or none where one should be")
        begins_values = not page.is_dictionary and (not before or before[-1].is_dictionary)
        if begins_values and at != self._data_at:
            raise DamagedPages("the first page of values is not where the footer says")
        if page.uncompressed > self.uncompressed_size:
            raise DamagedPages("a page is larger than its column")

    def _refuse_other_dictionary(self, page: _Page, stored: bytes) -> None:
        """How many entries it has stands nowhere but in its header, so they are counted."""
        try:
            plain = pa.decompress(stored, decompressed_size=page.uncompressed, codec="zstd").to_pybytes()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedPages("the dictionary is not what was compressed") from error
        width = self._leaf.width
        if page.values != (_count_of_texts(plain) if width is None else len(plain) / width):
            raise DamagedPages("the dictionary has not as many entries as its header says")

    def _refuse_other_sums(self, pages: Sequence[_Page]) -> None:
        of_values = [page for page in pages if not page.is_dictionary]
        if (
            sum(page.values for page in of_values) != self.values
            or sum(len(page.header) + page.uncompressed for page in pages) != self.uncompressed_size
            or collections.Counter((page.type, page.encoding) for page in pages) != self._kinds
        ):
            raise DamagedPages("the headers of its pages do not add up to what the footer says")
        # A column chunk's statistics sum up those of its pages, so that those of one page are the same ones.
        confirmed = self._statistics if len(of_values) == 1 else {}
        if self._statistics != confirmed or any(page.statistics != confirmed for page in of_values):
            raise NotVouchedFor


class _Page:
    """A page's header, checked as far as it can be alone.

    Attributes:
        header: its bytes.
        size: of the stored bytes that follow.
        uncompressed: their size before compression.
    """

    __slots__ = ("_checksum", "encoding", "header", "size", "statistics", "type", "uncompressed", "values")

    def __init__(self, fields: Struct, header: bytes) -> None:
        self.header = header
        self.type: int = fields.get(Page.TYPE, (0, None))[1]
        kind = Page.DICTIONARY if self.is_dictionary else Page.DATA
        checked = {**_PAGE, kind: Type.STRUCT}
        if not has_shape(fields, checked):
            # A page without a checksum, or of a newer kind, is some other writer's; anything else is nobody's.
            newer = {**_PAGE, Page.DATA_V2: Type.STRUCT}
            others = (newer,) if self.type == PageType.DATA_V2 else ()
            if any(has_shape({Page.CRC: (Type.I32, 0), **fields}, shape) for shape in (checked, *others)):
                raise NotVouchedFor
            raise DamagedPages("the header of a page is not one")
        inner: Struct = fields[kind][1]
        if not (
            has_shape(inner, _DICTIONARY_PAGE)
            if self.is_dictionary
            else has_shape(inner, _DATA_PAGE, {DataPage.STATISTICS: Type.STRUCT})
            and inner[DataPage.DEFINITION_ENCODING][1] == inner[DataPage.REPETITION_ENCODING][1] == RLE
        ):
            raise DamagedPages("the header of a page is not one")
        self.size: int = fields[Page.COMPRESSED_SIZE][1]
        self.uncompressed: int = fields[Page.UNCOMPRESSED_SIZE][1]
        crc: int = fields[Page.CRC][1]
        self._checksum = crc + 2**32 if crc < 0 else crc  # Thrift has no unsigned integers
        self.values: int = inner[DataPage.VALUES][1]
        self.encoding: int = inner[DataPage.ENCODING][1]
        self.statistics: Struct = inner[DataPage.STATISTICS][1] if DataPage.STATISTICS in inner else {}
        if min(self.size, self.uncompressed, self.values) < 0:
            raise DamagedPages("the header of a page has a size below 0")

    @property
    def is_dictionary(self) -> bool:
        return self.type == PageType.DICTIONARY

    def stored(self, source: BinaryIO, buffer: memoryview) -> Iterator[memoryview]:
        """What follows the header in `source`, in pieces; it is what was written if it ends."""
        checksum, left = 0, self.size
        while left:
            piece = buffer[: source.readinto(buffer[:left])]  # type: ignore[attr-defined]  # of files
            if not piece:
                raise DamagedPages("the file ends in the middle of a page")
            checksum = zlib.crc32(piece, checksum)
            yield piece
            left -= len(piece)
        if checksum != self._checksum:
            raise DamagedPages("a page does not match its checksum")


def _page_at(source: BinaryIO, at: int, end: int) -> _Page:
    """The page that begins at `at` in a column chunk that ends at `end`; `source` is then after its header."""
    source.seek(at)
    read = source.read(min(HEADER_BYTES, end - at))
    try:
        fields, size = parse_struct(read)
    except MalformedThrift as error:
        raise DamagedPages("the header of a page is not one") from error
    header = read[:size]
    if struct_bytes(fields) != header:
        raise DamagedPages("the header of a page is not one")
    page = _Page(fields, header)
    if at + size + page.size > end:
        raise DamagedPages("a page ends after its column")
    source.seek(at + size)
    return page


def _kinds_of_pages(stats: List) -> collections.Counter[tuple[int, int]]:
    """Type of page and encoding → how many there are, as the footer says."""
    if stats.element_type != Type.STRUCT or not all(has_shape(stat, _ENCODING_STAT) for stat in stats.values):
        raise NotVouchedFor
    return collections.Counter({(stat[1][1], stat[2][1]): stat[3][1] for stat in stats.values})


def _can_be_counts(counts: List, highest: int, values: int) -> bool:
    """Whether `counts` can say how many of `values` have each of the levels from 0 to `highest`; or say nothing."""
    if counts.element_type != Type.I64 or not counts.values:
        return counts == (Type.I64, [])
    return len(counts.values) == highest + 1 and min(counts.values) >= 0 and sum(counts.values) == values


def _count_of_texts(plain: bytes) -> int:
    """How many texts `plain` is, each after its length in four bytes; -1 where it is none of the kind."""
    count = at = 0
    while at + 4 <= len(plain):
        at += 4 + int.from_bytes(plain[at : at + 4], "little")
        count += 1
    return count if at == len(plain) else -1
