"""The columns of a recorded file, in one table, and how rows become Arrow.

Adding a column is one entry in `COLUMNS`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB

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


NEVER_NULL = "never"
"""The null rule of a column in which no null can stand."""


class Storable(Protocol):
    """What a row is made of; the columns of its format say what they read off it."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # Any: JSON values, `sample_id` among them


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, its meaning, and how it is read off a node.

    Attributes:
        unit: unit or shape, for people; T positions of a row.
        null_rule: when a null stands there; "never" where none can.
        byte_stream_split: Parquet encoding for floats; dictionary encoding otherwise where `dictionary`.
    """

    name: str
    type: pa.DataType
    meaning: str
    value: Callable[[Any], Any]  # Any: a node, or what else a format has rows of; and whatever `type` holds
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


def _metadata(key: str) -> Callable[[SequenceNode], Any]:  # Any: as above
    return lambda node: node.metadata.get(key)


def _mean_logprob(node: SequenceNode) -> float | None:
    """`node.mean_logprob()` in a tenth of its time: the exact sum, less the 1.0 of every masked position."""
    masked = node.masked_tokens.count(IGNORED_TOKEN_ID)
    sampled = len(node.tokens) - masked
    return math.fsum((*node.logprobs, -MASKED_LOGPROB * masked)) / sampled if sampled else None


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
        "full_text", pa.string(), "decode(tokens), special tokens kept", lambda node: node.full_text, unit="characters"
    ),
    Column(
        "tokens",
        pa.list_(pa.int32()),
        "ids the model saw and sampled",
        lambda node: node.tokens,
        unit="[T] token ids",
        dictionary=True,
    ),
    Column(
        "masked_tokens",
        pa.list_(pa.int32()),
        "the same ids, -100 where the model did not sample",
        lambda node: node.masked_tokens,
        unit="[T] token ids",
        dictionary=True,
    ),
    Column(
        "logprobs",
        pa.list_(pa.float32()),
        "natural log at sampled positions, 1.0 elsewhere",
        lambda node: node.logprobs,
        unit="[T] nats",
        byte_stream_split=True,
    ),
    Column(
        "prompt_length",
        pa.int32(),
        "masked positions, those between sampled turns included",
        lambda node: node.masked_tokens.count(IGNORED_TOKEN_ID),
        unit="tokens",
    ),
    Column(
        "completion_length",
        pa.int32(),
        "sampled positions, of all turns",
        lambda node: len(node.tokens) - node.masked_tokens.count(IGNORED_TOKEN_ID),
        unit="tokens",
    ),
    Column(
        "mean_logprob",
        pa.float32(),
        "mean over sampled positions",
        _mean_logprob,
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
        "what was sent (`sampling`), sampled spans (`turns`), server, model, logprobs mode, input `fields`, …",
        lambda node: json_text(node.metadata),
        unit="JSON object",
    ),
)


@dataclasses.dataclass(frozen=True, eq=False)
class RowFormat:
    """A kind of rows that outputs hold: what messages call it, and its columns, `sample_id` among them."""

    name: str
    columns: tuple[Column, ...]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns as Arrow has them."""
        return pa.schema([pa.field(column.name, column.type, nullable=column.nullable) for column in self.columns])

    @functools.cached_property
    def read_schema(self) -> pa.Schema:
        """What batches are cast to, where another program wrote the file; nulls are for `check_recording` to find."""
        return pa.schema([field.with_nullable(True) for field in self.schema])

    def record_batch(self, rows: Sequence[Storable]) -> pa.RecordBatch:
        """`rows` as one Arrow batch of `schema`."""
        arrays = [pa.array([column.value(row) for row in rows], type=column.type) for column in self.columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


ROLLOUTS = RowFormat("a recording", COLUMNS)
"""Rows of `SequenceNode`s."""

SCHEMA = ROLLOUTS.schema


def json_text(value: object) -> str:
    """`value` as compact JSON, keys in their order, non-ASCII kept.

    A lone surrogate, which UTF-8 cannot hold, stays the `\\ud800` escape that JSON has for it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def record_batch(nodes: Sequence[SequenceNode]) -> pa.RecordBatch:
    """`nodes` as one Arrow batch of `SCHEMA`."""
    return ROLLOUTS.record_batch(nodes)
