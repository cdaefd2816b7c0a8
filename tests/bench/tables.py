"""What a scenario found, as a table: for people as Markdown, for scripts as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from tests.bench.children import Cost
from tests.bench.jobs import Job

THOUSAND, MILLION = 1e3, 1e6

RATIOS = ("x floor", "x floor, without start", "peak MB")
"""The last columns. The start is that of a run with one sample; paces are without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One program on one job: its cost at every repeat, and the cost of a single sample, which is mostly its start."""

    program: str
    job: Job
    start: Cost
    costs: Sequence[Cost]

    @property
    def cpu(self) -> float:
        """CPU seconds, start included: the least of the repeats, since other programs only ever add."""
        return min(cost.cpu for cost in self.costs)

    @property
    def running_cpu(self) -> float:
        """CPU seconds, the start taken off."""
        return self.cpu - self.start.cpu

    @property
    def peak_mb(self) -> float:
        """Peak resident memory in megabytes of 10^6 bytes."""
        return statistics.median(cost.peak_mb for cost in self.costs)

    def to_json(self) -> dict[str, object]:
        """Everything that was measured, times in seconds."""
        job, start = dataclasses.asdict(self.job), dataclasses.asdict(self.start)
        return {"program": self.program, **job, "start": start, "costs": [dataclasses.asdict(c) for c in self.costs]}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; floats with three digits."""
    cells = [[_shown(value) for value in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < THOUSAND else f"{value:,.0f}"


def token_table(found: Sequence[Measured], floors: Mapping[str, Measured]) -> str:
    """CPU seconds per million completion tokens, with the start and without, and how often the floor's."""
    rows = [
        [each.job.kind, *_costs(each, floors[each.job.kind], lambda job: job.completion_tokens / MILLION, 1.0)]
        for each in found
    ]
    return markdown(["server", "program", "CPU s / 10^6 tokens", "without start", "10^6 tokens / CPU s", *RATIOS], rows)


def request_table(found: Sequence[Measured], floors: Mapping[int, Measured]) -> str:
    """CPU milliseconds per request, with the start and without, and how often the floor's."""
    rows = [
        [each.job.concurrency, *_costs(each, floors[each.job.concurrency], lambda job: float(job.samples), 1000.0)]
        for each in found
    ]
    return markdown(["in flight", "program", "CPU ms / request", "without start", "requests / CPU s", *RATIOS], rows)


def _costs(each: Measured, floor: Measured, units: Callable[[Job], float], scale: float) -> list[object]:
    """What both tables say of a program, per unit of its own job: peers do less of the work than the floor."""
    whole, running = each.cpu / units(each.job), each.running_cpu / units(each.job)
    floor_whole, floor_running = floor.cpu / units(floor.job), floor.running_cpu / units(floor.job)
    paces = [scale * whole, scale * running, 1.0 / running]
    return [each.program, *paces, whole / floor_whole, running / floor_running, each.peak_mb]
