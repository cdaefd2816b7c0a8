"""The columns of a recorded file, in one table, and how rows become Arrow.

Adding a column is one entry in `COLUMNS`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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

FINGERPRINT_METADATA_KEY = b"managed_cli.fingerprint"
"""Key-value metadata: flat JSON object of the settings that must not change while a run is resumed."""

SESSIONS_METADATA_KEY = b"managed_cli.sessions"
"""Key-value metadata: JSON array of which session wrote how many of this file's rows (`storage.footer.Session`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, its meaning, and how it is read off a node.

    Attributes:
        unit: unit or shape, for people.
        nullable: whether a null can stand there, and then `meaning` says when.
        byte_stream_split: Parquet encoding for floats; dictionary encoding otherwise where `dictionary`.
    """

    name: str
    type: pa.DataType
    meaning: str
    value: Callable[[SequenceNode], Any]  # Any: whatever `type` holds
    unit: str = ""
    nullable: bool = False
    dictionary: bool = False
    byte_stream_split: bool = False


def _metadata(key: str) -> Callable[[SequenceNode], Any]:  # Any: as above
    return lambda node: node.metadata.get(key)


def _mean_logprob(node: SequenceNode) -> float | None:
    """`node.mean_logprob()` in a tenth of its time: the exact sum, less the 1.0 of every masked position."""
    masked = node.masked_tokens.count(IGNORED_TOKEN_ID)
    sampled = len(node.tokens) - masked
    return math.fsum((*node.logprobs, -MASKED_LOGPROB * masked)) / sampled if sampled else None


COLUMNS: tuple[Column, ...] = (
    Column("sample_id", pa.string(), "identity of the input sample", _metadata("sample_id"), dictionary=True),
    Column("choice_index", pa.int32(), "which of the sample's choices", _metadata("choice_index"), unit="0 … n-1"),
    Column("node_id", pa.string(), "identity of this row within its sample", _metadata("node_id")),
    Column(
        "parent_id", pa.string(), "the node this one extends; null for a root", _metadata("parent_id"), nullable=True
    ),
    Column("full_text", pa.string(), "decode(tokens), special tokens kept", lambda node: node.full_text),
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
        "masked positions",
        lambda node: node.masked_tokens.count(IGNORED_TOKEN_ID),
        unit="tokens",
    ),
    Column(
        "completion_length",
        pa.int32(),
        "sampled positions",
        lambda node: len(node.tokens) - node.masked_tokens.count(IGNORED_TOKEN_ID),
        unit="tokens",
    ),
    Column(
        "mean_logprob",
        pa.float32(),
        "mean over sampled positions; null without any",
        _mean_logprob,
        unit="nats",
        nullable=True,
    ),
    Column("finish_reason", pa.string(), "why the last completion ended", _metadata("finish_reason"), dictionary=True),
    Column(
        "metadata",
        pa.string(),
        "JSON object: sampling sent, spans of sampled turns, server, input fields, …",
        lambda node: json_text(node.metadata),
        unit="JSON",
    ),
)

SCHEMA = pa.schema([pa.field(column.name, column.type, nullable=column.nullable) for column in COLUMNS])


def json_text(value: object) -> str:
    """`value` as compact JSON, keys in their order, non-ASCII kept.

    A lone surrogate, which UTF-8 cannot hold, stays the `\\ud800` escape that JSON has for it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def record_batch(nodes: Sequence[SequenceNode]) -> pa.RecordBatch:
    """`nodes` as one Arrow batch of `SCHEMA`."""
    arrays = [pa.array([column.value(node) for node in nodes], type=column.type) for column in COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
