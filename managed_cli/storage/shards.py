"""The writer: whole samples into whole shards, and the shards into one file.

A shard is written to a temporary name, fsynced, renamed and its directory fsynced, so that whatever bears a
shard's name is complete. Killed at any instant, what stands on disk is whole shards or the finished file.

With `overwrite`, the old rows stay until the new run has something to put in their place: old shards and
failures go when its first shard or failure is written, an old finished file is replaced by `finish()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from managed_cli.errors import OutputError
from managed_cli.storage import layout
from managed_cli.storage.lock import WriterLock
from managed_cli.storage.parquet import disk_faults_told, fsync_directory, read_batches, write_parquet
from managed_cli.storage.schema import SCHEMA, SCHEMA_VERSION, json_text, record_batch
from managed_cli.storage.summary import SUMMARY_COLUMNS, Summary

if TYPE_CHECKING:
    from managed_cli.node import SequenceNode


@dataclasses.dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows taken out of the buffer, to be written as one shard.

    Attributes:
        batches: one per sample, in the order they were added.
    """

    batches: tuple[pa.RecordBatch, ...]

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return sum(batch.num_rows for batch in self.batches)

    def summary(self) -> Summary:
        """Counts over these rows."""
        table = pa.Table.from_batches(self.batches, schema=SCHEMA).select(list(SUMMARY_COLUMNS))
        summary = Summary()
        for batch in table.combine_chunks().to_batches():
            summary.add_batch(batch)
        return summary


def open_output(path: str, *, run_facts: Mapping[str, object], rows_per_shard: int, overwrite: bool) -> ShardedOutput:
    """The output `path`, locked for this process; nothing that stood there is changed yet.

    Args:
        path: `out.parquet` ends as one file; `DIR/`, or a directory that exists, stays a directory of shards.
        run_facts: settings, server, model, …: JSON values, no secrets. They go into every file's footer.
        rows_per_shard: `shard_due` from this many buffered rows on.
        overwrite: an earlier output of ours may be replaced; other files never are.

    Raises:
        OutputError: something stands there, another process writes there, or nothing can be written there.
    """
    with disk_faults_told(f"write to `{path}`", unharmed="nothing on disk was changed"):
        place = layout.output_place(path)
        if not place.final.parent.is_dir():
            raise OutputError(
                f"cannot write to `{path}`: there is no directory `{place.final.parent}/`",
                hint=f"mkdir -p {place.final.parent}",
            )
        _refuse_wrong_kind(place)
        made_here = not place.growing.exists()
        lock = WriterLock.acquire(place.growing)
        try:
            _refuse_what_stands(place, overwrite=overwrite)
            for temp in layout.temps_in(place.growing):
                temp.unlink()
        except BaseException:
            _let_go(place, lock, made_directory=made_here, has_begun=False)
            raise
    return ShardedOutput(
        place, lock, run_facts=_facts_json(run_facts), rows_per_shard=rows_per_shard, made_directory=made_here
    )


def _facts_json(run_facts: Mapping[str, object]) -> str:
    return json_text({**run_facts, "schema_version": SCHEMA_VERSION})


def _refuse_wrong_kind(place: layout.OutputPlace) -> None:
    """Raise where a file is wanted and something else stands, or the other way round."""
    if place.single_file and place.final.exists() and not place.final.is_file():
        raise OutputError(f"cannot write to `{place.final}`: it is not a regular file")
    if place.growing.exists() and not place.growing.is_dir():
        raise OutputError(f"cannot write to `{place.growing_name}`: a file of that name stands there")


