"""Numbered records of one file, from JSON lines or from Parquet, each to be parsed by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from managed_cli.rollout.inputs import InputSource, numbered_lines
from managed_cli.rollout.jsonl import parse_object
from managed_cli.rollout.parquet_rows import ParquetRows, is_parquet


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """What a file holds, in order.

    Attributes:
        unit: stands before a record's number: nothing for a line, `row ` for a row.
        numbered: numbers from 1 and records; blank lines are counted and left out.
        parse: a record as an object; raises InputError for one that is none.
    """

    unit: str
    numbered: Iterator[tuple[int, Any]]
    parse: Callable[[Any], dict[str, object]]  # Any: what `numbered` gives: bytes of a line, or columns of a row


def records_of(source: InputSource) -> Records:
    """The records of a file, whose first bytes tell what it is.

    Raises:
        InputError: it cannot be read.
    """
    if is_parquet(source):
        rows = ParquetRows(source)
        return Records("row ", rows.numbered(), rows.parse)
    lines = ((number, line) for number, line in numbered_lines(source) if line and not line.isspace())
    return Records("", lines, parse_object)


def record_bytes(record: bytes | dict[str, object]) -> bytes:
    """What identifies a record that cannot be understood."""
    return record if isinstance(record, bytes) else repr(record).encode()
