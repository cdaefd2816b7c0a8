"""What the columns of a recording read off a row: its lists packed, and what is counted of them.

A tracked node is packed part by part: ids that were sampled are packed once for both of their columns, and where
nothing was sampled mask and logprob are the same at every position. Lists of the whole row are not made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from managed_cli.storage.packing import UNPACKABLE, packed_integers, packed_reals
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB

if TYPE_CHECKING:  # pydantic, which readers of files do without
    from managed_cli.node import SequenceNode
    from managed_cli.tracking.masking import TrackedNode

MASKED = packed_integers([IGNORED_TOKEN_ID])
"""A masked position in packed form: no ids in a row can make these bytes across two of them, since none is negative."""

WITHOUT_LOGPROB = packed_reals([MASKED_LOGPROB])
"""The logprob of a masked position in packed form."""


class RowValues:
    """A row of T positions as its columns read it.

    Attributes:
        tokens, masked_tokens, logprobs: [T], each packed.
        masked_length: how many positions are masked (tokens).
        sampled_length: how many positions the model sampled (tokens).
        mean_logprob: over sampled positions, natural log; None without any.
    """

    __slots__ = (
        "full_text",
        "logprobs",
        "masked_length",
        "masked_tokens",
        "mean_logprob",
        "metadata",
        "sampled_length",
        "tokens",
    )

    def __init__(
        self,
        row: SequenceNode | TrackedNode,
        lists: tuple[bytes, bytes, bytes],
        masked_length: int,
        logprob_sum: float,
    ) -> None:
        self.full_text = row.full_text
        self.metadata: Mapping[str, Any] = row.metadata  # Any: JSON values
        self.tokens, self.masked_tokens, self.logprobs = lists
        self.masked_length = masked_length
        self.sampled_length = sampled_length = len(self.tokens) // len(MASKED) - masked_length
        self.mean_logprob = logprob_sum / sampled_length if sampled_length else None


def row_values(row: SequenceNode | TrackedNode) -> RowValues:
    """The values of a row.

    Raises:
        ValueError: a number that its column cannot hold; says which column.
    """
    # Told apart by what they have: who only reads files need not import what makes rows.
    return _of_parts(cast("TrackedNode", row)) if hasattr(row, "row") else _of_lists(row)


def _of_parts(node: TrackedNode) -> RowValues:
    tokens: list[bytes] = []
    masks: list[bytes] = []
    logprobs: list[bytes] = []
    masked_length, logprob_sum = 0, 0.0
    for part in node.row.parts():
        ids = _packed("tokens", packed_integers, part.tokens)
        tokens.append(ids)
        if part.logprobs is None:
            length = len(part.tokens)
            masked_length += length
            masks.append(MASKED * length)
            logprobs.append(WITHOUT_LOGPROB * length)
        else:
            masks.append(ids)
            logprobs.append(_packed("logprobs", packed_reals, part.logprobs))
            logprob_sum += sum(part.logprobs)
    return RowValues(node, (b"".join(tokens), b"".join(masks), b"".join(logprobs)), masked_length, logprob_sum)


def _of_lists(node: SequenceNode) -> RowValues:
    tokens = _packed("tokens", packed_integers, node.tokens)
    masks = _packed("masked_tokens", packed_integers, node.masked_tokens)
    logprobs = _packed("logprobs", packed_reals, node.logprobs)
    masked_length = masks.count(MASKED)
    # The node's own mean would be an exact sum, which takes longer.
    return RowValues(
        node, (tokens, masks, logprobs), masked_length, sum(node.logprobs) - MASKED_LOGPROB * masked_length
    )


def _packed(column: str, pack: Callable[[Sequence[Any]], bytes], values: Sequence[Any]) -> bytes:  # Any: numbers
    try:
        return pack(values)
    except UNPACKABLE as error:
        raise ValueError(f"its {column}: {error}") from error