def _refuse_what_stands(place: layout.OutputPlace, *, overwrite: bool) -> None:
    """Raise unless what stands at `place` is nothing, or ours and to be overwritten."""
    if place.single_file and place.final.exists():
        if not layout.is_recording(place.final):
            raise OutputError(
                f"`{place.final}` exists and is not a recording, so it is not overwritten",
                details=("nothing on disk was changed",),
                hint="choose another `--out`",
            )
        if not overwrite:
            raise OutputError(
                f"`{place.final}` exists and holds {layout.row_count([place.final])} rows of a finished run",
                details=("nothing on disk was changed",),
                hint="choose another `--out`, or `--overwrite` to replace it once this run has finished",
            )
    foreign = layout.foreign_names_in(place.growing)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise OutputError(
            f"`{place.growing_name}` holds files that are not a recording: {', '.join(foreign[:3])}{more}",
            details=("nothing on disk was changed",),
            hint="choose an empty or a new directory",
        )
    shards = layout.shards_in(place.growing)
    if shards and not overwrite:
        raise OutputError(
            f"`{place.growing_name}` holds {layout.row_count(shards)} rows in {_shards_in_words(len(shards))}"
            + (" of a run that did not finish" if place.single_file else ""),
            details=("nothing on disk was changed",),
            hint="choose another `--out`, or `--overwrite` to start anew",
        )


def _shards_in_words(count: int) -> str:
    return f"{count} shard" if count == 1 else f"{count} shards"


def _let_go(place: layout.OutputPlace, lock: WriterLock, *, made_directory: bool, has_begun: bool) -> None:
    """Release the lock; its file stays only beside rows that are not finished."""
    has_rows = place.growing.is_dir() and bool(layout.shards_in(place.growing))
    lock.release(remove=not (has_rows and (has_begun or lock.found)))
    if made_directory:
        _remove_if_empty(place.growing)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


