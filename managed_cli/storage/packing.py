"""Rows on their way into Arrow: each checked and packed when it comes, Arrow arrays made of many at once.

An Arrow array costs microseconds however short it is, so that a batch for every sample cost more than its values. What
cannot be stored is found when it is packed, while it is still known whose row it is; making the arrays cannot fail.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

UNPACKABLE = (ValueError, TypeError, OverflowError, AttributeError, struct.error)
"""What packing a value of a wrong type or size raises; `AttributeError` for a text that is none."""

_CODES = {pa.int32(): "i", pa.float32(): "f"}
"""Arrow's type → that of `struct`, for lists that are kept as bytes."""

_INT32, _FLOAT32 = struct.Struct("i"), struct.Struct("f")


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """How the values of one column are kept until there are many.

    Attributes:
        pack: a value as it is kept; raises one of `UNPACKABLE` where the column cannot hold it.
        array: the Arrow array of values that were kept.
    """

    pack: Callable[[Any], Any]  # Any: whatever the column holds, and however it is kept
    array: Callable[[Sequence[Any]], pa.Array]


def get_ready() -> None:
    """Make a first array: where pandas is installed, pyarrow imports it then, which takes a fifth of a second."""
    pa.array([""])


def packing_of(type: pa.DataType, *, nullable: bool) -> Packing:
    """The packing of a column: lists of numbers as bytes, single values as they are, all else as short arrays."""
    plain: dict[pa.DataType, Callable[[Any], Any]]  # Any: as in `Packing`
    plain = {pa.string(): _text, pa.int32(): _integer, pa.float32(): _real}
    if type in plain:
        pack = plain[type]
        return Packing(_or_none(pack) if nullable else pack, lambda values: pa.array(values, type=type))
    if pa.types.is_list(type) and type.value_type in _CODES and not nullable:
        pack_list = functools.partial(_list, _CODES[type.value_type])
        return Packing(pack_list, functools.partial(_lists, type))
    return Packing(lambda value: _short_array(value, type, nullable=nullable), pa.concat_arrays)


def packed_integers(values: Sequence[int]) -> bytes:
    """Integers as the packing of a list of them keeps them; it takes the bytes in place of the list, too."""
    return struct.pack(f"{len(values)}i", *values)


def packed_reals(values: Sequence[float]) -> bytes:
    """Real numbers as the packing of a list of them keeps them; it takes the bytes in place of the list, too."""
    return struct.pack(f"{len(values)}f", *values)


def _list(code: str, values: Sequence[Any] | bytes) -> bytes:
    return values if isinstance(values, bytes) else struct.pack(f"{len(values)}{code}", *values)


def _text(value: str) -> str:
    if not value.isascii():
        value.encode()  # a lone surrogate is a ValueError
    return value


def _integer(value: int) -> int:
    _INT32.pack(value)
    return value


def _real(value: float) -> float:
    _FLOAT32.pack(value)
    return value


def _or_none(pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else pack(value)


def _short_array(value: object, type: pa.DataType, *, nullable: bool) -> pa.Array:
    if value is None and not nullable:
        raise TypeError("it holds nothing")
    return pa.array([value], type=type)


def _lists(type: pa.ListType, packed: Sequence[bytes]) -> pa.Array:
    """Lists of four-byte numbers from their bytes."""
    edges = np.fromiter(itertools.accumulate(map(len, packed), initial=0), dtype=np.int64, count=len(packed) + 1) // 4
    values = pa.Array.from_buffers(type.value_type, int(edges[-1]), [None, pa.py_buffer(b"".join(packed))])
    return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), values, type=type)


def packed_size(row: Iterable[Any]) -> int:  # Any: what packings make of values
    """Bytes in the lists and texts of a packed row, about: what a chunk of rows is bounded by."""
    return sum([len(value) for value in row if type(value) is bytes or type(value) is str])
