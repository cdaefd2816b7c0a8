"""The columns of a recorded file, in one table, and how rows become Arrow.

Adding a column is one entry in `COLUMNS`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from managed_cli.errors import OutputError
from managed_cli.storage.packing import UNPACKABLE, Packing, packing_of
from managed_cli.storage.row_values import RowValues, row_values

if TYPE_CHECKING:  # pydantic, which readers of files do without
    from managed_cli.node import SequenceNode

SCHEMA_VERSION = 1
"""Goes into the key-value metadata; raised when a column changes its meaning."""

RUN_METADATA_KEY = b"managed_cli.run"
"""Key-value metadata: JSON object of run facts (settings, server, model, tokenizer). Never a secret."""

SUMMARY_METADATA_KEY = b"managed_cli.summary"
"""Key-value metadata: JSON object of counts over this file's rows (`storage.summary.Summary`)."""

STATISTICS_METADATA_KEY = b"managed_cli.statistics"
"""Key-value metadata: JSON object of histograms over this file's rows (`storage.statistics.Statistics`)."""

FINGERPRINT_METADATA_KEY = b"managed_cli.fingerprint"
"""Key-value metadata: flat JSON object of the settings that must not change while a run is resumed."""

SESSIONS_METADATA_KEY = b"managed_cli.sessions"
"""Key-value metadata: JSON array of which session wrote how many of this file's rows (`storage.footer.Session`)."""

FILE_METADATA = {
    RUN_METADATA_KEY: "facts of the run: settings, server, model, tokenizer; never a secret",
    SUMMARY_METADATA_KEY: "counts over this file's rows",
    STATISTICS_METADATA_KEY: "histograms of lengths, logprobs, turns and servers over this file's rows",
    FINGERPRINT_METADATA_KEY: "the settings that must not change while a run is resumed",
    SESSIONS_METADATA_KEY: "which start of the run wrote how many of the rows",
}
"""Key-value metadata of a file → what its JSON says."""


OF_THE_INPUT = frozenset({"fields", "messages", "tools"})
"""Keys of a row's metadata with values that the input has brought along."""

PackedRow = tuple[Any, ...]  # Any: what the packings of a format's columns make of their values

NEVER_NULL = "never"
"""The null rule of a column in which no null can stand."""


class Storable(Protocol):
    """What a row is made of; the columns of its format say what they read off it."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # Any: JSON values, `sample_id` among them


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, its meaning, and how it is read off a row.

    Attributes:
        unit: unit or shape, for people; T positions of a row.
        null_rule: when a null stands there; "never" where none can.
        byte_stream_split: Parquet encoding for floats; dictionary encoding otherwise where `dictionary`.
    """

    name: str
    type: pa.DataType
    meaning: str
    value: Callable[[Any], Any]  # Any: what the format sees a row as; and whatever `type` holds
    unit: str
    null_rule: str = NEVER_NULL
    dictionary: bool = False
    byte_stream_split: bool = False

    @property
    def nullable(self) -> bool:
        """Whether a null can stand there."""
        return self.null_rule != NEVER_NULL

    @property
    def type_name(self) -> str:
        """The Arrow type in words: `string`, `int32`, `list<float32>`."""
        return _type_name(self.type)


def _type_name(type: pa.DataType) -> str:
    if pa.types.is_list(type):
        return f"list<{_type_name(type.value_type)}>"
    return "float32" if pa.types.is_float32(type) else str(type)  # Arrow itself says `float`


def _metadata(key: str) -> Callable[[RowValues], Any]:  # Any: as above
    return lambda row: row.metadata.get(key)


COLUMNS: tuple[Column, ...] = (
    Column(
        "sample_id", pa.string(), "identity of the input sample", _metadata("sample_id"), unit="id", dictionary=True
    ),
    Column("choice_index", pa.int32(), "which of the sample's choices", _metadata("choice_index"), unit="0 … n-1"),
    Column("node_id", pa.string(), "identity of this row within its sample", _metadata("node_id"), unit="id"),
    Column(
        "parent_id",
        pa.string(),
        "the node that this one extends",
        _metadata("parent_id"),
        unit="id",
        null_rule="for a root",
    ),
    Column(
        "full_text",
        pa.string(),
        "decode(tokens), special tokens kept",
        lambda row: row.full_text,
        unit="characters",
    ),
    Column(
        "tokens",
        pa.list_(pa.int32()),
        "ids the model saw and sampled",
        lambda row: row.tokens,
        unit="[T] token ids",
        dictionary=True,
    ),
    Column(
        "masked_tokens",
        pa.list_(pa.int32()),
        "the same ids, -100 where the model did not sample",
        lambda row: row.masked_tokens,
        unit="[T] token ids",
        dictionary=True,
    ),
    Column(
        "logprobs",
        pa.list_(pa.float32()),
        "natural log at sampled positions, 1.0 elsewhere",
        lambda row: row.logprobs,
        unit="[T] nats",
        byte_stream_split=True,
    ),
    Column(
        "prompt_length",
        pa.int32(),
        "masked positions, those between sampled turns included",
        lambda row: row.masked_length,
        unit="tokens",
    ),
    Column(
        "completion_length",
        pa.int32(),
        "sampled positions, of all turns",
        lambda row: row.sampled_length,
        unit="tokens",
    ),
    Column(
        "mean_logprob",
        pa.float32(),
        "mean over sampled positions",
        lambda row: row.mean_logprob,
        unit="nats",
        null_rule="without sampled positions",
    ),
    Column(
        "finish_reason",
        pa.string(),
        "why the last completion ended: `stop`, `length`, …",
        _metadata("finish_reason"),
        unit="word",
        dictionary=True,
    ),
    Column(
        "metadata",
        pa.string(),
        "what was sent (`sampling`; of a chat `messages`, `tools`), sampled spans (`turns`), server, model, logprobs "
        "mode, input `fields`, …",
        lambda row: metadata_text(row.metadata),
        unit="JSON object",
    ),
)


