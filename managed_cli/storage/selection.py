"""Which rows of a recording are meant: conditions on them, an order, and the rows read by number.

Conditions and orders are evaluated column by column, on batches; only the rows that are shown are read as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from managed_cli.errors import ConfigError, OutputError
from managed_cli.storage.reader import RecordedFile, Recording

RowNumbers = npt.NDArray[np.int64]

NUMBER_OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
TEXT_OPERATORS = ("=", "!=", "~")

NONE_WORD = "none"
"""What stands for null in a condition."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What rows can be chosen and ordered by.

    Attributes:
        column: the column that it is read off.
        is_number: numbers compare, texts match.
        of_metadata: reads the value off the parsed metadata; None where the column is the value.
    """

    name: str
    meaning: str
    column: str
    is_number: bool
    of_metadata: Callable[[dict[str, Any]], Any] | None = None  # Any: free-form JSON values

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """The field of every row of `batch`; null where a row has none."""
        column = batch.column(self.column)
        if self.of_metadata is None:
            return column
        found = [self.of_metadata(_json_object(text)) for text in column.to_pylist()]
        fitting = [value if isinstance(value, int if self.is_number else str) else None for value in found]
        return pa.array(fitting, pa.int64() if self.is_number else pa.string())


def _turn_count(facts: dict[str, Any]) -> int | None:  # Any: free-form JSON values
    turns = facts.get("turns")
    return len(turns) if isinstance(turns, list) else None


FIELDS = {
    field.name: field
    for field in (
        Field("id", "the sample's id", "sample_id", is_number=False),
        Field("choice", "index of the choice", "choice_index", is_number=True),
        Field("node", "the row's node id", "node_id", is_number=False),
        Field("parent", "the node that it extends", "parent_id", is_number=False),
        Field("finish_reason", "stop, length, …", "finish_reason", is_number=False),
        Field("length", "sampled tokens", "completion_length", is_number=True),
        Field("prompt_length", "masked tokens", "prompt_length", is_number=True),
        Field("mean_logprob", "per sampled token, nats", "mean_logprob", is_number=True),
        Field("text", "all text, prompt included", "full_text", is_number=False),
        Field("turns", "sampled turns", "metadata", is_number=True, of_metadata=_turn_count),
        Field("server", "its address", "metadata", is_number=False, of_metadata=lambda facts: facts.get("server")),
        Field(
            "fork_reason",
            "why a new node was begun",
            "metadata",
            is_number=False,
            of_metadata=lambda facts: facts.get("fork_reason"),
        ),
    )
}
"""Name → field, as `--filter` and `--sort` take them."""

_CONDITION = re.compile(r"\s*([A-Za-z_]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """`length>512`: one comparison that a row passes or not; a row without the value passes only `!=`."""

    field: Field
    operator: str
    value: str | float | None

    def holds(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which rows of `batch` pass: [rows]."""
        values = self.field.values(batch)
        if self.operator == "!=":
            return ~_flags(_equal(values, self.value))
        if self.operator == "=":
            return _flags(_equal(values, self.value))
        if self.operator == "~":
            return _flags(pc.match_substring(values, self.value, ignore_case=True))
        compare = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}[self.operator]
        return _flags(compare(pc.cast(values, pa.float64()), pa.scalar(self.value, pa.float64())))


def parse_condition(text: str) -> Condition:
    """`FIELD OPERATOR VALUE`, as in `length>512`, `id=gsm8k-4*` or `text~sorry`.

    Raises:
        ConfigError: it is no such thing; what would be is told.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"`--filter {text}` is not a condition",
            hint="a condition is a field, one of = != < <= > >= ~, and a value: `--filter 'length>512'`",
        )
    name, operator, value = found.groups()
    field = find_field(name, option=f"--filter {text}")
    allowed = NUMBER_OPERATORS if field.is_number else TEXT_OPERATORS
    if operator not in allowed:
        raise ConfigError(
            f"`--filter {text}`: `{operator}` does not compare {'numbers' if field.is_number else 'texts'}",
            hint=f"`{name}` takes {' '.join(allowed)}",
        )
    if value.lower() == NONE_WORD and operator in ("=", "!="):
        return Condition(field, operator, None)
    return Condition(field, operator, _number(text, value) if field.is_number else value)


def find_field(name: str, *, option: str) -> Field:
    """The field of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FIELDS:
        raise ConfigError(f"`{option}`: there is no field `{name}`", hint=f"the fields: {', '.join(FIELDS)}")
    return FIELDS[name]


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"`--filter {text}`: expected a number, got `{value}`") from error


