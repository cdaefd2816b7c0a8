"""The figures of a recording or of the rows chosen from it: exact from the footers where they are kept there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from managed_cli.storage.reader import Recording
from managed_cli.storage.statistics import LOGPROB_BINS_PER_NAT, PROBABILITY_FLOORS, Statistics
from managed_cli.storage.summary import SUMMARY_COLUMNS, Summary

if TYPE_CHECKING:
    from managed_cli.storage.selection import RowNumbers

MOST_ROWS_READ = 8192
"""Rows read for statistics that no footer has: what a second suffices for."""

MOST_BINS = 12
"""Bars of a histogram: what a person compares at a glance."""

TAIL = 0.005
"""Share of the rows at a far end of a histogram that one bar may hold together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts and spreads of rows.

    Attributes:
        summary: counts over all of the rows.
        statistics: spreads over `rows_counted` of them.
        rows: how many rows these are of.
        rows_counted: fewer than `rows` where they were sampled.
        selected: whether a filter chose the rows.
    """

    summary: Summary
    statistics: Statistics
    rows: int
    rows_counted: int
    selected: bool

    @property
    def exact(self) -> bool:
        """Whether every row was counted."""
        return self.rows == self.rows_counted

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """All figures, for a script."""
        statistics = self.statistics
        counts = self.summary.finish_reasons
        facts: dict[str, Any] = {  # Any: as above
            "counted_rows": self.rows_counted,
            "exact": self.exact,
            "truncation_rate": counts.get("length", 0) / self.summary.rows if self.summary.rows else None,
            "longest_completion": statistics.longest,
            "prompt_length_histogram": [bin.to_dict() for bin in length_bins(statistics.prompt_lengths)],
            "completion_length_histogram": [bin.to_dict() for bin in length_bins(statistics.completion_lengths)],
            "mean_logprob_histogram": [bin.to_dict() for bin in logprob_bins(statistics.mean_logprobs)],
            "token_probabilities": [
                {"at_least": floor, "tokens": count}
                for floor, count in zip(PROBABILITY_FLOORS, statistics.token_probabilities, strict=True)
            ],
            "turns_per_row": {str(turns): rows for turns, rows in sorted(statistics.turn_counts.items())},
            "samples_of_several_rows": statistics.samples_of_several,
            "repeated_rows": statistics.repeated_rows,
            "samples_with_repeats": statistics.samples_with_repeats,
        }
        for name, shares in (("by_turn", statistics.by_turn), ("by_server", statistics.by_server)):
            facts[name] = {
                str(key): {
                    "count": share.count,
                    "tokens": share.tokens,
                    "length_stops": share.length_stops,
                    "mean_logprob": share.mean_logprob(),
                }
                for key, share in shares.items()
            }
        return facts


def find_figures(recording: Recording, numbers: RowNumbers | None = None) -> Figures:
    """The figures of all rows, or of those of these numbers."""
    if numbers is not None:
        return _read_figures(recording, numbers, selected=True)
    summary = recording.summary()
    if summary.statistics is not None:
        return Figures(
            summary=summary,
            statistics=summary.statistics,
            rows=summary.rows,
            rows_counted=summary.rows,
            selected=False,
        )
    read = _read_figures(recording, None, selected=False)
    return dataclasses.replace(read, summary=summary)


def _read_figures(recording: Recording, numbers: RowNumbers | None, *, selected: bool) -> Figures:
    """Figures of rows that have to be read: all of them, or `MOST_ROWS_READ` in stretches all over the recording."""
    import numpy as np

    from managed_cli.storage.selection import iter_chosen_batches

    if numbers is None:
        numbers = np.arange(recording.rows, dtype=np.int64)
    numbers = np.sort(numbers)
    chosen = numbers
    if len(numbers) > MOST_ROWS_READ:
        # Stretches, not single rows: a row group is read as a whole, and the rows of a sample stand together.
        stretch = 1024
        starts = np.linspace(0, len(numbers) - stretch, MOST_ROWS_READ // stretch).astype(np.int64)
        chosen = np.unique(np.concatenate([numbers[start : start + stretch] for start in starts]))
    summary = Summary()
    for batch in iter_chosen_batches(recording, chosen):
        summary.add_batch(batch)
    rows_counted, statistics = summary.rows, summary.statistics or Statistics()
    if selected and rows_counted < len(numbers):  # the plain counts are of all rows, and only the spreads of some
        summary = Summary()
        for batch in iter_chosen_batches(recording, numbers, SUMMARY_COLUMNS):
            summary.add_batch(batch)
    return Figures(
        summary=summary, statistics=statistics, rows=len(numbers), rows_counted=rows_counted, selected=selected
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Bin:
    """One bar.

    Attributes:
        low: least value in it; None where it has no lower bound.
        high: first value beyond it; None where it has no upper bound.
        label: the two in words.
    """

    low: float | None
    high: float | None
    count: int
    label: str

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Bounds and count."""
        return {"from": self.low, "below": self.high, "count": self.count}


