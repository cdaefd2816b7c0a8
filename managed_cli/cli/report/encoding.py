"""Rows packed for the page: columns of the list, and blocks of rows that the page unpacks when they are looked at.

A block is two pieces of zlib, each as base64. The first is JSON: per row its text, its number of tokens and its
metadata. The second is the arrays of all its rows, one after another, as planes of bytes, low bytes first, which
compress better than the numbers:

    ids             3 planes of N       N tokens of the block
    text lengths    3 planes of N       UTF-16 units of each token's text; only where all rows have them
    mask            1 plane of N        1 where sampled
    logprobs        2 planes of S       S sampled tokens: thousandths of a nat below 0
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from managed_cli.cli.token_texts import find_sampled_spans, find_token_texts
from managed_cli.cli.tokens_view import metadata_of
from managed_cli.types import IGNORED_TOKEN_ID

LOGPROB_STEPS = 1000
"""Steps per nat: the page shows three digits."""

LOWEST_STEP, INFINITE_STEP, MISSING_STEP = 65533, 65534, 65535
"""Codes of a logprob: the lowest that is told apart, -inf, and one that is no logprob."""

ROWS_PER_BLOCK = 32
"""Enough for rows of one sample to share what they have in common, few enough to unpack at a click."""

EXCERPT = 160
"""Characters of a row's answer in the list."""

Row = Mapping[str, Any]  # Any: the columns' values


def packed(data: bytes) -> str:
    """zlib, then base64."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def packed_json(value: object) -> str:
    """ASCII JSON, then as `packed`."""
    return packed(json.dumps(value, separators=(",", ":")).encode("ascii"))


def encoded_block(rows: Sequence[Row], run_facts: Mapping[str, Any]) -> tuple[str, str]:  # Any: JSON values
    """The two pieces of a block."""
    texts = [_token_texts(row, run_facts) for row in rows]
    entries = [_entry(row, row_texts) for row, row_texts in zip(rows, texts, strict=True)]
    ids = _joined([np.array([token or 0 for token in row["tokens"] or []], dtype=np.int64) for row in rows])
    # A row whose arrays do not align is shown as far as it goes; `inspect --check` tells what is wrong with it.
    sampled = [_sampled_flags(row) for row in rows]
    lengths = _joined([_utf16_lengths(row, row_texts) for row, row_texts in zip(rows, texts, strict=True)])
    codes = _joined([_logprob_codes(row, flags) for row, flags in zip(rows, sampled, strict=True)])
    planes = [*_planes(np.clip(ids, 0, 2**24 - 1), 3), *_planes(lengths, 3), *_planes(_joined(sampled), 1)]
    return packed_json(entries), packed(b"".join([*planes, *_planes(codes, 2)]))


def _entry(row: Row, texts: Sequence[str] | None) -> dict[str, Any]:  # Any: JSON values
    metadata = metadata_of(row)
    turns = [turn for turn in metadata.pop("turns", None) or [] if isinstance(turn, dict)]
    text, count = row["full_text"] or "", len(row["tokens"] or [])
    entry: dict[str, Any] = {  # Any: as above
        "text": text,
        "tokens": count,
        "spelt": texts is not None,
        "turns": [[turn.get("start"), turn.get("end"), turn.get("finish_reason")] for turn in turns],
        "metadata": metadata,
    }
    if texts is None:
        entry["spans"] = find_sampled_spans(turns, text, count)
        if not text.isascii() and entry["spans"]:
            entry["spans"] = [[_utf16_length(text[:start]), _utf16_length(text[:end])] for start, end in entry["spans"]]
    return entry


def _token_texts(row: Row, run_facts: Mapping[str, Any]) -> list[str] | None:  # Any: JSON values
    tokens = row["tokens"] or []
    if any(token is None for token in tokens):
        return None
    return find_token_texts(run_facts, tokens, row["full_text"] or "")


def _sampled_flags(row: Row) -> npt.NDArray[np.int64]:
    masks = row["masked_tokens"] or []
    return np.array(
        [
            int(position < len(masks) and masks[position] not in (IGNORED_TOKEN_ID, None))
            for position in range(len(row["tokens"] or []))
        ],
        dtype=np.int64,
    )


def _utf16_lengths(row: Row, texts: Sequence[str] | None) -> npt.NDArray[np.int64]:
    if texts is None:
        return np.zeros(len(row["tokens"] or []), dtype=np.int64)
    return np.array([_utf16_length(text) for text in texts], dtype=np.int64)


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _logprob_codes(row: Row, flags: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    logprobs = np.full(len(flags), np.nan)
    known = [np.nan if value is None else value for value in (row["logprobs"] or [])[: len(flags)]]
    logprobs[: len(known)] = known
    logprobs = logprobs[flags == 1]
    with np.errstate(invalid="ignore"):
        steps = np.clip(np.round(-logprobs * LOGPROB_STEPS), 0, LOWEST_STEP)
    steps[np.isnan(logprobs)] = MISSING_STEP
    steps[np.isneginf(logprobs)] = INFINITE_STEP
    codes: npt.NDArray[np.int64] = steps.astype(np.int64)
    return codes


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def _planes(values: npt.NDArray[np.int64], count: int) -> list[bytes]:
    return [((values >> (8 * place)) & 255).astype(np.uint8).tobytes() for place in range(count)]


def encoded_list(numbers: Sequence[int], rows: Sequence[Row], excerpts: Sequence[str]) -> str:
    """What the list shows of every row, column by column."""
    reasons = sorted({str(row["finish_reason"]) for row in rows})
    place = {reason: index for index, reason in enumerate(reasons)}
    means = [row["mean_logprob"] for row in rows]
    return packed_json(
        {
            "number": list(numbers),
            "id": [str(row["sample_id"]) for row in rows],
            "choice": [row["choice_index"] for row in rows],
            "node": [row["node_id"] for row in rows],
            "parent": [row["parent_id"] for row in rows],
            "prompt": [row["prompt_length"] for row in rows],
            "length": [row["completion_length"] for row in rows],
            "mean": [round(mean, 4) if mean is not None and np.isfinite(mean) else None for mean in means],
            "reasons": reasons,
            "finish": [place[str(row["finish_reason"])] for row in rows],
            "excerpt": [text[:EXCERPT] for text in excerpts],
        }
    )
