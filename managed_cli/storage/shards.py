"""The writer: whole samples into whole shards, and the shards into one file.

A shard is written to a temporary name, fsynced, renamed and its directory fsynced, so that whatever bears a
shard's name is complete. Killed at any instant, what stands on disk is whole shards or the finished file.

With `overwrite`, the old rows stay until the new run has something to put in their place: old shards and
failures go when its first shard or failure is written, an old finished file is replaced by `finish()`.

With `resume`, what stands is gone on from: new shards are numbered after the last. A finished file becomes the first
shard of a directory that grows beside it, and stays what it is until `finish()` replaces it by all of them. Before the
first failure of a run there is a shard, if need be one without rows: it says which run the failures are of.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from managed_cli.errors import ConfigError, OutputError
from managed_cli.storage import layout, standing
from managed_cli.storage.failures import FailureJournal
from managed_cli.storage.final import put_final_file
from managed_cli.storage.footer import Fingerprint, Footer, Session, added_sessions, facts_json
from managed_cli.storage.lock import WriterLock
from managed_cli.storage.packing import get_ready
from managed_cli.storage.parquet import disk_faults_told, fsync_directory, write_parquet
from managed_cli.storage.pending import PendingRows, RowBuffer
from managed_cli.storage.recorded_ids import RecordedIds
from managed_cli.storage.schema import ROLLOUTS, RowFormat, Storable, json_text
from managed_cli.storage.standing import Earlier, SampleStanding
from managed_cli.storage.summary import Summary


def open_output(
    path: str,
    *,
    run_facts: Mapping[str, object],
    rows_per_shard: int,
    fingerprint: Fingerprint | None = None,
    overwrite: bool = False,
    resume: bool = False,
    retry_failed: bool = False,
    row_format: RowFormat = ROLLOUTS,
) -> ShardedOutput:
    """The output `path`, locked for this process; no row that stood there is changed yet.

    Args:
        path: `out.parquet` ends as one file; `DIR/`, or a directory that exists, stays a directory of shards.
        run_facts: settings, server, model, …: JSON values, no secrets. They go into every file's footer.
        rows_per_shard: `shard_due` from this many buffered rows on.
        fingerprint: the settings that must be those of the run that is resumed; None leaves them to `describe_run`.
        overwrite: an earlier output of ours may be replaced; other files never are.
        resume: an earlier output is gone on from; where there is none, the run begins.
        retry_failed: samples that failed in an earlier session are owed again.
        row_format: what kind of rows it holds.

    Raises:
        ConfigError: options that contradict each other.
        OutputError: something stands there, another process writes there, nothing can be written there, or what
            is to be resumed was recorded with another fingerprint.
    """
    refuse_contradictions(overwrite=overwrite, resume=resume, retry_failed=retry_failed)
    get_ready()
    with disk_faults_told(f"write to `{path}`", unharmed=standing.NOTHING_CHANGED):
        place, lock, made_here = standing.claimed(path)
        try:
            if not overwrite and not resume:
                standing.refuse_existing(place)
            for temp in layout.temps_in(place.growing):
                temp.unlink()
            output = ShardedOutput(
                place,
                lock,
                standing.find_earlier(place, row_format) if resume else Earlier(),
                rows_per_shard=rows_per_shard,
                retry_failed=retry_failed,
                made_directory=made_here,
                row_format=row_format,
            )
            output.describe_run(run_facts, fingerprint=fingerprint)
            output.take_over_failures()
        except BaseException:
            standing.let_go(place, lock, made_directory=made_here, has_begun=False)
            raise
    return output


def refuse_contradictions(*, overwrite: bool, resume: bool, retry_failed: bool) -> None:
    """Raise ConfigError for options of `open_output` that contradict each other."""
    if overwrite and resume:
        raise ConfigError("--overwrite starts anew and --resume goes on: only one of them can be meant")
    if retry_failed and not resume:
        raise ConfigError("--retry-failed belongs to --resume")


class ShardedOutput:
    """An output that grows by whole shards; use it as a context manager.

    `add`, `take_pending`, `standing` and `pending_rows` belong to one thread and do no I/O. `write_shard`,
    `record_failure` and `finish` block on the disk and may run in another thread.

    Attributes:
        rows_per_shard: `shard_due` from this many buffered rows on.
    """

    def __init__(
        self,
        place: layout.OutputPlace,
        lock: WriterLock,
        earlier: Earlier,
        *,
        rows_per_shard: int,
        retry_failed: bool,
        made_directory: bool,
        row_format: RowFormat,
    ) -> None:
        self.rows_per_shard = rows_per_shard
        self._place = place
        self._lock = lock
        self._earlier = earlier
        self._retry_failed = retry_failed
        self._made_directory = made_directory
        self._row_format = row_format
        self._run_facts = facts_json({})
        self._fingerprint: Fingerprint | None = None
        self._disk_access = threading.Lock()
        self._has_begun = False
        self._has_shard = False
        self._next_shard = earlier.next_shard()
        self._session_number = max((session.number for session in earlier.sessions), default=0) + 1
        self._added = Summary()
        self._failures = FailureJournal(place.failures, place.growing / layout.FAILURES_TEMP_NAME)
        self._buffer = RowBuffer(row_format)

    def describe_run(self, run_facts: Mapping[str, object], *, fingerprint: Fingerprint | None = None) -> None:
        """`run_facts` go into the footers from now on: most are known only once the server has been asked.

        Args:
            fingerprint: all of it; without one ever told, it is the empty one.

        Raises:
            OutputError: what is to be resumed was recorded with another fingerprint.
        """
        self._run_facts = facts_json(run_facts)
        if fingerprint is not None:
            self._fingerprint = fingerprint
            standing.refuse_other_run(self._place, self._earlier, fingerprint, partly=False)

    def refuse_other_settings(self, settings: Fingerprint) -> None:
        """Compare what is known of the fingerprint already, before a server is started or asked.

        Raises:
            OutputError: what is to be resumed was recorded with other values of these keys.
        """
        standing.refuse_other_run(self._place, self._earlier, settings, partly=True)

    def take_over_failures(self) -> None:
        """Failures of earlier sessions stand, but for samples that are recorded after all.

        Raises:
            OSError: their file cannot be read, or not be written anew.
        """
        if self._earlier.files:
            self._failures.load(self._earlier.recorded)

    @property
    def growing_path(self) -> Path:
        """The directory that shards are written to."""
        return self._place.growing

    @property
    def failures_path(self) -> Path:
        """The JSON lines file of failed samples; there only while a sample stands failed."""
        return self._place.failures

    @property
    def recorded(self) -> RecordedIds:
        """The samples that earlier sessions have recorded; empty where nothing is resumed."""
        return self._earlier.recorded

    @property
    def failed_samples(self) -> int:
        """How many samples stand failed now, those of earlier sessions included."""
        return len(self._failures)

    @property
    def has_earlier(self) -> bool:
        """Whether earlier sessions have left anything that was recorded, or that stands failed."""
        return len(self.recorded) + self.failed_samples > 0

    def standing(self, sample_id: str) -> SampleStanding:
        """Whether earlier sessions leave anything to be done for this sample of the input."""
        if sample_id in self._earlier.recorded:
            return SampleStanding.RECORDED
        if sample_id in self._failures and not self._retry_failed:
            return SampleStanding.FAILED
        return SampleStanding.OWED

    def standings(self, sample_ids: Sequence[str]) -> list[SampleStanding]:
        """`standing` of each, in less time."""
        recorded = self._earlier.recorded.which(sample_ids)
        return [
            SampleStanding.RECORDED if is_recorded else self.standing(sample_id)
            for sample_id, is_recorded in zip(sample_ids, recorded, strict=True)
        ]

    @property
    def pending_rows(self) -> int:
        """Rows buffered and not yet taken."""
        return self._buffer.rows

    @property
    def shard_due(self) -> bool:
        """Whether enough rows are buffered for a shard."""
        return self.pending_rows >= self.rows_per_shard

    @property
    def rows_on_disk(self) -> int:
        """Rows of this run on disk, those of earlier sessions included."""
        return self.summary.rows

    @property
    def summary(self) -> Summary:
        """Counts over the rows on disk, those of earlier sessions included."""
        return self._earlier.summary.merged(self._added)

    def add(self, nodes: Sequence[Storable]) -> tuple[int, int]:
        """Buffer all rows of one finished sample; they will stand next to each other in one shard.

        Returns how many positions of them the model did not sample, and how many it did.

        Raises:
            OutputError: a row cannot be stored; none of `nodes` was buffered.
        """
        return self._buffer.add(nodes) if nodes else (0, 0)

    def take_pending(self) -> PendingRows:
        """What is buffered; the buffer is empty afterwards."""
        return self._buffer.take()

    def write_shard(self, pending: PendingRows) -> None:
        """`pending` is on the disk as one shard, and its samples stand failed no longer; nothing without rows.

        Raises:
            OutputError: it cannot be written; `pending` may be tried again.
        """
        if pending.rows == 0:
            return
        lost = f"{pending.rows} rows of {pending.samples} samples are not on disk, so these samples are owed still"
        with self._disk_access, self._faults_told("write a shard to", lost=lost):
            self._put_shard(pending)
            self._failures.clear(pending.sample_ids)

    def record_failure(self, failure: Mapping[str, object]) -> None:
        """`failure` is on the disk as one more line of the failures file, with the time unless it has one.

        Args:
            failure: JSON values; `sample_id` is one of them.

        Raises:
            OutputError: it cannot be written.
        """
        sample_id = str(failure["sample_id"])
        lost = f"sample {sample_id} is neither recorded nor listed as failed, so it is owed still"
        with self._disk_access, self._faults_told("record a failed sample beside", lost=lost):
            self._say_which_run()
            self._failures.append(sample_id, failure)

    def finish(self) -> Path:
        """The finished file or directory; what was still buffered is in it, and the lock is released.

        Raises:
            OutputError: it cannot be written; the shards are whole where they are.
        """
        self.write_shard(self.take_pending())
        if not self._is_finished_already():
            with self._disk_access, self._faults_told("finish"):
                self._say_which_run()
                self._failures.compact()
                if self._place.single_file:
                    sessions = [*self._earlier.sessions, self._session(self._added)]
                    put_final_file(self._place, self._footer(self.summary, sessions), self._row_format)
        self._lock.release(remove=True)
        if self._place.single_file:
            standing.remove_if_empty(self._place.growing)
        return self._place.final

    def close(self) -> None:
        """Release the lock; what is on disk stays, and a directory without a shard goes as it came."""
        if self._has_begun and self._lock.is_in_place():
            # What a full disk keeps from being tidied now, the next `open_output` tidies.
            with contextlib.suppress(OSError):
                self._failures.compact()
        standing.let_go(self._place, self._lock, made_directory=self._made_directory, has_begun=self._has_begun)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_finished_already(self) -> bool:
        """Whether a finished file was resumed and nothing came to it."""
        return self._earlier.is_finished_file and not self._has_begun

    def _begin(self) -> None:
        """This session has its first result: what it replaces goes, what it goes on from is made to grow."""
        if self._has_begun:
            return
        if self._earlier.is_finished_file:
            standing.grow_from(self._place.final, self._place.growing)
        elif not self._earlier.files:
            for shard in reversed(layout.shards_in(self._place.growing)):
                shard.unlink()
            self._place.merged_mark.unlink(missing_ok=True)
            self._failures.forget()
        fsync_directory(self._place.growing)
        fsync_directory(self._place.growing.parent)
        self._has_begun = True

    def _say_which_run(self) -> None:
        """There is a shard with the fingerprint; one without rows where there are none yet."""
        self._refuse_other_places_and_runs()
        if self._earlier.files:
            self._begin()
        elif not self._has_shard:
            self._put_shard(PendingRows())

    def _put_shard(self, pending: PendingRows) -> None:
        self._refuse_other_places_and_runs()
        summary = pending.summary()
        temp = self._place.growing / layout.shard_temp_name(self._next_shard)
        write_parquet(temp, pending.batches, self._footer(summary, [self._session(summary)]), self._row_format)
        try:
            self._begin()
            temp.rename(self._place.growing / layout.shard_name(self._next_shard))
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise
        fsync_directory(self._place.growing)
        self._has_shard = True
        self._next_shard += pending.rows > 0
        self._added = self._added.merged(summary)

    def _session(self, summary: Summary) -> Session:
        return Session(number=self._session_number, rows=summary.rows, samples=summary.samples)

    def _footer(self, summary: Summary, sessions: Iterable[Session]) -> Footer:
        return Footer(
            run_facts=self._run_facts,
            fingerprint=json_text(self._fingerprint or {}),
            sessions=added_sessions(sessions),
            summary=summary,
        )

    def _refuse_other_places_and_runs(self) -> None:
        if self._fingerprint is None:
            standing.refuse_other_run(self._place, self._earlier, {}, partly=False)
        if not self._lock.is_in_place():
            raise OutputError(
                f"`{self._place.growing_name}` was removed or replaced while it was being written",
                details=("the rows that it held are not there any more; what stands there now was not touched",),
                hint="a new run with `--resume` does what is owed then",
            )

    @contextlib.contextmanager
    def _faults_told(self, doing: str, *, lost: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise OutputError(
                f"cannot {doing} `{self._place.growing_name}`: {reason}",
                details=[line for line in (self._what_is_whole(), lost) if line],
                hint="make room or mend the disk, then go on with `--resume`",
            ) from error

    def _what_is_whole(self) -> str:
        rows, where = self.rows_on_disk, self._place.growing_name
        if self._is_finished_already():
            return f"the {rows} rows of `{self._place.final}` are whole and unchanged"
        if not self._place.growing.is_dir():
            return f"`{where}` is gone, and the rows that it held"
        if not rows:
            return "no row of this run was on disk" + ("" if self._has_begun else ", and what stood there is unchanged")
        return f"the {rows} rows in {standing.shards_in_words(self._next_shard)} of `{where}` are whole and can be read"
