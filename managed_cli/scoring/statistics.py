"""Running statistics in memory that does not grow with the number of tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from managed_cli.scoring.rows import Floats

BIN_NATS = 1e-4
"""Width of a histogram bin: the 99th percentile of a ratio is exact to one part in ten thousand."""

MOST_NATS = 20.0
"""Where the histogram ends: a ratio of e^20 is as good as any larger one."""

_BINS = round(2 * MOST_NATS / BIN_NATS)


@dataclasses.dataclass(slots=True)
class Differences:
    """Absolute differences, nats.

    Attributes:
        largest: 0 without any.
    """

    count: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, differences: Floats) -> None:
        """Count the absolute values of `differences`, [n]."""
        if len(differences):
            absolute = np.abs(differences)
            self.count += len(absolute)
            self.largest = max(self.largest, float(absolute.max()))
            self.total += float(absolute.sum())

    @property
    def mean(self) -> float | None:
        """None without any."""
        return self.total / self.count if self.count else None


class Ratios:
    """Importance ratios w = exp(new - recorded), fed as their logarithms."""

    def __init__(self) -> None:
        self.count = 0
        self._largest = self._log_sum = self._log_square_sum = -math.inf
        self._bins = np.zeros(_BINS + 1, dtype=np.int64)

    def add(self, log_ratios: Floats) -> None:
        """Count the finite ones of `log_ratios`, [n], nats."""
        finite = log_ratios[np.isfinite(log_ratios)]
        if not len(finite):
            return
        self.count += len(finite)
        self._largest = max(self._largest, float(finite.max()))
        self._log_sum = float(np.logaddexp.reduce([self._log_sum, *finite]))
        self._log_square_sum = float(np.logaddexp.reduce([self._log_square_sum, *(2 * finite)]))
        # The bin of x ends at (index + 1/2) * BIN_NATS - MOST_NATS, so that 0 lies in the middle of its own.
        places = np.rint((np.clip(finite, -MOST_NATS, MOST_NATS) + MOST_NATS) / BIN_NATS)
        np.add.at(self._bins, places.astype(np.intp), 1)

    def mean(self) -> float | None:
        """Σw / n; None without any."""
        return _exp(self._log_sum - math.log(self.count)) if self.count else None

    def largest(self) -> float | None:
        """None without any."""
        return _exp(self._largest) if self.count else None

    def percentile(self, share: float) -> float | None:
        """The ratio that `share` (0 to 1) of all do not exceed; None without any."""
        if not self.count:
            return None
        place = int(np.searchsorted(np.cumsum(self._bins), math.ceil(share * self.count)))
        return min(_exp(place * BIN_NATS - MOST_NATS), _exp(self._largest))

    def effective_share(self) -> float | None:
        """(Σw)² / (n Σw²): 1 where all are equal, 1/n where one outweighs the others; None without any."""
        if not self.count:
            return None
        return _exp(2 * self._log_sum - self._log_square_sum - math.log(self.count))

    def to_json(self) -> dict[str, float | int | None]:
        """All of it by name."""
        return {
            "count": self.count,
            "mean": self.mean(),
            "p99": self.percentile(0.99),
            "max": self.largest(),
            "effective_sample_size": self.effective_share(),
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(np.finfo(np.float64).max) else math.inf
