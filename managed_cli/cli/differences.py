"""Two recordings of the same prompts, row by row: what is the same, and where the rest begins to differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from managed_cli.storage.reader import Recording
from managed_cli.types import IGNORED_TOKEN_ID

COMPARED_COLUMNS = (
    "sample_id",
    "choice_index",
    "full_text",
    "tokens",
    "masked_tokens",
    "finish_reason",
    "completion_length",
    "mean_logprob",
)

MEAN_TOLERANCE = 1e-6
"""How far two mean logprobs may differ and still be called the same: float32 rounding."""

Key = tuple[str, int, int]
"""Sample id, choice index, and which of the rows of that choice: a rollout that forks leaves several."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is remembered of a row: enough to say whether another one is the same.

    Attributes:
        row: its number.
        digest: of its ids and its mask.
        length: sampled tokens.
    """

    row: int
    digest: int
    text: int
    length: int
    finish_reason: str | None
    mean_logprob: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rows of the same choice.

    Attributes:
        differs: which of `tokens`, `text`, `length`, `finish_reason` and `mean_logprob` do.
    """

    sample_id: str
    choice_index: int
    one: Side
    other: Side

    @property
    def differs(self) -> tuple[str, ...]:
        """The names of what is not the same in both."""
        one, other = self.one, self.other
        found = {
            "tokens": one.digest != other.digest,
            "text": one.text != other.text,
            "length": one.length != other.length,
            "finish_reason": one.finish_reason != other.finish_reason,
            "mean_logprob": not _same_mean(one.mean_logprob, other.mean_logprob),
        }
        return tuple(name for name, is_so in found.items() if is_so)


@dataclasses.dataclass(slots=True, kw_only=True)
class Comparison:
    """All pairs of two recordings.

    Attributes:
        different: those that differ in something, in the order of the other recording.
        only_in_one: rows of the first without a partner; `only_in_other` likewise.
        first_only: the first of them, for a look; `first_other` likewise.
    """

    pairs: int = 0
    different: list[Pair] = dataclasses.field(default_factory=list)
    only_in_one: int = 0
    only_in_other: int = 0
    first_only: str | None = None
    first_other: str | None = None

    def counts(self) -> dict[str, int]:
        """What differs → in how many pairs."""
        names = ("tokens", "text", "length", "finish_reason", "mean_logprob")
        return {name: sum(name in pair.differs for pair in self.different) for name in names}

    def finish_changes(self) -> dict[str, int]:
        """`stop → length` → in how many pairs."""
        changes: dict[str, int] = {}
        for pair in self.different:
            if pair.one.finish_reason != pair.other.finish_reason:
                name = f"{pair.one.finish_reason} → {pair.other.finish_reason}"
                changes[name] = changes.get(name, 0) + 1
        return changes


def compare(one: Recording, other: Recording) -> Comparison:
    """Every row of both by sample, choice and place among that choice's rows. Memory: some 300 bytes a row of `one`."""
    waiting = dict(_sides(one))
    found = Comparison()
    for key, side in _sides(other):
        partner = waiting.pop(key, None)
        if partner is None:
            found.only_in_other += 1
            found.first_other = found.first_other or f"{key[0]}, choice {key[1]}"
            continue
        found.pairs += 1
        pair = Pair(sample_id=key[0], choice_index=key[1], one=partner, other=side)
        if pair.differs:
            found.different.append(pair)
    found.only_in_one = len(waiting)
    if waiting:
        sample_id, choice_index, _ = next(iter(waiting))
        found.first_only = f"{sample_id}, choice {choice_index}"
    return found


def _sides(recording: Recording) -> Iterator[tuple[Key, Side]]:
    number = 0
    sample_id: str | None = None
    seen: dict[int, int] = {}
    for batch in recording.iter_batches(COMPARED_COLUMNS):
        masks = batch.column("masked_tokens")
        arrays = [_row_arrays(batch.column("tokens")), _row_arrays(masks)]
        columns = [batch.column(name).to_pylist() for name in COMPARED_COLUMNS if "tokens" not in name]
        for row, (sample, choice, text, finish_reason, length, mean) in enumerate(zip(*columns, strict=True)):
            if sample != sample_id:
                sample_id, seen = sample, {}
            seen[choice] = seen.get(choice, -1) + 1
            digest = hash((arrays[0][row].tobytes(), arrays[1][row].tobytes()))
            yield (
                (sample, choice, seen[choice]),
                Side(
                    row=number,
                    digest=digest,
                    text=hash(text),
                    length=length,
                    finish_reason=finish_reason,
                    mean_logprob=mean,
                ),
            )
            number += 1


def _row_arrays(column: Any) -> list[npt.NDArray[np.int32]]:  # Any: pyarrow publishes no types; a ListArray
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(flat, np.cumsum(lengths)[:-1])


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> int | None:  # Any: columns' values
    """The first position at which two rows have another id or another mask; None where they have the same."""
    pairs = [list(zip(row["tokens"], row["masked_tokens"], strict=False)) for row in (one, other)]
    for position, (mine, theirs) in enumerate(zip(*pairs, strict=False)):
        if mine != theirs:
            return position
    return None if len(pairs[0]) == len(pairs[1]) else min(len(pairs[0]), len(pairs[1]))


def is_in_prompt(row: dict[str, Any], position: int) -> bool:  # Any: columns' values
    """Whether nothing was sampled up to and at `position`."""
    return all(mask == IGNORED_TOKEN_ID for mask in row["masked_tokens"][: position + 1])


def _same_mean(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or math.isclose(one, other, rel_tol=MEAN_TOLERANCE, abs_tol=MEAN_TOLERANCE)
