"""What is wrong with a row that can be told without scoring it: ids, text, turns.

Encoding the text again is no test: sampled ids need not be those that a tokenizer would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from managed_cli.node import alignment_breach
from managed_cli.scoring.rows import Positions, Row
from managed_cli.storage.check import KINDS as CHECK_KINDS
from managed_cli.types import Tokenizer

UNFINISHED_CHARACTER = "\ufffd"
"""What `decode` writes for bytes that are no whole UTF-8 character."""

FAULT_KINDS = {
    **CHECK_KINDS,
    "outside_vocabulary": "an id that the model does not have",
    "first_position": "position 0 is sampled, but nothing precedes it",
    "masked_text": "masked ids whose text is not that of full_text",
    "sampled_text": "sampled ids whose text is not that of full_text",
    "doubled_end": "an end-of-turn token that stands twice, though a turn samples one",
    "turns": "sampled positions that are not those of the turns in the metadata",
}
"""Kind of fault → what it means; those of `inspect --check` bear the same names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with one row.

    Attributes:
        position: where it begins; None where the whole row is meant.
        detail: what was expected and what is there.
    """

    kind: str
    position: int | None
    detail: str


def find_faults(row: Row, tokenizer: Tokenizer, vocab_size: int) -> list[Fault]:
    """All faults of `row`, those of its arrays first."""
    faults = [Fault(kind, None, _why(row, kind)) for kind in row.breaches]
    if not row.is_whole:
        return faults
    outside = np.flatnonzero(row.tokens >= vocab_size)
    if len(outside):
        position = int(outside[0])
        detail = f"id {row.tokens[position]} at position {position}, the vocabulary has {vocab_size}"
        faults.append(Fault("outside_vocabulary", position, detail))
    if len(row.sampled) and row.sampled[0] == 0:
        faults.append(Fault("first_position", 0, "the mask does not hide it"))
    faults += _doubled_ends(row, tokenizer)
    turns = find_turn_positions(row)
    if turns is not None and not np.array_equal(turns, row.sampled):
        faults.append(Fault("turns", None, f"{len(turns)} positions in the turns, {len(row.sampled)} in the mask"))
    if not len(outside):
        faults += _text_faults(row, tokenizer)
    return faults


def _why(row: Row, kind: str) -> str:
    """What the rule of `inspect --check` found, in words."""
    if kind == "length":
        names = ("tokens", "masked_tokens", "logprobs")
        return ", ".join(f"{size} {name}" for size, name in zip(row.sizes, names, strict=True))
    if row.is_whole:
        masks = np.full(len(row.tokens), -100)
        masks[row.sampled] = row.tokens[row.sampled]
        breach = alignment_breach(row.tokens.tolist(), masks.tolist(), row.logprobs.tolist())
        if breach is not None and breach[0] == kind:
            return breach[1]
    return CHECK_KINDS[kind]


def find_turn_positions(row: Row) -> Positions | None:
    """The positions that the row's metadata says were sampled, ascending; None where it does not say."""
    turns = row.metadata.get("turns")
    if not isinstance(turns, list) or not turns:
        return None
    spans: list[Any] = [(turn.get("start"), turn.get("end")) if isinstance(turn, dict) else () for turn in turns]
    if not all(len(span) == 2 and all(isinstance(edge, int) for edge in span) for span in spans):
        return None
    return np.concatenate([np.arange(start, end) for start, end in spans]).astype(np.intp)


def _doubled_ends(row: Row, tokenizer: Tokenizer) -> Iterator[Fault]:
    """A sampled end-of-turn token with the same token behind it."""
    ends = np.isin(row.tokens, sorted(tokenizer.eos_token_ids))
    sampled = np.zeros(len(row.tokens), dtype=bool)
    sampled[row.sampled] = True
    doubled = np.flatnonzero(ends[:-1] & sampled[:-1] & (row.tokens[:-1] == row.tokens[1:]))
    if len(doubled):
        position = int(doubled[0])
        detail = f"id {row.tokens[position]} at positions {position} and {position + 1}"
        yield Fault("doubled_end", position + 1, detail)


def _text_faults(row: Row, tokenizer: Tokenizer) -> Iterator[Fault]:
    ids = row.tokens.tolist()
    if tokenizer.decode(ids) == row.full_text:
        return
    position = first_text_difference(ids, row.full_text, tokenizer)
    if position == len(ids):
        position = max(0, len(ids) - 1)
        detail = "full_text goes on behind the last token"
    else:
        begin = len(_whole_text(ids[:position], tokenizer))
        there = row.full_text[begin : begin + 12]
        detail = f"id {ids[position]} decodes to {tokenizer.decode([ids[position]])!r}, full_text has {there!r}"
        swapped = [*ids[:position], *ids[position + 1 : position + 2], ids[position], *ids[position + 2 :]]
        if position + 1 < len(ids) and tokenizer.decode(swapped) == row.full_text:
            detail = f"the tokens at {position} and {position + 1} stand in each other's place"
    kind = "sampled_text" if position in row.sampled else "masked_text"
    yield Fault(kind, position, detail)


def first_text_difference(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
    """The first position whose token's text is not that of `text`; the number of ids where `text` only goes on."""
    fitting, differing = 0, len(ids) + 1
    while differing - fitting > 1:
        middle = (fitting + differing) // 2
        if text.startswith(_whole_text(ids[:middle], tokenizer)):
            fitting = middle
        else:
            differing = middle
    return fitting


def _whole_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids without the characters that a later token completes."""
    return tokenizer.decode(ids).rstrip(UNFINISHED_CHARACTER)