def _equal(values: pa.Array, wanted: str | float | None) -> pa.Array:
    if wanted is None:
        return pc.is_null(values)
    if isinstance(wanted, float):
        return pc.equal(pc.cast(values, pa.float64()), pa.scalar(wanted, pa.float64()))
    if "*" in wanted or "?" in wanted:
        pattern = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in wanted)
        return pc.match_substring_regex(values, f"(?s)^{pattern}$")
    return pc.equal(values, wanted)


def _flags(column: pa.Array) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool)
    return flags


def _json_object(text: str | None) -> dict[str, Any]:  # Any: free-form JSON values
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def selected_rows(recording: Recording, conditions: Sequence[Condition], *, sort: str | None = None) -> RowNumbers:
    """Numbers of the rows that pass all conditions, in the order of the file or of `sort`.

    Args:
        sort: a field, ascending; descending with `-` before it. Rows without the value come last, equal ones in
            the order of the file.

    Raises:
        ConfigError: `sort` is no field.
    """
    order = find_field(sort.removeprefix("-"), option=f"--sort {sort}") if sort is not None else None
    columns = {condition.field.column for condition in conditions} | ({order.column} if order else set())
    if not columns:
        return np.arange(recording.rows, dtype=np.int64)
    numbers, keys, first = [], [], 0
    for batch in recording.iter_batches(sorted(columns)):
        flags = np.ones(batch.num_rows, dtype=bool)
        for condition in conditions:
            flags &= condition.holds(batch)
        numbers.append(first + np.flatnonzero(flags))
        if order is not None and flags.any():
            keys.append(order.values(batch).filter(pa.array(flags)))
        first += batch.num_rows
    found = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
    if order is None or not keys:
        return found
    key = pa.chunked_array(keys)
    without = pc.is_null(key).to_numpy(zero_copy_only=False)
    table = pa.table({"key": key, "number": found}).filter(pc.is_valid(key))
    direction = "descending" if sort is not None and sort.startswith("-") else "ascending"
    ordered = pc.sort_indices(table, sort_keys=[("key", direction), ("number", "ascending")])
    in_order: RowNumbers = np.concatenate([found[~without][ordered.to_numpy()], found[without]])
    return in_order


def rows_of_sample(recording: Recording, sample_id: str) -> RowNumbers:
    """Numbers of the rows of that very sample.

    Raises:
        ConfigError: there is none.
    """
    found, first = [], 0
    for batch in recording.iter_batches(["sample_id"]):
        found.append(first + np.flatnonzero(_flags(pc.equal(batch.column("sample_id"), sample_id))))
        first += batch.num_rows
    numbers = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    if not len(numbers):
        raise ConfigError(
            f"there is no sample `{sample_id}` in `{recording.path}`",
            hint="`--filter 'id=PATTERN*' --head 20` finds ids by their beginning",
        )
    return numbers


def iter_chosen_batches(
    recording: Recording, numbers: RowNumbers, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of these numbers, in the order of the file, as batches; row groups without any are not read."""
    wanted = np.unique(numbers)
    for file in recording.files:
        inside = wanted[(wanted >= file.first_row) & (wanted < file.first_row + file.rows)] - file.first_row
        if not len(inside):
            continue
        first = 0
        for group, rows in enumerate(group_sizes(file)):
            in_group = inside[(inside >= first) & (inside < first + rows)]
            if len(in_group):
                for batch in file.iter_batches(columns, row_group=group):
                    here = in_group[(in_group >= first) & (in_group < first + batch.num_rows)]
                    if len(here):
                        yield batch if len(here) == batch.num_rows else batch.take(pa.array(here - first))
                    first += batch.num_rows
            else:
                first += rows


def rows_at(recording: Recording, numbers: RowNumbers) -> list[dict[str, Any]]:  # Any: the columns' values
    """The rows of these numbers, in this order: their columns by name."""
    rows = [row for batch in iter_chosen_batches(recording, numbers) for row in batch.to_pylist()]
    by_number = dict(zip(np.unique(numbers).tolist(), rows, strict=True))
    return [by_number[number] for number in numbers.tolist()]


def group_sizes(file: RecordedFile) -> list[int]:
    """Rows of each row group.

    Raises:
        OutputError: the file has gone or is damaged.
    """
    try:
        footer = pq.read_metadata(file.path)
    except (pa.ArrowException, OSError) as error:
        raise OutputError(f"`{file.path}` cannot be read: it has changed since it was opened") from error
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
