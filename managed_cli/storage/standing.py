"""What stands where an output is to go: refused, replaced, or the earlier sessions that a run is resumed from."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from managed_cli.errors import OutputError
from managed_cli.storage import layout
from managed_cli.storage.footer import Fingerprint, Session, added_sessions
from managed_cli.storage.lock import WriterLock
from managed_cli.storage.parquet import fsync_directory
from managed_cli.storage.reader import RecordedFile, counted_summary, described_files
from managed_cli.storage.recorded_ids import RecordedIds, sample_ids_of
from managed_cli.storage.schema import RowFormat, json_text
from managed_cli.storage.summary import Summary

NOTHING_CHANGED = "nothing on disk was changed"

FOREIGN_NAMES_SHOWN = 3
"""Enough to recognise a directory by."""

VALUE_WIDTH = 120
"""Characters of a setting in a message; a system prompt can have pages."""


class SampleStanding(enum.StrEnum):
    """What is still to be done for a sample of the input."""

    OWED = "owed"
    RECORDED = "recorded"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier sessions of a run have recorded; empty where a run begins.

    Attributes:
        files: the shards, or the finished file.
        is_finished_file: whether `files` is the finished file of a run, which has no shards any more.
        fingerprint: the run's; None where nothing stands.
        recorded: samples whose rows stand in `files`.
    """

    files: tuple[Path, ...] = ()
    is_finished_file: bool = False
    fingerprint: Fingerprint | None = None
    summary: Summary = dataclasses.field(default_factory=Summary)
    sessions: tuple[Session, ...] = ()
    recorded: RecordedIds = dataclasses.field(default_factory=RecordedIds)

    def next_shard(self) -> int:
        """Number of the shard that comes next; the finished file counts as the first.

        A last shard without rows holds the place of the next one, which replaces it.
        """
        if not self.files:
            return 0
        last = 0 if self.is_finished_file else layout.shard_index(self.files[-1])
        return last + (layout.row_count([self.files[-1]]) > 0)


def claimed(path: str) -> tuple[layout.OutputPlace, WriterLock, bool]:
    """Where the output `path` goes, locked for this process, and whether its directory was made for that.

    Raises:
        OutputError: nothing can be written there, or another process writes there.
        OSError: the directory cannot be made.
    """
    place = layout.output_place(path)
    if not place.final.parent.is_dir():
        raise OutputError(
            f"cannot write to `{path}`: there is no directory `{place.final.parent}/`",
            hint=f"mkdir -p {place.final.parent}",
        )
    _refuse_wrong_kind(place)
    made_here = not place.growing.exists()
    try:
        lock = WriterLock.acquire(place.growing)
    except BaseException:
        if made_here:
            remove_if_empty(place.growing)
        raise
    try:
        _refuse_foreign(place)
    except BaseException:
        let_go(place, lock, made_directory=made_here, has_begun=False)
        raise
    return place, lock, made_here


def let_go(place: layout.OutputPlace, lock: WriterLock, *, made_directory: bool, has_begun: bool) -> None:
    """Release the lock; its file stays only beside rows that are not finished."""
    has_rows = place.growing.is_dir() and bool(layout.shards_in(place.growing))
    lock.release(remove=not (has_rows and (has_begun or lock.found)))
    if made_directory or place.single_file:
        remove_if_empty(place.growing)


