"""One frozen object with everything a run is told."""

from __future__ import annotations

import dataclasses
from typing import Any

from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.recording import sampling_json
from managed_cli.managed.server import History
from managed_cli.rollout.input_options import InputOptions
from managed_cli.types import SamplingParams

DEFAULT_CONCURRENCY = 64
"""Samples in flight on a server elsewhere: enough for a GPU to batch, little enough for any server's queue."""

DEFAULT_ROWS_PER_SHARD = 2048
"""Rows per shard: some megabytes; more are lost to a power cut, fewer make the merge slower."""

DEFAULT_GRACE_SECONDS = 30.0
"""How long requests in flight may finish after the first signal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What to sample, from which server, and where the rows go.

    Attributes:
        servers: one, or several that serve the same model; the settings of all but their address are equal.
        sampling: for every sample, before its own overrides; `seed` is the run's, from which each sample's is derived.
        max_total_tokens: most prompt + completion tokens of a row; None leaves it to the context.
        concurrency: samples in flight on all servers together; None takes what suits their type.
        max_failures: samples that may fail in this session before it is stopped; None for any number.
        max_consecutive_failures: the same, of samples that fail one after the other.
    """

    out: str
    servers: tuple[APIServerConfig, ...]
    sampling: SamplingParams
    input: InputOptions
    max_total_tokens: int | None = None
    concurrency: int | None = None
    rows_per_shard: int = DEFAULT_ROWS_PER_SHARD
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    overwrite: bool = False
    resume: bool = False
    retry_failed: bool = False
    history: History = "template"
    track_tree: bool = False
    max_failures: int | None = None
    max_consecutive_failures: int | None = None

    @property
    def server(self) -> APIServerConfig:
        """What all servers have in common: the settings of the first."""
        return self.servers[0]

    def samples_in_flight(self) -> int:
        """Samples in flight: as given, else the embedded engine's slots, else the default for each server."""
        if self.concurrency is not None:
            return self.concurrency
        if self.server.server_type == "local":
            return self.server.slots
        return DEFAULT_CONCURRENCY * len(self.servers)

    def facts(self) -> dict[str, Any]:  # Any: JSON values
        """The settings that decide what is recorded, as JSON; no secrets."""
        return {
            "sampling": sampling_json(self.sampling),
            "max_total_tokens": self.max_total_tokens,
            "history": self.history,
            "track_tree": self.track_tree,
            "system": self.input.system,
            "nonfinite": self.server.nonfinite,
            "input_format": self.input.input_format,
            "keep_last_assistant": self.input.keep_last_assistant,
            "part": None if self.input.part is None else str(self.input.part),
        }

    def settings(self) -> dict[str, Any]:  # Any: JSON values
        """`facts` without nesting, sampling parameters by their own names: what two sessions of one run must share."""
        facts = self.facts()
        return {**facts.pop("sampling"), **facts}
