from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.storage.thrift import MAX_DEPTH, List, MalformedThrift, Map, Type, parse_struct, struct_bytes
from tests.storage.rows import make_sample, write_output

INTEGERS = st.integers(-(2**63), 2**63 - 1)
BYTES = st.integers(0, 255)
SCALARS: dict[Type, st.SearchStrategy[Any]] = {  # Any: as in `Struct`
    Type.BYTE: BYTES,
    Type.I16: INTEGERS,
    Type.I32: INTEGERS,
    Type.I64: INTEGERS,
    Type.DOUBLE: st.binary(min_size=8, max_size=8),
    Type.BINARY: st.binary(max_size=200),
}


@st.composite
def typed(draw: st.DrawFn, type: Type, depth: int) -> Any:  # Any: as in `Struct`
    if type in (Type.TRUE, Type.FALSE):
        return draw(st.sampled_from([1, 2]))  # as in lists
    if type in SCALARS:
        return draw(SCALARS[type])
    if type == Type.STRUCT:
        return draw(structs(depth - 1))
    if type == Type.MAP:
        key, value = draw(types(depth - 1)), draw(types(depth - 1))
        entries = draw(st.lists(st.tuples(typed(key, depth - 1), typed(value, depth - 1)), max_size=3))
        return Map(key, value, entries) if entries else Map(0, 0, [])
    element = draw(types(depth - 1))
    return List(element, draw(st.lists(typed(element, depth - 1), max_size=20 if element in SCALARS else 3)))


def types(depth: int) -> st.SearchStrategy[Type]:
    every = [type for type in Type if type != Type.STOP]
    return st.sampled_from(every if depth > 0 else [type for type in every if type in SCALARS])


@st.composite
def structs(draw: st.DrawFn, depth: int = 3) -> dict[int, tuple[int, Any]]:  # Any: as in `Struct`
    fields = {}
    for field_id in draw(st.lists(st.integers(-(2**15), 2**15 - 1), unique=True, max_size=5)):
        type = draw(types(depth))
        is_boolean = type in (Type.TRUE, Type.FALSE)
        fields[field_id] = (int(type), type == Type.TRUE if is_boolean else draw(typed(type, depth)))
    return fields


@given(struct=structs(), after=st.binary(max_size=5))
def test_a_struct_of_any_kind_comes_back_as_it_was(struct: dict[int, tuple[int, Any]], after: bytes) -> None:
    written = struct_bytes(struct)
    assert parse_struct(written + after) == (struct, len(written))
    assert struct_bytes(parse_struct(written)[0]) == written


def footer_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[-8 - int.from_bytes(content[-8:-4], "little") : -8]


@pytest.fixture
def footers(tmp_path: Path) -> list[bytes]:
    """Of a recording, and of a file with much of what Parquet's footers can hold."""
    table = pa.table(
        {
            "whole": pa.array([1, None, 3], pa.int64()),
            "when": pa.array([0, 1, 2], pa.timestamp("us", tz="UTC")),
            "price": pa.array([Decimal("1.00"), None, Decimal("-2.50")], pa.decimal128(9, 2)),
            "nested": pa.array([{"a": [{"b": "x"}]}, None, {"a": []}]),
            "pairs": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int8())),
        }
    )
    pq.write_table(
        table,
        tmp_path / "rich.parquet",
        row_group_size=1,
        write_page_index=True,
        store_decimal_as_integer=True,
        sorting_columns=[pq.SortingColumn(1)],
    )
    recorded = write_output(tmp_path / "out.parquet", [make_sample(index, choices=3) for index in range(5)])
    return [footer_of(recorded), footer_of(tmp_path / "rich.parquet")]


def test_a_footer_of_pyarrow_comes_back_byte_by_byte(footers: list[bytes]) -> None:
    for footer in footers:
        struct, end = parse_struct(footer)
        assert end == len(footer)
        assert struct_bytes(struct) == footer


def test_structs_left_unparsed_are_written_as_they_were(footers: list[bytes]) -> None:
    for footer in footers:
        struct, _ = parse_struct(footer, unparsed=4)
        whole, _ = parse_struct(footer)
        groups = struct[4][1]
        assert [parse_struct(group)[0] for group in groups.values] == whole[4][1].values
        assert struct_bytes(struct) == footer


def test_a_footer_that_is_cut_anywhere_is_refused(footers: list[bytes]) -> None:
    for footer in footers:
        for size in range(0, len(footer), 7):
            with pytest.raises(MalformedThrift):
                parse_struct(footer[:size])


@settings(max_examples=300)
@given(garbage=st.binary(max_size=300), unparsed=st.none() | st.integers(0, 20))
def test_garbage_is_a_struct_or_refused(garbage: bytes, unparsed: int | None) -> None:
    try:
        _, end = parse_struct(garbage, unparsed=unparsed)
    except MalformedThrift:
        return
    assert 0 < end <= len(garbage)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x1c" * 100_000,  # structs inside each other without end
        b"\x19" * 100_000,  # lists likewise
        b"\x1b" + b"\x01\xbb" * 100_000,  # maps
        b"\x19\xf5" + b"\xff" * 8 + b"\x7f",  # a list of 2 ** 63 integers
        b"\x18\xff\xff\xff\xff\x0f" + bytes(100),  # a text of 4 GB
        b"\x1b\xff\xff\xff\xff\x0f\x55" + bytes(100),  # a map of that many entries
        b"\x15" + b"\xff" * 1000,  # an integer without end
        b"\x1d\x00",  # a type that is not one
        b"\x19\x0d\x00",  # a list of it, though it is empty
        b"\x15\x02\x05\x02\x02\x00",  # field 1 twice
    ],
)
def test_what_would_exhaust_a_reader_is_refused(garbage: bytes) -> None:
    with pytest.raises(MalformedThrift):
        parse_struct(garbage)


def test_nesting_is_allowed_as_deep_as_it_says() -> None:
    deepest = b"\x1c" * MAX_DEPTH + b"\x00" * (MAX_DEPTH + 1)
    assert struct_bytes(parse_struct(deepest)[0]) == deepest
    with pytest.raises(MalformedThrift, match="inside each other"):
        parse_struct(b"\x1c" + deepest)
