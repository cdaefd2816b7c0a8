"""Rows packed part by part are the rows that their lists make."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import OutputError
from managed_cli.storage.row_values import row_values
from managed_cli.storage.schema import ROLLOUTS
from managed_cli.tracking.masking import Span, TrackedNode
from managed_cli.tracking.row_part import RowPart

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
SAMPLED = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0.0) | st.just(-math.inf)), max_size=5)


def tracked(row: RowPart) -> TrackedNode:
    facts = {"sample_id": "s", "choice_index": 0, "node_id": "0.0", "finish_reason": "stop"}
    return TrackedNode("0.0", row, "text", facts, (Span(0, 1, "x", "stop"),), "", "text", "")


@given(st.lists(IDS | SAMPLED, min_size=1, max_size=6))
def test_parts_are_packed_as_the_lists_of_the_whole_row_are(parts: list[list[int] | list[tuple[int, float]]]) -> None:
    row: RowPart | None = None
    for part in parts:
        if part and isinstance(part[0], tuple):
            ids, logprobs = zip(*part, strict=True)
            row = RowPart(row, list(ids), list(logprobs))
        else:
            row = RowPart(row, part)  # type: ignore[arg-type]  # a list of ids
    assert row is not None
    node = tracked(row)
    by_parts, by_lists = row_values(node), row_values(node.node)
    for name in ("full_text", "metadata", "tokens", "masked_tokens", "logprobs", "masked_length", "sampled_length"):
        assert getattr(by_parts, name) == getattr(by_lists, name), name
    if by_lists.mean_logprob is None or not math.isfinite(by_lists.mean_logprob):
        assert by_parts.mean_logprob == by_lists.mean_logprob
    else:
        assert by_parts.mean_logprob == pytest.approx(by_lists.mean_logprob, rel=1e-9, abs=1e-9)
    tokens, masks, reals = row.arrays()
    assert struct.unpack(f"{len(row)}i", by_parts.tokens) == tuple(tokens)
    assert struct.unpack(f"{len(row)}i", by_parts.masked_tokens) == tuple(masks)
    assert by_parts.logprobs == struct.pack(f"{len(row)}f", *reals)


def test_the_mean_is_that_of_the_node() -> None:
    row = RowPart(RowPart(RowPart(None, [1, 2]), [3, 4], [-0.5, -1.5]), [5])
    assert row_values(tracked(row)).mean_logprob == tracked(row).node.mean_logprob() == -1.0
    assert row_values(tracked(RowPart(None, [1, 2]))).mean_logprob is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "column"),
    [([2**31], [-1.0], "tokens"), ([1], [None], "logprobs"), (["1"], [-1.0], "tokens")],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_what_no_column_can_hold_is_refused_by_name(
    ids: list[int], logprobs: list[float], column: str, is_listed: bool
) -> None:
    node = tracked(RowPart(RowPart(None, [1, 2]), ids, logprobs))
    with pytest.raises(OutputError, match=f"a row of sample s cannot be stored: its {column}: "):
        ROLLOUTS.packed(node.node if is_listed else node)


def test_both_packings_count_the_same_positions() -> None:
    nodes = [tracked(RowPart(RowPart(None, [1] * length), [2, 3], [-1.0, -2.0])) for length in range(4)]
    rows = [ROLLOUTS.packed(row) for row in itertools.chain(nodes, (node.node for node in nodes))]
    assert ROLLOUTS.lengths(rows[:4]) == ROLLOUTS.lengths(rows[4:]) == (0 + 1 + 2 + 3, 8)