class ShardedOutput:
    """An output that grows by whole shards; use it as a context manager.

    `add`, `take_pending` and `pending_rows` belong to one thread and do no I/O. `write_shard`, `record_failure`
    and `finish` block on the disk and may run in another thread.

    Attributes:
        rows_per_shard: `shard_due` from this many buffered rows on.
    """

    def __init__(
        self,
        place: layout.OutputPlace,
        lock: WriterLock,
        *,
        run_facts: str,
        rows_per_shard: int,
        made_directory: bool,
    ) -> None:
        self.rows_per_shard = rows_per_shard
        self._place = place
        self._lock = lock
        self._run_facts = run_facts
        self._made_directory = made_directory
        self._disk_access = threading.Lock()
        self._has_begun = False
        self._shard_count = 0
        self._written = Summary()
        self._batches: list[pa.RecordBatch] = []
        self._pending_rows = 0

    def describe_run(self, run_facts: Mapping[str, object]) -> None:
        """`run_facts` go into the footers from now on: most are known only once the server has been asked."""
        self._run_facts = _facts_json(run_facts)

    @property
    def growing_path(self) -> Path:
        """The directory that shards are written to."""
        return self._place.growing

    @property
    def failures_path(self) -> Path:
        """The JSON lines file of failed samples; there only once a sample has failed."""
        return self._place.failures

    @property
    def pending_rows(self) -> int:
        """Rows buffered and not yet taken."""
        return self._pending_rows

    @property
    def shard_due(self) -> bool:
        """Whether enough rows are buffered for a shard."""
        return self.pending_rows >= self.rows_per_shard

    @property
    def rows_on_disk(self) -> int:
        """Rows of this run in whole shards."""
        return self._written.rows

    @property
    def summary(self) -> Summary:
        """Counts over the rows on disk."""
        return self._written

    def add(self, nodes: Sequence[SequenceNode]) -> None:
        """Buffer all rows of one finished sample; they will stand next to each other in one shard.

        Raises:
            OutputError: a row cannot be stored; none of `nodes` was buffered.
        """
        if not nodes:
            return
        batch = _storable_batch(nodes)
        self._batches.append(batch)
        self._pending_rows += batch.num_rows

    def take_pending(self) -> PendingRows:
        """What is buffered; the buffer is empty afterwards."""
        pending = PendingRows(tuple(self._batches))
        self._batches, self._pending_rows = [], 0
        return pending

    def write_shard(self, pending: PendingRows) -> None:
        """`pending` is on the disk as one shard; nothing happens without rows.

        Raises:
            OutputError: it cannot be written; `pending` may be tried again.
        """
        if pending.rows == 0:
            return
        with self._disk_access, self._growing_faults_told("write a shard to"):
            self._put_shard(pending)

    def record_failure(self, failure: Mapping[str, object]) -> None:
        """`failure` is on the disk as one more line of the failures file.

        Raises:
            OutputError: it cannot be written.
        """
        line = json.dumps(failure, default=str) + "\n"
        with self._disk_access, self._growing_faults_told("record a failed sample beside"):
            self._begin()
            is_new = not self._place.failures.exists()
            with self._place.failures.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_directory(self._place.failures.parent)

    def finish(self) -> Path:
        """The finished file or directory; what was still buffered is in it, and the lock is released.

        Raises:
            OutputError: it cannot be written; the shards are whole where they are.
        """
        self.write_shard(self.take_pending())
        with self._disk_access, self._growing_faults_told("finish"):
            self._begin()
            if self._place.single_file:
                self._merge_shards()
            elif self._shard_count == 0:
                self._put_shard(PendingRows(()))
        self._lock.release(remove=True)
        if self._place.single_file:
            _remove_if_empty(self._place.growing)
        return self._place.final

    def close(self) -> None:
        """Release the lock; what is on disk stays, and a directory without a shard goes as it came."""
        _let_go(self._place, self._lock, made_directory=self._made_directory, has_begun=self._has_begun)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Take away what an earlier run left: this one has its first result."""
        if self._has_begun:
            return
        for shard in reversed(layout.shards_in(self._place.growing)):
            shard.unlink()
        self._place.failures.unlink(missing_ok=True)
        fsync_directory(self._place.growing)
        fsync_directory(self._place.growing.parent)
        self._has_begun = True

    def _put_shard(self, pending: PendingRows) -> None:
        summary = pending.summary()
        temp = self._place.growing / layout.shard_temp_name(self._shard_count)
        write_parquet(temp, pending.batches, run_facts=self._run_facts, summary=summary)
        self._begin()
        temp.rename(self._place.growing / layout.shard_name(self._shard_count))
        fsync_directory(self._place.growing)
        self._shard_count += 1
        self._written = self._written.merged(summary)

    def _merge_shards(self) -> None:
        """`final` is complete, then the shards go. A single shard is the file already."""
        shards = layout.shards_in(self._place.growing)
        if len(shards) == 1:
            shards[0].rename(self._place.final)
        else:
            temp = self._place.growing / layout.MERGED_TEMP_NAME
            batches = (batch for shard in shards for batch in read_batches(shard))
            write_parquet(temp, batches, run_facts=self._run_facts, summary=self._written)
            temp.rename(self._place.final)
        fsync_directory(self._place.final.parent)
        # The file is complete: a shard that cannot be removed now is clutter, not a fault.
        with contextlib.suppress(OSError):
            for shard in layout.shards_in(self._place.growing):
                shard.unlink()

    @contextlib.contextmanager
    def _growing_faults_told(self, doing: str) -> Iterator[None]:
        whole = f"the {self.rows_on_disk} rows in {_shards_in_words(self._shard_count)}"
        with disk_faults_told(
            f"{doing} `{self._place.growing_name}`",
            unharmed=f"{whole} of `{self._place.growing_name}` are whole and can be read",
            hint="free some space or check the disk; `managed-cli inspect` shows what was recorded",
        ):
            yield


def _storable_batch(nodes: Sequence[SequenceNode]) -> pa.RecordBatch:
    """`nodes` as a batch of the schema, nulls only where it allows them.

    Raises:
        OutputError: a value does not fit its column; the row's sample is named.
    """
    sample = nodes[0].metadata.get("sample_id")
    try:
        batch = record_batch(nodes)
    except (ValueError, TypeError, OverflowError) as error:
        raise OutputError(f"a row of sample {sample} cannot be stored: {error}") from error
    for field in batch.schema:
        if not field.nullable and batch.column(field.name).null_count:
            raise OutputError(f"a row of sample {sample} cannot be stored: it has no {field.name}")
    return batch
