"""What a run says when it starts and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from managed_cli.cli.console import counted, duration
from managed_cli.errors import DOCTOR_HINT, ExitCode, ManagedCliError, ServerContractError
from managed_cli.managed.servers import Server
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import Progress, ServerCounts
from managed_cli.rollout.tasks import InputFiles, InputReport
from managed_cli.storage.shards import ShardedOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: `finished`, `interrupted` by a signal, or `stopped` by a fault.
        where: what is on disk: the finished output, or the directory it grew in.
        failures: the file of failed samples; None without any.
    """

    state: str
    code: ExitCode
    fault: ManagedCliError | None
    where: str
    failures: str | None
    rows_on_disk: int
    samples_on_disk: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """What `--json` says first of any run."""
        return {
            "state": self.state,
            "exit_code": int(self.code),
            "error": self.fault.message if self.fault else None,
            "out": self.where,
            "rows_on_disk": self.rows_on_disk,
            "failures": self.failures,
        }


def start_lines(
    config: RolloutConfig, server: Server, report: InputReport, source: InputFiles, output: ShardedOutput
) -> str:
    """What is about to happen: how much of what, where it goes, who samples it, and how to sample the same again."""
    info = server.info
    rows = counted(report.choices(config.sampling.n), "row")
    at = "the embedded engine" if config.server.server_type == "local" else f"{info.server_type} at {info.base_url}"
    if len(config.servers) > 1:
        at = f"{at} and {counted(len(config.servers) - 1, 'more server')}"
    bad = (
        f"\n{counted(report.bad_lines, 'line')} cannot be used and will be recorded as failed"
        if report.bad_lines
        else ""
    )
    earlier = f"\nresuming: {counted(len(output.recorded), 'sample')} recorded before" if config.resume else ""
    return (
        f"{source.name}: {counted(report.samples, 'sample')}, {rows} to record in {config.out}{bad}{earlier}\n"
        f"{at}: {info.model}, up to {config.samples_in_flight():,} samples at once, seed {config.sampling.seed}"
    )


def last_lines(outcome: Outcome, progress: Progress) -> str:
    """How it went, what failed, and at the end what is on disk and how to go on."""
    lines = failed_lines(outcome, progress)
    if progress.fork_reasons:
        lines.append(f"conversations that could not be kept in one row: {_counts(progress.fork_reasons)}")
    if progress.rows:
        lines.append(
            f"{counted(progress.completion_tokens, 'token')} sampled in {duration(progress.seconds)} "
            f"({progress.tokens_per_second():,.0f} tok/s)"
        )
    if len(progress.servers) > 1 or any(counts.outages for counts in progress.servers.values()):
        lines += [_of_server(name, counts) for name, counts in sorted(progress.servers.items())]
    lines.append(last_line(outcome, progress))
    return "\n".join(lines)


def failed_lines(outcome: Outcome, progress: Progress) -> list[str]:
    """How many samples failed, of which kinds, where they are listed, and why the first one did; empty without any."""
    if not progress.failed:
        return []
    classes = f" ({_counts(progress.failure_classes)})" if progress.failure_classes else ""
    lines = [f"{progress.failed:,} of {counted(progress.total, 'sample')} failed{classes}; see {outcome.failures}"]
    if progress.first_failure is not None:
        lines.append(f"  the first: {progress.first_failure}")
    if ServerContractError.__name__ in progress.failure_classes:
        lines.append(f"  {DOCTOR_HINT}")
    return lines


def _of_server(name: str, counts: ServerCounts) -> str:
    out = f"; out {counted(counts.outages, 'time')}" if counts.outages else ""
    return f"  {name}: {counted(counts.samples, 'sample')}, {counted(counts.completion_tokens, 'token')}{out}"


def last_line(outcome: Outcome, progress: Progress, *, inspectable: bool = True) -> str:
    """What is on disk, and how to look at it (where `inspect` can) or to go on."""
    rows = f"{counted(outcome.rows_on_disk, 'row')} of {counted(outcome.samples_on_disk, 'sample')}"
    look = f"; look at them with: managed-cli inspect {outcome.where}" if inspectable else ""
    if outcome.state == "finished":
        return f"recorded {rows} in {outcome.where}{look}"
    settled = f"{outcome.state} after {progress.done:,} of {counted(progress.total, 'sample')}"
    if not outcome.rows_on_disk:
        return f"{settled}; no row was recorded"
    return f"{settled}; {rows} are in {outcome.where}; continue with the same command and --resume"


def waiting_line(progress: Progress, grace_seconds: float) -> str:
    """What the first signal is answered with."""
    return (
        f"stopping: nothing more is sent; {counted(len(progress.in_flight), 'sample')} in flight may finish "
        f"within {duration(grace_seconds)}; a second signal (Ctrl-C) ends the run at once"
    )


def interrupted_early(config: RolloutConfig) -> str:
    """The only line of a run that a signal ended before its first request."""
    return f"interrupted before the first sample was sent; nothing was written to {config.out}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
