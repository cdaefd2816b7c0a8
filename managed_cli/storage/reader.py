"""The reader: a file, a directory of shards or an output still growing, opened by footers and streamed by rows."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.errors import ConfigError, OutputError
from managed_cli.storage import layout
from managed_cli.storage.failures import failure_lines
from managed_cli.storage.footer import Session, added_sessions, find_json_object, parsed_sessions
from managed_cli.storage.lock import find_writer
from managed_cli.storage.parquet import ROW_GROUP_ROWS
from managed_cli.storage.schema import (
    FINGERPRINT_METADATA_KEY,
    ROLLOUTS,
    RUN_METADATA_KEY,
    SESSIONS_METADATA_KEY,
    STATISTICS_METADATA_KEY,
    SUMMARY_METADATA_KEY,
    RowFormat,
)
from managed_cli.storage.statistics import Statistics
from managed_cli.storage.summary import SUMMARY_COLUMNS, Summary

TOPK_COLUMN = "prompt_topk_logprobs"
"""Tells an output of `managed-cli logprobs`, which people may take for a recording."""

PARQUET_MAGIC = b"PAR1"
"""First and last four bytes of every Parquet file."""


class RecordingState(enum.StrEnum):
    """Whether more rows are to come."""

    FINISHED = "finished"
    GROWING = "growing"
    UNFINISHED = "unfinished"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile:
    """One Parquet file of a recording, as its footer describes it.

    Attributes:
        first_row: number of its first row in the recording.
        has_our_schema: whether columns, types and nullability are exactly those of the schema.
        run_facts: None where the footer has none.
        fingerprint: likewise.
        sessions: which start of the run wrote how many of the rows; empty where the footer does not say.
        summary: None where the footer has none that can be used.
    """

    path: Path
    rows: int
    first_row: int
    row_groups: int
    bytes_on_disk: int
    has_our_schema: bool
    run_facts: dict[str, Any] | None  # Any: free-form JSON values
    fingerprint: dict[str, Any] | None  # Any: as above
    sessions: tuple[Session, ...]
    summary: Summary | None
    row_format: RowFormat = ROLLOUTS

    def iter_batches(
        self, columns: Sequence[str] | None = None, *, row_group: int | None = None, threads: bool = True
    ) -> Iterator[Any]:
        """Batches (`pyarrow.RecordBatch`) of at most 2048 rows, in order, one in memory at a time.

        Args:
            columns: names to read, None for all of the schema's.
            row_group: read only this one.
            threads: decode columns side by side, for which each thread keeps memory of its own.

        Raises:
            OutputError: the file is damaged or has gone.
        """
        names = list(columns) if columns is not None else self.row_format.schema.names
        groups = range(self.row_groups) if row_group is None else [row_group]
        target = pa.schema([self.row_format.read_schema.field(name) for name in names])
        with read_faults_told(self.path), pq.ParquetFile(self.path, page_checksum_verification=True) as parquet:
            # One row group per call: asked for all of them at once, pyarrow holds memory that grows with the file.
            for group in groups:
                for batch in parquet.iter_batches(
                    batch_size=ROW_GROUP_ROWS, row_groups=[group], columns=names, use_threads=threads
                ):
                    ordered = batch.select(names)
                    yield ordered if ordered.schema.types == target.types else ordered.cast(target)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was recorded at a path; only footers are in memory.

    Attributes:
        path: what was opened; not what was asked for, when only an unfinished output was there.
        note: what a person should know about the choice of `path`; None when nothing.
        writer: who writes or wrote an output that is not finished, in words.
    """

    path: Path
    files: tuple[RecordedFile, ...]
    state: RecordingState
    note: str | None = None
    writer: str | None = None

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(file.rows for file in self.files)

    @property
    def bytes_on_disk(self) -> int:
        """Size of all files."""
        return sum(file.bytes_on_disk for file in self.files)

    @property
    def run_facts(self) -> dict[str, Any]:  # Any: free-form JSON values
        """What the first file's footer says of the run; empty where it says nothing."""
        return next((file.run_facts for file in self.files if file.run_facts is not None), {})

    @property
    def failures_path(self) -> Path | None:
        """The file of failed samples that belongs to this recording; None when no sample failed."""
        name = str(self.path).removesuffix(layout.PARTIAL_SUFFIX)
        place = layout.output_place(name)
        return place.failures if place.failures.is_file() else None

    def failed_samples(self) -> int:
        """How many samples stand failed in `failures_path`."""
        if self.failures_path is None:
            return 0
        with read_faults_told(self.failures_path):
            return sum(1 for _ in failure_lines(self.failures_path))

    def sessions(self) -> tuple[Session, ...]:
        """Which start of the run recorded how many of the rows; more than one where it was resumed."""
        return added_sessions(session for file in self.files for session in file.sessions)

    def summary(self) -> Summary:
        """Counts over all rows: from the footers, and by reading the narrow columns of files that have none."""
        total = Summary()
        for file in self.files:
            total = total.merged(file.summary if file.summary is not None else counted_summary(file))
        return total

    def iter_batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Batches (`pyarrow.RecordBatch`) of at most 2048 rows, in order, one in memory at a time.

        Raises:
            OutputError: a file is damaged or has gone.
        """
        for file in self.files:
            yield from file.iter_batches(columns)

    def row(self, index: int) -> dict[str, Any]:  # Any: the columns' values
        """Row `index`, counted from 0, or from the end where negative: its columns by name.

        Raises:
            ConfigError: there is no such row.
        """
        wanted = index + self.rows if index < 0 else index
        for file in self.files:
            if 0 <= wanted - file.first_row < file.rows:
                return _row_of_file(file, wanted - file.first_row)
        there = f"rows 0 to {self.rows - 1}" if self.rows else "no rows"
        raise ConfigError(f"there is no row {index}: `{self.path}` has {there}")

    def head(self, count: int) -> list[dict[str, Any]]:  # Any: the columns' values
        """The first `count` rows, or all where there are fewer."""
        found: list[dict[str, Any]] = []  # Any: as above
        for batch in self.iter_batches():
            if len(found) >= count:
                break
            found += batch.slice(0, count - len(found)).to_pylist()
        return found


def open_recording(path: str | Path) -> Recording:
    """What was recorded at `path`: a file, a directory of shards, or `PATH.partial/` while only that is there.

    Raises:
        OutputError: nothing is there, or it is not Parquet, is truncated, or lacks columns of the schema.
    """
    with read_faults_told(Path(path)):
        try:
            return _opened(Path(path))
        except FileNotFoundError:
            # A run that finished between our look at its directory and our reading of it has moved its rows.
            return _opened(Path(path))


def counted_summary(file: RecordedFile) -> Summary:
    """Counts over the rows of `file`, by reading its narrow columns."""
    summary = Summary()
    for batch in file.iter_batches([name for name in SUMMARY_COLUMNS if name in file.row_format.schema.names]):
        summary.add_batch(batch)
    return summary


def _opened(asked: Path) -> Recording:
    path, note = asked, None
    partial = asked.with_name(asked.name + layout.PARTIAL_SUFFIX) if asked.name else asked
    if not asked.exists():
        if not partial.is_dir():
            hint = "`--out` of `managed-cli rollout` names it; it is `out.parquet` by default"
            raise OutputError(f"`{asked}` does not exist", hint=hint)
        path, note = partial, f"`{asked}` is not finished; this is `{partial}/`"
    elif asked.is_file() and partial.is_dir() and not (partial / layout.MERGED_MARK_NAME).exists():
        note = f"this is the finished run; beside it stands `{partial}/`, of one that is not finished"
    if path.is_dir() or path is partial:
        return _opened_directory(path, note)
    return Recording(path=path, files=described_files([path]), state=RecordingState.FINISHED, note=note)


def _opened_directory(directory: Path, note: str | None) -> Recording:
    names = sorted(
        entry for entry in directory.iterdir() if entry.suffix == ".parquet" and not entry.name.startswith((".", "_"))
    )
    shards = layout.shards_in(directory)
    files = shards if len(shards) == len(names) else names
    writer = find_writer(directory)
    if not files:
        if note is not None and directory.with_name(directory.name.removesuffix(layout.PARTIAL_SUFFIX)).exists():
            raise FileNotFoundError(directory)  # it has just finished: `open_recording` looks again
        why = f"{writer} has written no shard yet" if writer else "it holds no Parquet files"
        raise OutputError(f"nothing is recorded in `{directory}/`: {why}")
    state = RecordingState.FINISHED
    if writer is not None or directory.name.endswith(layout.PARTIAL_SUFFIX):
        alive = writer is not None and writer.may_be_alive()
        state = RecordingState.GROWING if alive else RecordingState.UNFINISHED
    words = str(writer) if writer is not None else None
    return Recording(path=directory, files=described_files(files), state=state, note=note, writer=words)


def described_files(paths: Sequence[Path], row_format: RowFormat = ROLLOUTS) -> tuple[RecordedFile, ...]:
    """The files of one recording, in this order, by their footers.

    Raises:
        OutputError: one is not Parquet, is truncated, or lacks columns of the schema.
        FileNotFoundError: one has gone.
    """
    files: list[RecordedFile] = []
    for path in paths:
        footer = _footer(path)
        found = footer.schema.to_arrow_schema()
        _refuse_other_columns(path, found, row_format)
        keys = footer.metadata or {}
        files.append(
            RecordedFile(
                path=path,
                rows=footer.num_rows,
                first_row=files[-1].first_row + files[-1].rows if files else 0,
                row_groups=footer.num_row_groups,
                bytes_on_disk=path.stat().st_size,
                has_our_schema=found.equals(row_format.schema),
                run_facts=find_json_object(keys.get(RUN_METADATA_KEY)),
                fingerprint=find_json_object(keys.get(FINGERPRINT_METADATA_KEY)),
                sessions=parsed_sessions(keys.get(SESSIONS_METADATA_KEY)),
                summary=_find_summary(keys.get(SUMMARY_METADATA_KEY), keys.get(STATISTICS_METADATA_KEY)),
                row_format=row_format,
            )
        )
    return tuple(files)


def _footer(path: Path) -> Any:  # Any: pyarrow publishes no types; a FileMetaData
    try:
        return pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise OutputError(f"`{path}` cannot be read: permission denied") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the latter for the name of a column
        raise OutputError(f"`{path}` {_why_not_parquet(path)}") from error


def _why_not_parquet(path: Path) -> str:
    """What is wrong with a file whose footer cannot be read, in words."""
    with read_faults_told(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        begins = file.read(len(PARQUET_MAGIC))
        file.seek(max(0, size - len(PARQUET_MAGIC)))
        ends = file.read()
    if size == 0:
        return "is empty, not Parquet"
    if begins != PARQUET_MAGIC:
        return f"is not Parquet: it begins with {begins!r}, not {PARQUET_MAGIC!r}"
    if ends != PARQUET_MAGIC:
        return f"is truncated: it begins as Parquet, but has no footer at its end ({size} bytes)"
    return "is damaged: its Parquet footer cannot be read"


def _refuse_other_columns(path: Path, found: pa.Schema, row_format: RowFormat) -> None:
    missing = [name for name in row_format.schema.names if name not in found.names]
    if missing:
        raise OutputError(
            f"`{path}` is Parquet, but not {row_format.name}: it has no column {', '.join(missing)}",
            details=(f"its columns: {', '.join(found.names[:20])}",),
            hint="it holds prompt logprobs: pandas, polars or DuckDB show them" if TOPK_COLUMN in found.names else None,
        )


def _find_summary(text: bytes | None, statistics: bytes | None) -> Summary | None:
    if text is None:
        return None
    with contextlib.suppress(OutputError):
        summary = Summary.from_json(text)
        summary.statistics = Statistics.find(statistics)
        return summary
    return None


def _row_of_file(file: RecordedFile, index: int) -> dict[str, Any]:  # Any: the columns' values
    with read_faults_told(file.path):
        footer = pq.read_metadata(file.path)
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group).num_rows
        if index >= rows:
            index -= rows
            continue
        for batch in file.iter_batches(row_group=group):
            if index < batch.num_rows:
                row: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
                return row
            index -= batch.num_rows
    raise OutputError(f"`{file.path}` changed while it was read")


@contextlib.contextmanager
def read_faults_told(path: Path) -> Iterator[None]:
    """Faults of the disk and of Parquet's decoding become an `OutputError` that names `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise OutputError(f"`{path}` does not exist, or no longer") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OutputError(f"`{path}` cannot be read: {reason}") from error
