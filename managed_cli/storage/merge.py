"""Parts of one run joined into one output: row group by row group, their counts added up, nothing lost or doubled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from managed_cli.errors import OutputError
from managed_cli.storage import layout, standing
from managed_cli.storage.failures import failure_lines, write_failures
from managed_cli.storage.footer import Fingerprint, Footer, Session, added_sessions, facts_json
from managed_cli.storage.joined import write_joined
from managed_cli.storage.parquet import disk_faults_told, fsync_directory
from managed_cli.storage.reader import RecordedFile, Recording, RecordingState, counted_summary, open_recording
from managed_cli.storage.recorded_ids import RecordedIds, sample_digest, sample_digests, sample_ids_of
from managed_cli.storage.schema import json_text
from managed_cli.storage.summary import Summary

PART_KEY = "part"
"""The key of the fingerprint that tells the parts of one run from each other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the recordings to be joined.

    Attributes:
        name: as it was asked for.
        summary: counts over its rows.
    """

    name: str
    recording: Recording
    fingerprint: Fingerprint
    summary: Summary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What was joined, and where it is now.

    Attributes:
        failed_samples: samples that failed and that no part has recorded.
    """

    out: Path
    parts: tuple[Part, ...]
    summary: Summary
    failed_samples: int


def merge_parts(
    names: Sequence[str], out: str, *, overwrite: bool = False, allow_unfinished: bool = False
) -> MergeReport:
    """`out` holds all rows of the parts, in their order, and their failures; the parts stay as they are.

    A file of a part becomes row groups of the file `out`, or a shard of the directory `out`. Memory is one row
    group, and 24 bytes a sample.

    Args:
        names: files or directories that runs have finished.
        allow_unfinished: also directories whose writer has ended without finishing them.

    Raises:
        OutputError: a part cannot be read, is unfinished or of another run, a sample stands in two parts, or `out`
            cannot be written; what stood at `out` is then unchanged.
    """
    parts = tuple(_opened_part(name, allow_unfinished=allow_unfinished) for name in names)
    fingerprint = _fingerprint_of_all(parts)
    recorded = _distinct_samples(parts)
    with disk_faults_told(f"merge into `{out}`", unharmed="the parts are as they were"):
        place, lock, made_here = standing.claimed(out)
        try:
            _refuse_itself(place, parts)
            if not overwrite:
                standing.refuse_existing(place, may_resume=False)
            failed = _write(place, parts, fingerprint, recorded)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_temps(place)
            standing.let_go(place, lock, made_directory=made_here, has_begun=False)
            raise
        lock.release(remove=True)
        if place.single_file:
            standing.remove_if_empty(place.growing)
    return MergeReport(out=place.final, parts=parts, summary=_added(parts), failed_samples=failed)


def _opened_part(name: str, *, allow_unfinished: bool) -> Part:
    recording = open_recording(name)
    if recording.state is RecordingState.GROWING:
        raise OutputError(
            f"`{recording.path}/` is being written by {recording.writer}",
            details=("nothing was merged",),
            hint="merge it once that process has ended",
        )
    if recording.state is RecordingState.UNFINISHED and not allow_unfinished:
        raise OutputError(
            f"`{recording.path}/` is of a run that did not finish",
            details=("nothing was merged",),
            hint="finish it with `managed-cli rollout … --resume`, or merge what is there with `--allow-unfinished`",
        )
    summary = Summary()
    for file in recording.files:
        summary = summary.merged(_counts(file))
    return Part(
        name=name,
        recording=recording,
        fingerprint=standing.common_fingerprint(recording.files),
        summary=summary,
    )


def _counts(file: RecordedFile) -> Summary:
    return file.summary if file.summary is not None else counted_summary(file)


def _added(parts: Sequence[Part]) -> Summary:
    total = Summary()
    for part in parts:
        total = total.merged(part.summary)
    return total


def _fingerprint_of_all(parts: Sequence[Part]) -> Fingerprint:
    """What the parts have in common, which is all but the part that each of them is.

    Raises:
        OutputError: they are of different runs.
    """
    first = parts[0]
    for part in parts[1:]:
        different = standing.differences(
            _without_part(first.fingerprint), _without_part(part.fingerprint), first.name, part.name
        )
        if different:
            raise OutputError(
                f"`{part.name}` is not of the run that `{first.name}` is of",
                details=(*different, "nothing was merged"),
                hint="parts of one run differ in nothing but the part that they are",
            )
    return first.fingerprint if len(parts) == 1 else _without_part(first.fingerprint)


def _without_part(fingerprint: Fingerprint) -> Fingerprint:
    return {key: value for key, value in fingerprint.items() if key != PART_KEY}


def _distinct_samples(parts: Sequence[Part]) -> RecordedIds:
    """The samples of all parts.

    Raises:
        OutputError: one stands in more than one of them; both places are named.
    """
    of_parts = [sample_digests(sample_ids_of(_paths(part))) for part in parts]
    halves = np.concatenate(of_parts)
    owners = np.repeat(np.arange(len(parts)), [len(digests) for digests in of_parts])
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    halves, owners = halves[order], owners[order]
    doubled = np.flatnonzero((halves[1:] == halves[:-1]).all(axis=1))
    if len(doubled):
        place = doubled[0]
        raise _doubled_sample(halves[place], parts[owners[place]], parts[owners[place + 1]], count=len(doubled))
    return RecordedIds(halves)