def length_bins(counts: Mapping[int, int]) -> list[Bin]:
    """At most `MOST_BINS` bars of equal width over lengths in tokens; the longest few together in the last."""
    if not counts:
        return []
    from managed_cli.storage.statistics import length_bin_width

    least, top, last = min(counts), _quantile(counts, 1 - TAIL), max(counts)
    width = _fitting_width(top - least + 1, at_least=_finest(length_bin_width, last if last == top else top))
    bounded = list(_bars(counts, width, lowest=least // width * width, highest=top // width * width))
    bins = []
    for low, count in bounded:
        is_tail = low == bounded[-1][0] and last >= low + width
        label = f"{low:,} and more" if is_tail else f"{low:,}" if width == 1 else f"{low:,} to {low + width - 1:,}"
        bins.append(Bin(low, None if is_tail else low + width, count, label))
    return bins


def logprob_bins(counts: Mapping[int, int]) -> list[Bin]:
    """At most `MOST_BINS` bars of equal width over logprobs in nats; the lowest few together in the first."""
    if not counts:
        return []
    least, bottom, last = min(counts), _quantile(counts, TAIL), max(counts)
    width = _fitting_width(last - bottom + 1, at_least=1)
    lowest = bottom // width * width
    digits = 2 if width >= LOGPROB_BINS_PER_NAT // 4 else 3
    bins = []
    for low, count in _bars(counts, width, lowest=lowest, highest=last // width * width):
        is_tail = low == lowest and least < lowest
        begin, end = low / LOGPROB_BINS_PER_NAT, (low + width) / LOGPROB_BINS_PER_NAT
        label = f"below {end:.{digits}f}" if is_tail else f"{begin:.{digits}f} to {end:.{digits}f}"
        bins.append(Bin(None if is_tail else begin, end, count, label))
    return bins


def probability_bins(counts: Sequence[int]) -> list[Bin]:
    """A bar for each of `PROBABILITY_FLOORS`, the likeliest tokens first."""
    if not sum(counts):
        return []
    bins: list[Bin] = []
    above: float | None = None
    for floor, count in zip(PROBABILITY_FLOORS, counts, strict=True):
        label = f"{floor:g} to {above:g}" if floor and above else f"{floor:g} and more" if floor else f"below {above:g}"
        bins.append(Bin(floor, above, count, label))
        above = floor
    return bins


def _finest(width_of: Any, length: int) -> int:  # Any: a function of arrays
    import numpy as np

    return int(width_of(np.array([length], dtype=np.int64))[0])


def _fitting_width(span: int, *, at_least: int) -> int:
    """A power of two, as the kept bins are: every bar is made of whole ones."""
    width = at_least
    while span > width * (MOST_BINS - 1):  # one more where the span begins in the middle of a bar
        width *= 2
    return width


def _bars(counts: Mapping[int, int], width: int, *, lowest: int, highest: int) -> list[tuple[int, int]]:
    together: dict[int, int] = dict.fromkeys(range(lowest, highest + 1, width), 0)
    for edge, count in counts.items():
        together[min(highest, max(lowest, edge // width * width))] += count
    return sorted(together.items())


def _quantile(counts: Mapping[int, int], fraction: float) -> int:
    wanted, reached = fraction * sum(counts.values()), 0
    for edge in sorted(counts):
        reached += counts[edge]
        if reached >= wanted:
            return edge
    return max(counts)
