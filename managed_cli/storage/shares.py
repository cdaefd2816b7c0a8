"""Sums over ranges of a batch's positions: what a turn or a server has sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from managed_cli.types import IGNORED_TOKEN_ID


@dataclasses.dataclass(slots=True, kw_only=True)
class Share:
    """What one server, or one turn, has to do with the rows.

    Attributes:
        count: rows of a server; completions of a turn.
        tokens: sampled positions.
        length_stops: how many ended because of a limit on their length.
        logprob_sum: natural logs summed over sampled positions with a finite one.
        logprob_count: how many positions are in `logprob_sum`.
    """

    count: int = 0
    tokens: int = 0
    length_stops: int = 0
    logprob_sum: float = 0.0
    logprob_count: int = 0

    def add(self, other: Share) -> None:
        """Count what `other` counts, too."""
        self.count += other.count
        self.tokens += other.tokens
        self.length_stops += other.length_stops
        self.logprob_sum += other.logprob_sum
        self.logprob_count += other.logprob_count

    def mean_logprob(self) -> float | None:
        """Mean over the positions in `logprob_sum`, natural log; None without any."""
        return self.logprob_sum / self.logprob_count if self.logprob_count else None


class SampledPositions:
    """The positions of a batch in one row after another: which are sampled, and sums over them.

    Attributes:
        ids: of all positions, [positions].
        edges: where each row begins, and where the last one ends, [rows + 1].
        flags: which positions are sampled, [positions].
        logprobs: of all positions, [positions].
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        tokens, masks, logprobs = (batch.column(name) for name in ("tokens", "masked_tokens", "logprobs"))
        lengths = integers(pc.list_value_length(tokens))
        self.ids = pc.fill_null(tokens.flatten(), 0).to_numpy(zero_copy_only=False)
        self.edges = np.concatenate(([0], np.cumsum(lengths)))
        flat_masks, flat_logprobs = masks.flatten(), logprobs.flatten()
        whole = all(len(values) == len(self.ids) and not values.null_count for values in (flat_masks, flat_logprobs))
        count = len(self.ids)
        # Rows that break the rules are for `check_recording` to tell; here nothing of such a batch counts as sampled.
        self.flags = flat_masks.to_numpy() != IGNORED_TOKEN_ID if whole else np.zeros(count, dtype=bool)
        self.logprobs = flat_logprobs.to_numpy() if whole else np.zeros(count, dtype=np.float32)
        finite = np.isfinite(self.logprobs)
        counted = self.flags if finite.all() else self.flags & finite
        total = self.logprobs * counted if counted is self.flags else np.where(counted, self.logprobs, np.float32(0.0))
        self._summed: tuple[tuple[npt.NDArray[Any], type[np.generic]], ...]  # Any: flags or numbers
        self._summed = ((self.flags, np.int64), (total, np.float64), (counted, np.int64))

    def within(self, begins: Sequence[int], ends: Sequence[int]) -> list[npt.NDArray[Any]]:  # Any: whole or real
        """Sampled positions, sum of finite logprobs and their number, from each begin up to its end: 3 x [ranges]."""
        points, places = np.unique([*begins, *ends], return_inverse=True)
        first, last = places[: len(begins)], places[len(begins) :]
        starts = points[points < len(self.ids)]
        if not len(starts):
            return [np.zeros(len(begins), dtype=type) for _, type in self._summed]
        # Sums between neighbouring points cost a twentieth of sums up to every position.
        parts = (np.add.reduceat(values, starts, dtype=type) for values, type in self._summed)
        before = [np.concatenate(([0], np.cumsum(part))) for part in parts]
        return [sums[last] - sums[first] for sums in before]


class Shares:
    """Ranges of positions, each one completion or one row, to be added up by what they belong to."""

    def __init__(self) -> None:
        self._owners: dict[Any, int] = {}  # Any: the number of a turn, or a server
        self._noted: list[tuple[int, int, int, bool]] = []  # the owner's number, begin, end, ended by a length

    def note(self, owner: int | str, begin: int, end: int, finish_reason: str | None) -> None:
        """The positions from `begin` up to `end` belong to `owner`."""
        number = self._owners.setdefault(owner, len(self._owners))
        self._noted.append((number, begin, end, finish_reason == "length"))

    def added_up(self, sampled: SampledPositions) -> Iterator[tuple[Any, Share]]:  # Any: as above
        """Each owner and its share, in the order they were first met."""
        if not self._owners:
            return
        numbers, begins, ends, length_stops = zip(*self._noted, strict=True)
        of_ranges: list[Any] = [length_stops, *sampled.within(begins, ends)]  # Any: flags or numbers
        sums = [np.bincount(numbers, weights=values).tolist() for values in of_ranges]
        counts = np.bincount(numbers).tolist()
        for owner, count, stops, tokens, total, finite in zip(self._owners, counts, *sums, strict=True):
            whole = {"tokens": int(tokens), "length_stops": int(stops), "logprob_count": int(finite)}
            yield owner, Share(count=count, logprob_sum=total, **whole)


def integers(column: pa.Array) -> npt.NDArray[np.int64]:
    """An integer column, null as 0."""
    numbers: npt.NDArray[np.int64] = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