def _paths(part: Part) -> list[Path]:
    return [file.path for file in part.recording.files]


def _doubled_sample(halves: npt.NDArray[np.uint64], one: Part, other: Part, *, count: int) -> OutputError:
    digest = halves.astype(">u8").tobytes()
    sample_id, choice_index, node_id, first_place = _first_row(one, digest)
    *_, other_place = _first_row(other, digest)
    more = (f"{count} samples stand in more than one part",) if count > 1 else ()
    return OutputError(
        f"sample {sample_id}, choice {choice_index}, node {node_id} stands in {first_place} and in {other_place}",
        details=(*more, "nothing was merged"),
        hint="parts of one run have no sample in common; give each part once",
    )


def _first_row(part: Part, digest: bytes) -> tuple[str, int, str, str]:
    """Sample id, choice index and node id of the first row of that sample, and its place in words."""
    for file in part.recording.files:
        row_in_file = 0
        for batch in file.iter_batches(["sample_id", "choice_index", "node_id"]):
            for row in batch.to_pylist():
                if sample_digest(row["sample_id"]) == digest:
                    return row["sample_id"], row["choice_index"], row["node_id"], f"`{file.path}` row {row_in_file}"
                row_in_file += 1
    raise OutputError(f"`{part.name}` changed while it was read")


def _refuse_itself(place: layout.OutputPlace, parts: Sequence[Part]) -> None:
    for part in parts:
        for path in _paths(part):
            if (place.final.exists() and path.samefile(place.final)) or path.parent.samefile(place.growing):
                raise OutputError(
                    f"`{part.name}` cannot be both a part and the output",
                    details=("nothing was merged",),
                    hint="choose another `--out`",
                )


def _write(place: layout.OutputPlace, parts: Sequence[Part], fingerprint: Fingerprint, recorded: RecordedIds) -> int:
    """How many samples stand failed: temporary files first, and their names only when all of them are complete."""
    _remove_temps(place)
    names = _written_temps(place, parts, fingerprint)
    for shard in layout.shards_in(place.growing):
        shard.unlink()
    place.merged_mark.unlink(missing_ok=True)
    # Failures before rows: rows that stand without their failures would look like all there is.
    failures_temp = place.growing / layout.FAILURES_TEMP_NAME
    failed = write_failures(place.failures, failures_temp, _failures_of_all(parts, recorded))
    for temp, name in names.items():
        temp.rename(name)
    fsync_directory(place.growing)
    fsync_directory(place.final.parent)
    return failed


def _remove_temps(place: layout.OutputPlace) -> None:
    for temp in layout.temps_in(place.growing):
        temp.unlink()


def _written_temps(place: layout.OutputPlace, parts: Sequence[Part], fingerprint: Fingerprint) -> dict[Path, Path]:
    """Complete files under temporary names, and the names that they are to have."""
    facts, fingerprint_json = facts_json(_facts_of_all(parts)), json_text(fingerprint)
    files = list(_renumbered_files(parts))

    def footer(sessions: Iterable[Session], summary: Summary) -> Footer:
        return Footer(run_facts=facts, fingerprint=fingerprint_json, sessions=added_sessions(sessions), summary=summary)

    if place.single_file:
        temp = place.growing / layout.MERGED_TEMP_NAME
        sessions_of_all = (session for _, sessions in files for session in sessions)
        write_joined(temp, [file.path for file, _ in files], footer(sessions_of_all, _added(parts)))
        return {temp: place.final}
    names = {}
    for index, (file, sessions) in enumerate([entry for entry in files if entry[0].rows] or files[:1]):
        temp = place.growing / layout.shard_temp_name(index)
        write_joined(temp, [file.path], footer(sessions, _counts(file)))
        names[temp] = place.growing / layout.shard_name(index)
    return names


def _facts_of_all(parts: Sequence[Part]) -> Mapping[str, Any]:  # Any: free-form JSON values
    """The run facts that all parts share, and under `parts` those in which they differ."""
    every = [part.recording.run_facts for part in parts]
    shared = {key: value for key, value in every[0].items() if all(facts.get(key) == value for facts in every)}
    own = [
        {"path": part.name, **{key: value for key, value in facts.items() if key not in shared}}
        for part, facts in zip(parts, every, strict=True)
    ]
    return {**shared, "parts": own} if len(parts) > 1 else shared


def _renumbered_files(parts: Sequence[Part]) -> Iterator[tuple[RecordedFile, list[Session]]]:
    """Every file, and its sessions counted through all parts."""
    before = 0
    for part in parts:
        highest = 0
        for file in part.recording.files:
            counts = _counts(file)
            sessions = file.sessions or (Session(number=1, rows=counts.rows, samples=counts.samples),)
            highest = max(highest, *(session.number for session in sessions))
            yield file, [dataclasses.replace(session, number=session.number + before) for session in sessions]
        before += highest


def _failures_of_all(parts: Sequence[Part], recorded: RecordedIds) -> Iterator[bytes]:
    """The failures of all parts, one line per sample, without samples that a part has recorded."""
    told: set[bytes] = set()
    for part in parts:
        if part.recording.failures_path is None:
            continue
        for sample_id, line in failure_lines(part.recording.failures_path, except_for=recorded):
            digest = sample_digest(sample_id)
            if digest not in told:
                told.add(digest)
                yield line