def remove_if_empty(directory: Path) -> None:
    """Take `directory` away unless something is in it."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _refuse_wrong_kind(place: layout.OutputPlace) -> None:
    """Raise where a file is wanted and something else stands, or the other way round."""
    if place.single_file and place.final.exists() and not place.final.is_file():
        raise OutputError(f"cannot write to `{place.final}`: it is not a regular file")
    if place.growing.exists() and not place.growing.is_dir():
        raise OutputError(f"cannot write to `{place.growing_name}`: a file of that name stands there")


def _refuse_foreign(place: layout.OutputPlace) -> None:
    """Raise where something stands that no run of ours wrote: it is neither replaced nor gone on from."""
    if place.single_file and place.final.exists() and not layout.is_recording(place.final):
        raise OutputError(
            f"`{place.final}` exists and is not a recording, so it is not overwritten",
            details=(NOTHING_CHANGED,),
            hint="choose another `--out`",
        )
    foreign = layout.foreign_names_in(place.growing)
    if foreign:
        shown = ", ".join(foreign[:FOREIGN_NAMES_SHOWN])
        more = f" and {len(foreign) - FOREIGN_NAMES_SHOWN} more" if len(foreign) > FOREIGN_NAMES_SHOWN else ""
        raise OutputError(
            f"`{place.growing_name}` holds files that are not a recording: {shown}{more}",
            details=(NOTHING_CHANGED,),
            hint="choose an empty or a new directory",
        )


def refuse_existing(place: layout.OutputPlace, *, may_resume: bool = True) -> None:
    """Raise where an output of ours stands, finished or not, and say which option takes it up."""
    if place.single_file and place.final.exists():
        raise OutputError(
            f"`{place.final}` exists and holds {layout.row_count([place.final])} rows of a finished run",
            details=(NOTHING_CHANGED,),
            hint=("`--resume` adds what is owed still, " if may_resume else "")
            + "`--overwrite` replaces it at the end; or choose another `--out`",
        )
    shards = layout.shards_in(place.growing)
    if shards:
        raise OutputError(
            f"`{place.growing_name}` holds {layout.row_count(shards)} rows in {shards_in_words(len(shards))}"
            + (" of a run that did not finish" if place.single_file else ""),
            details=(NOTHING_CHANGED,),
            hint=("`--resume` goes on with it, " if may_resume else "")
            + "`--overwrite` starts anew; or choose another `--out`",
        )


def shards_in_words(count: int) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} shard" if count == 1 else f"{count} shards"


def find_earlier(place: layout.OutputPlace, row_format: RowFormat) -> Earlier:
    """What is recorded at `place`, to be gone on from; what a merge left behind is taken away first.

    Raises:
        OutputError: it is damaged, or its files are not of one run.
    """
    _clear_merged(place)
    shards = layout.shards_in(place.growing)
    is_finished_file = place.single_file and not shards and place.final.exists()
    files = described_files([place.final] if is_finished_file else shards, row_format)
    if not files:
        _refuse_other_place(place)
        return Earlier()
    summary = Summary()
    sessions: list[Session] = []
    for file in files:
        counts = file.summary if file.summary is not None else counted_summary(file)
        summary = summary.merged(counts)
        sessions += file.sessions or [Session(number=1, rows=counts.rows, samples=counts.samples)]
    paths = tuple(file.path for file in files)
    return Earlier(
        files=paths,
        is_finished_file=is_finished_file,
        fingerprint=common_fingerprint(files),
        summary=summary,
        sessions=added_sessions(sessions),
        recorded=RecordedIds.of(sample_ids_of(paths)),
    )


def _clear_merged(place: layout.OutputPlace) -> None:
    """Take away shards whose rows are all in the finished file: a merge was killed while it removed them."""
    if not place.merged_mark.exists():
        return
    shards = layout.shards_in(place.growing)
    if shards and not place.final.exists():
        raise OutputError(
            f"`{place.final}` is gone: `{place.growing_name}` holds only some of the rows that were moved into it",
            details=(NOTHING_CHANGED,),
            hint=f"move `{place.final}` back, or `--overwrite` to start anew",
        )
    for shard in shards:
        shard.unlink()
    fsync_directory(place.growing)
    place.merged_mark.unlink()
    fsync_directory(place.growing)


def _refuse_other_place(place: layout.OutputPlace) -> None:
    """Raise where nothing stands at the directory asked for, but shards of a file of that name do."""
    other = place.final.with_name(place.final.name + layout.PARTIAL_SUFFIX)
    if not place.single_file and other.is_dir() and layout.shards_in(other):
        raise OutputError(
            f"nothing is recorded in `{place.growing_name}`, but `{other}/` holds a run that did not finish",
            details=(NOTHING_CHANGED,),
            hint=f"`--out {place.final}` without the slash goes on with that one",
        )


def common_fingerprint(files: Sequence[RecordedFile]) -> Fingerprint:
    """The fingerprint of every file.

    Raises:
        OutputError: a file has none, or another than the first, or columns of another version.
    """
    first = files[0].fingerprint
    for file in files:
        if not file.has_our_schema or file.fingerprint is None:
            why = "has columns of another version" if not file.has_our_schema else "carries no fingerprint of its run"
            raise OutputError(
                f"`{file.path}` {why}, so it is not known to belong to this one",
                details=(NOTHING_CHANGED,),
                hint="it was written by another version or another program; choose another `--out`",
            )
        if file.fingerprint != first:
            raise OutputError(
                f"`{file.path}` is of another run than `{files[0].path}`",
                details=(*differences(first or {}, file.fingerprint, "there", "here"), NOTHING_CHANGED),
                hint="move the shards of one of the runs elsewhere",
            )
    return first or {}


def refuse_other_run(place: layout.OutputPlace, earlier: Earlier, fingerprint: Fingerprint, *, partly: bool) -> None:
    """Raise where `earlier` was recorded with other settings; the ones that differ are listed with both values.

    Args:
        partly: only the keys of `fingerprint` are compared: the others are not known yet.
    """
    recorded = earlier.fingerprint
    if recorded is None:
        return
    if partly:
        recorded = {key: value for key, value in recorded.items() if key in fingerprint}
    different = differences(recorded, fingerprint, "recorded", "now")
    if different:
        where = place.final if earlier.is_finished_file else place.growing_name
        raise OutputError(
            f"`{where}` was recorded with other settings than these, so it cannot be resumed with them",
            details=(*different, f"the {earlier.summary.rows} rows there are whole; {NOTHING_CHANGED}"),
            hint="repeat the recorded settings, choose another `--out`, or start anew with `--overwrite`",
        )


def differences(one: Fingerprint, other: Fingerprint, one_name: str, other_name: str) -> list[str]:
    """A line for each key whose values differ: `temperature: recorded 1.0, now 0.7`."""
    # What was stored went through JSON: tuples are lists now.
    one, other = (json.loads(json_text(settings)) for settings in (one, other))
    return [
        f"{key}: {one_name} {_value_in_words(one, key)}, {other_name} {_value_in_words(other, key)}"
        for key in dict.fromkeys([*one, *other])
        if (key in one) != (key in other) or one.get(key) != other.get(key)
    ]


def _value_in_words(settings: Mapping[str, object], key: str) -> str:
    text = json.dumps(settings[key]) if key in settings else "nothing"
    return text if len(text) <= VALUE_WIDTH else text[: VALUE_WIDTH - 1] + "…"


def grow_from(final: Path, growing: Path) -> None:
    """`final` is the first shard in `growing` too: as a second name of the file, or as a copy where none can be had."""
    shard = growing / layout.shard_name(0)
    try:
        shard.hardlink_to(final)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links, or another one than that of `final`
        temp = growing / layout.shard_temp_name(0)
        _copy(final, temp)
        temp.rename(shard)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            target.unlink()
        raise
