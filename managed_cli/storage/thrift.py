"""Thrift's compact protocol, which Parquet's footers and page headers are written in, without knowing any schema.

A struct is a dict of field id → (type, value), in the order of the bytes, so that fields nobody here knows of
survive: `struct_bytes(parse_struct(data)[0])` is `data`, where `data` is written the way that Thrift itself writes.
A struct in a list may also stand as its bytes, not parsed yet or written already: a footer's row groups take 20 times
their bytes as dicts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

MAX_DEPTH: Final = 32
"""Structs and lists inside each other; Parquet needs 7. Keeps garbage from exhausting Python's stack."""

MAX_INTEGER_BYTES: Final = 10
"""64 bits, seven to the byte."""

Struct = dict[int, tuple[int, Any]]  # Any: bool, int, bytes, a List, a Map or a Struct, as its type says


class MalformedThrift(ValueError):
    """Bytes that are no struct of the compact protocol."""


class Type(enum.IntEnum):
    """How a value is written."""

    STOP = 0
    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    MAP = 11
    STRUCT = 12


class List(NamedTuple):
    """A list or a set."""

    element_type: int
    values: list[Any]  # Any: as in `Struct`


class Map(NamedTuple):
    """A map; without entries it has no types either, which is 0 for both."""

    key_type: int
    value_type: int
    entries: list[tuple[Any, Any]]  # Any: as in `Struct`


_STOP, _TRUE, _FALSE, _BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = (
    int(Type[name])
    for name in ("STOP", "TRUE", "FALSE", "BYTE", "I16", "I64", "DOUBLE", "BINARY", "LIST", "SET", "MAP", "STRUCT")
)  # plain integers: a footer is thousands of values, and members of an enum cost several times as much


def parse_struct(data: bytes, start: int = 0, *, unparsed: int | None = None) -> tuple[Struct, int]:
    """The struct that begins at `start`, and where it ends.

    Args:
        unparsed: id of a field of it, a list whose structs are left as their bytes.

    Raises:
        MalformedThrift: it ends after `data`, or is none.
    """
    reader = _Reader(data, start, unparsed)
    try:
        return reader.struct(MAX_DEPTH), reader.position
    except IndexError:
        raise MalformedThrift("it ends in the middle of a value") from None


def struct_bytes(struct: Struct) -> bytes:
    """`struct` in the compact protocol."""
    out = bytearray()
    _write_struct(out, struct)
    return bytes(out)


