"""A recording written in a trainer's format: sample by sample, whole or not at all, every row accounted for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from managed_cli.errors import ConfigError, OutputError
from managed_cli.export.formats import Format
from managed_cli.export.reward import AdvantageKind, Reward, give_advantages
from managed_cli.export.rollouts import Drop, Rollout, Tally, placeholder_error, samples_of
from managed_cli.storage.parquet import disk_faults_told, fsync_directory
from managed_cli.storage.reader import Recording, RecordingState, open_recording

SCORED_TOGETHER = 256
"""Rows that are scored at a time, whole samples: enough for an async reward function to have its calls under way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written.

    Attributes:
        rows: rows of the recording: those written and those dropped, always.
        written: rows in the output.
        lines: lines of the output; as many as samples where a line is a group.
        dropped: reason → rows.
        note: what a person should know about the choice of the recording; None when nothing.
    """

    recording: Path
    out: Path
    format: str
    rows: int
    written: int
    samples: int
    lines: int
    dropped: dict[Drop, int]
    note: str | None = None


def export_recording(
    path: str,
    out: str,
    format: Format,
    *,
    reward: str | None = None,
    advantage: AdvantageKind = "mean",
    every_node: bool = False,
    overwrite: bool = False,
    allow_unfinished: bool = False,
) -> ExportReport:
    """`out` holds the recording at `path` as JSON lines of `format`; it is complete, or what it was.

    Args:
        reward: `module:function` that scores rows; None leaves them without.
        every_node: of a tree, rows too that another row goes on from.
        allow_unfinished: also a run that has not finished, with what it has.

    Raises:
        ConfigError: the format needs a reward, or the reward function cannot be used or failed.
        OutputError: the recording cannot be read, breaks a rule, or holds nothing to export; `out` cannot be written.
    """
    if format.needs_reward and reward is None:
        raise ConfigError(
            f"--to {format.name} needs --reward: its lines are scored groups",
            hint="write it as --reward module:function",
        )
    recording = open_recording(path)
    _refuse_unfinished(recording, allow_unfinished=allow_unfinished)
    if recording.summary().dummy_rows:
        raise placeholder_error(recording)
    target = _target(out, recording, overwrite=overwrite)
    tally = Tally()
    with contextlib.ExitStack() as stack:
        scorer = None if reward is None else stack.enter_context(Reward(reward))
        samples = _scored(samples_of(recording, tally, every_node=every_node), scorer, advantage, tally)
        with disk_faults_told(f"export to `{out}`", unharmed="the recording is as it was"):
            lines = _write(target, samples, format, tally, recording, overwrite=overwrite)
    return ExportReport(
        recording=recording.path,
        out=target,
        format=format.name,
        rows=tally.read,
        written=tally.kept,
        samples=tally.samples,
        lines=lines,
        dropped={reason: tally.dropped[reason] for reason in Drop if reason in tally.dropped},
        note=recording.note,
    )


def _refuse_unfinished(recording: Recording, *, allow_unfinished: bool) -> None:
    if recording.state is not RecordingState.FINISHED and not allow_unfinished:
        raise OutputError(
            f"`{recording.path}` is not finished",
            hint="`managed-cli rollout … --resume` finishes it; --allow-unfinished exports what it has",
        )


def _target(out: str, recording: Recording, *, overwrite: bool) -> Path:
    """Where the output goes, once nothing forbids it."""
    target = Path(out)
    if target.is_dir() or out.endswith(os.sep) or not target.name:
        raise OutputError(f"`{out}` is a directory, expected the name of a file", hint="write it as --out train.jsonl")
    if any(target.exists() and target.samefile(file.path) for file in recording.files):
        raise OutputError(f"`{out}` is the recording itself")
    if target.exists() and not overwrite:
        raise OutputError(f"`{out}` exists already", hint="--overwrite replaces it")
    return target


def _scored(
    samples: Iterator[list[Rollout]], reward: Reward | None, advantage: AdvantageKind, tally: Tally
) -> Iterator[list[Rollout]]:
    """The same samples with rewards and advantages; rows and samples without a reward are left out and counted."""
    if reward is None:
        yield from samples
        return
    for window in _windows(samples):
        rollouts = [rollout for group in window for rollout in group]
        for rollout, value in zip(rollouts, reward.score(rollouts), strict=True):
            rollout.reward = value
        for group in window:
            kept = [rollout for rollout in group if rollout.reward is not None]
            for _ in range(len(group) - len(kept)):
                tally.drop(Drop.NO_REWARD)
            give_advantages(kept, advantage)
            if kept:
                yield kept


def _windows(samples: Iterator[list[Rollout]]) -> Iterator[list[list[Rollout]]]:
    window: list[list[Rollout]] = []
    for group in samples:
        window.append(group)
        if sum(map(len, window)) >= SCORED_TOGETHER:
            yield window
            window = []
    if window:
        yield window


def _write(
    target: Path,
    samples: Iterator[list[Rollout]],
    format: Format,
    tally: Tally,
    recording: Recording,
    *,
    overwrite: bool,
) -> int:
    """The number of lines now in `target`; where anything fails, `target` is what it was."""
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    encoder = msgspec.json.Encoder()
    lines = 0
    try:
        with temp.open("wb") as file:
            for group in samples:
                made = format.lines(group, tally.samples)
                file.writelines(encoder.encode(line) + b"\n" for line in made)
                lines += len(made)
                tally.kept += len(group)
                tally.samples += 1
            file.flush()
            os.fsync(file.fileno())
        _refuse_nothing(recording, tally)
        if overwrite:
            temp.replace(target)
        else:
            _link_new(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    fsync_directory(target.parent)
    return lines


def _link_new(temp: Path, target: Path) -> None:
    """`target` is `temp`, unless something has come to stand there in the meantime."""
    try:
        target.hardlink_to(temp)
    except FileExistsError:
        raise OutputError(f"`{target}` has come into being meanwhile", hint="--overwrite replaces it") from None


def _refuse_nothing(recording: Recording, tally: Tally) -> None:
    if tally.kept:
        return
    reasons: Sequence[str] = [f"{count:,} dropped: {reason}" for reason, count in tally.dropped.items()]
    raise OutputError(
        f"`{recording.path}` holds nothing to export: none of its {tally.read:,} rows is left", details=reasons
    )