@dataclasses.dataclass(frozen=True, eq=False)
class RowFormat:
    """A kind of rows that outputs hold: what messages call it, and its columns, `sample_id` among them.

    Attributes:
        seen_as: what columns read their values off, made of a row; None where that is the row itself.
    """

    name: str
    columns: tuple[Column, ...]
    seen_as: Callable[[Any], Any] | None = None  # Any: a row of the format

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns as Arrow has them."""
        return pa.schema([pa.field(column.name, column.type, nullable=column.nullable) for column in self.columns])

    @functools.cached_property
    def read_schema(self) -> pa.Schema:
        """What batches are cast to, where another program wrote the file; nulls are for `check_recording` to find."""
        return pa.schema([field.with_nullable(True) for field in self.schema])

    @functools.cached_property
    def _packings(self) -> list[Packing]:
        return [packing_of(column.type, nullable=column.nullable) for column in self.columns]

    @functools.cached_property
    def _readers(self) -> list[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:  # Any: as in `Column.value`
        return [(column.value, packing.pack) for column, packing in zip(self.columns, self._packings, strict=True)]

    def packed(self, row: Storable) -> PackedRow:
        """The values of `row`, one for each column, as they are kept until `batch_of` makes Arrow of many rows.

        Raises:
            OutputError: a value does not fit its column; the row's sample and the column are named.
        """
        seen: Any = None  # Any: what `seen_as` makes of it
        try:
            seen = row if self.seen_as is None else self.seen_as(row)
            return tuple([pack(value_of(seen)) for value_of, pack in self._readers])
        except UNPACKABLE as error:
            unpackable = map(_unpackable, self.columns, self._packings, itertools.repeat(seen))
            reason = error if seen is None else next(filter(None, unpackable), error)
            raise OutputError(f"a row of sample {row.metadata.get('sample_id')} cannot be stored: {reason}") from error

    @functools.cached_property
    def _length_columns(self) -> tuple[int, int | None]:
        at = {column.name: number for number, column in enumerate(self.columns)}
        return at["prompt_length"], at.get("completion_length")

    def lengths(self, rows: Sequence[PackedRow]) -> tuple[int, int]:
        """Positions of packed rows that the model did not sample, and how many it did; those only some formats have."""
        prompt, completion = self._length_columns
        sampled = 0 if completion is None else sum([row[completion] for row in rows])
        return sum([row[prompt] for row in rows]), sampled

    def batch_of(self, rows: Sequence[PackedRow]) -> pa.RecordBatch:
        """One Arrow batch of `schema`."""
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        columns = zip(*rows, strict=True)
        arrays = [packing.array(values) for packing, values in zip(self._packings, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def record_batch(self, rows: Sequence[Storable]) -> pa.RecordBatch:
        """`rows` as one Arrow batch of `schema`. Raises as `packed` does."""
        return self.batch_of([self.packed(row) for row in rows])


def _unpackable(column: Column, packing: Packing, seen: object) -> str | None:
    """Why the column cannot hold its value of a row; None where it can."""
    value: object = ""
    try:
        value = column.value(seen)
        packing.pack(value)
    except UNPACKABLE as error:
        return f"it has no {column.name}" if value is None else f"its {column.name}: {error}"
    return None


ROLLOUTS = RowFormat("a recording", COLUMNS, seen_as=row_values)
"""Rows of `SequenceNode`s, and of the tracked nodes of a run."""

SCHEMA = ROLLOUTS.schema


def json_text(value: object) -> str:
    """`value` as compact JSON, keys in their order, non-ASCII kept.

    A lone surrogate, which UTF-8 cannot hold, stays the `\\ud800` escape that JSON has for it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def metadata_text(metadata: Mapping[str, Any]) -> str:  # Any: JSON values
    """`json_text` of a row's metadata, in a fifth of its time where nothing of the input's is in it.

    The faster encoder writes what is no JSON, such as NaN, as null: only what came with the input could hold that.
    """
    if OF_THE_INPUT.isdisjoint(metadata):
        try:
            return msgspec.json.encode(metadata).decode("utf-8")
        except (UnicodeEncodeError, TypeError):  # a lone surrogate, or what is for the other encoder to refuse
            pass
    return json_text(metadata)


def record_batch(nodes: Sequence[SequenceNode]) -> pa.RecordBatch:
    """`nodes` as one Arrow batch of `SCHEMA`."""
    return ROLLOUTS.record_batch(nodes)