class _Reader:
    """A place in `data`, which a byte read beyond its end takes out of it by IndexError."""

    __slots__ = ("data", "position", "unparsed")

    def __init__(self, data: bytes, position: int, unparsed: int | None) -> None:
        self.data = data
        self.position = position
        self.unparsed = unparsed

    def struct(self, depth: int) -> Struct:
        fields: Struct = {}
        field_id = 0
        while head := self.data[self.position]:
            self.position += 1
            delta, type = head >> 4, head & 15
            field_id = field_id + delta if delta else self.integer()
            if field_id in fields:
                raise MalformedThrift(f"field {field_id} stands there twice")
            if type in (_TRUE, _FALSE):
                fields[field_id] = (type, type == _TRUE)
            elif type == _LIST and field_id == self.unparsed and depth == MAX_DEPTH:
                fields[field_id] = (type, self.list(depth - 1, self.struct_as_bytes))
            else:
                fields[field_id] = (type, self.value(type, depth))
        self.position += 1
        return fields

    def value(self, type: int, depth: int) -> Any:  # Any: as in `Struct`
        if _I16 <= type <= _I64:
            return self.integer()
        if type == _BINARY:
            return self.bytes(self.unsigned())
        if depth == 0:
            raise MalformedThrift(f"more than {MAX_DEPTH} structs and lists inside each other")
        if type == _STRUCT:
            return self.struct(depth - 1)
        if type in (_LIST, _SET):
            return self.list(depth - 1)
        if type == _MAP:
            return self.map(depth - 1)
        if type in (_BYTE, _TRUE, _FALSE):  # the latter two in lists alone, where a byte says which
            return self.bytes(1)[0]
        self.refuse_unknown(type)
        return self.bytes(8)  # a double, as it stands: nothing here reads one, and not every NaN survives a float

    def struct_as_bytes(self, type: int, depth: int) -> Any:  # Any: as in `Struct`
        begin = self.position
        value = self.value(type, depth)
        return self.data[begin : self.position] if type == _STRUCT else value

    def list(self, depth: int, value: Callable[[int, int], Any] | None = None) -> List:  # Any: as in `Struct`
        head = self.bytes(1)[0]
        size, type = head >> 4, head & 15
        if size == 15:
            size = self.unsigned()
        self.refuse_more_than_bytes(size)
        self.refuse_unknown(type)
        value = value or self.value
        return List(type, [value(type, depth) for _ in range(size)])

    def map(self, depth: int) -> Map:
        size = self.unsigned()
        if size == 0:
            return Map(_STOP, _STOP, [])
        self.refuse_more_than_bytes(size)
        types = self.bytes(1)[0]
        key, value = types >> 4, types & 15
        self.refuse_unknown(key)
        self.refuse_unknown(value)
        return Map(key, value, [(self.value(key, depth), self.value(value, depth)) for _ in range(size)])

    def refuse_unknown(self, type: int) -> None:
        """Also where there is no value of it: other readers do."""
        if not _TRUE <= type <= _STRUCT:
            raise MalformedThrift(f"there is no type {type}")

    def refuse_more_than_bytes(self, size: int) -> None:
        """Every value takes a byte at least: a larger number is garbage, and not to be looped over."""
        if size > len(self.data) - self.position:
            raise MalformedThrift(f"{size} values in {len(self.data) - self.position} bytes")

    def bytes(self, size: int) -> bytes:
        begin, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise IndexError
        return self.data[begin : self.position]

    def unsigned(self) -> int:
        byte = self.data[self.position]
        self.position += 1
        if byte < 128:
            return byte
        value, shift = byte & 127, 7
        while byte > 127:
            if shift == 7 * MAX_INTEGER_BYTES:
                raise MalformedThrift("an integer of more than 64 bits")
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 127) << shift
            shift += 7
        return value

    def integer(self) -> int:
        value = self.unsigned()
        return value >> 1 if not value & 1 else -(value >> 1) - 1


def _write_struct(out: bytearray, struct: Struct) -> None:
    before = 0
    for field_id, (type, value) in struct.items():
        delta = field_id - before
        if 0 < delta < 16:
            out.append(delta << 4 | type)
        else:
            out.append(type)
            _write_integer(out, field_id)
        before = field_id
        if type not in (_TRUE, _FALSE):
            _write_value(out, type, value)
    out.append(_STOP)


def _write_value(out: bytearray, type: int, value: Any) -> None:  # Any: as in `Struct`
    if _I16 <= type <= _I64:
        _write_integer(out, value)
    elif type == _BINARY:
        _write_unsigned(out, len(value))
        out += value
    elif type == _DOUBLE or isinstance(value, bytes):
        out += value
    elif type == _STRUCT:
        _write_struct(out, value)
    elif type in (_LIST, _SET):
        _write_list(out, value)
    elif type == _MAP:
        _write_map(out, value)
    else:
        out.append(value)


def _write_list(out: bytearray, listed: List) -> None:
    size = len(listed.values)
    out.append(min(size, 15) << 4 | listed.element_type)
    if size >= 15:
        _write_unsigned(out, size)
    for value in listed.values:
        _write_value(out, listed.element_type, value)


def _write_map(out: bytearray, mapped: Map) -> None:
    _write_unsigned(out, len(mapped.entries))
    if mapped.entries:
        out.append(mapped.key_type << 4 | mapped.value_type)
    for key, value in mapped.entries:
        _write_value(out, mapped.key_type, key)
        _write_value(out, mapped.value_type, value)


def _write_unsigned(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _write_integer(out: bytearray, value: int) -> None:
    _write_unsigned(out, value << 1 if value >= 0 else (-value << 1) - 1)
