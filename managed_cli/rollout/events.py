"""Counters of a run, as progress lines and summaries show them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from managed_cli.errors import ManagedCliError


class CountedRow(Protocol):
    """What is counted of a row."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # Any: JSON values


@dataclasses.dataclass(slots=True)
class ServerCounts:
    """What one server has sampled in this session.

    Attributes:
        outages: how often it went out.
    """

    samples: int = 0
    rows: int = 0
    completion_tokens: int = 0
    outages: int = 0


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a run is. Times are seconds of `time.monotonic`.

    Attributes:
        total: samples of the input.
        recorded: samples whose rows are recorded or buffered, earlier sessions included.
        failed: samples that failed, earlier sessions included.
        earlier: samples that an earlier session had settled; tokens and pace are those of this session alone.
        in_flight: when each sample under way was sent.
        first_failure: the message of the first sample that failed.
        servers: this session's counts of each server, by the name that rows have for it.
        seconds_without_server: how long there has been none to send to; None while there is one.
    """

    total: int
    recorded: int = 0
    failed: int = 0
    earlier: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    fork_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    failure_classes: dict[str, int] = dataclasses.field(default_factory=dict)
    in_flight: dict[str, float] = dataclasses.field(default_factory=dict)
    first_failure: str | None = None
    servers: dict[str, ServerCounts] = dataclasses.field(default_factory=dict)
    seconds_without_server: Callable[[], float | None] = lambda: None
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """Samples that are settled, one way or the other."""
        return self.recorded + self.failed

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def tokens_per_second(self) -> float:
        """Completion tokens per second since the start."""
        return self.completion_tokens / max(self.seconds, 1e-9)

    def eta_seconds(self) -> float | None:
        """Seconds until the last sample is settled, at the pace so far; None before the first is."""
        done_now = self.done - self.earlier
        if not done_now:
            return None
        return self.seconds / done_now * (self.total - self.done)

    def oldest_request_seconds(self) -> float | None:
        """Age of the sample that is under way the longest; None without any."""
        return time.monotonic() - min(self.in_flight.values()) if self.in_flight else None

    def count_earlier(self, *, recorded: int = 0, failed: int = 0) -> None:
        """So many more samples that earlier sessions had settled."""
        self.earlier += recorded + failed
        self.recorded += recorded
        self.failed += failed

    def count_rows(self, rows: Sequence[CountedRow], masked: int, sampled: int) -> None:
        """One more sample that is recorded, and all its rows, with so many positions that the model did not sample, and
        so many that it did.
        """
        self.recorded += 1
        self.rows += len(rows)
        self.completion_tokens += sampled
        self.prompt_tokens += masked
        if rows:
            server = self.servers.setdefault(rows[0].metadata["server"], ServerCounts())
            server.samples += 1
            server.rows += len(rows)
            server.completion_tokens += sampled
        for row in rows:
            reason = row.metadata.get("finish_reason")
            if reason is not None:
                self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
            fork = row.metadata.get("fork_reason")
            if fork:
                self.fork_reasons[fork] = self.fork_reasons.get(fork, 0) + 1

    def count_outages(self, outages: Mapping[str, int]) -> None:
        """How often each server went out, by the name that rows have for it."""
        for name, count in outages.items():
            self.servers.setdefault(name, ServerCounts()).outages = count

    def count_failure(self, error: ManagedCliError) -> None:
        """One more sample that failed."""
        self.failed += 1
        if self.first_failure is None:
            self.first_failure = error.message
        name = type(error).__name__
        self.failure_classes[name] = self.failure_classes.get(name, 0) + 1

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """The counts, for `--json`."""
        return {
            "samples": self.total,
            "recorded": self.recorded,
            "failed": self.failed,
            "settled_earlier": self.earlier,
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "fork_reasons": dict(sorted(self.fork_reasons.items())),
            "failure_classes": dict(sorted(self.failure_classes.items())),
            "servers": {name: dataclasses.asdict(counts) for name, counts in sorted(self.servers.items())},
            "seconds": round(self.seconds, 3),
            "completion_tokens_per_second": round(self.tokens_per_second(), 1),
        }
