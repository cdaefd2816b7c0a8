"""Rows on their way to the disk: buffered sample by sample, taken as one shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from managed_cli.storage.packing import packed_size
from managed_cli.storage.schema import PackedRow, RowFormat, Storable
from managed_cli.storage.summary import Summary

CHUNK_ROWS = 512
"""Packed rows that become one Arrow batch: its fixed cost is then little for each of them."""

CHUNK_BYTES = 1024 * 1024
"""Packed bytes that become one Arrow batch, however few rows they are; they are there twice while it is made."""


@dataclasses.dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows taken out of the buffer, to be written as one shard.

    Attributes:
        batches: the rows in the order they were added.
        sample_ids: the samples that these are of.
    """

    batches: tuple[pa.RecordBatch, ...] = ()
    sample_ids: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return sum(batch.num_rows for batch in self.batches)

    @property
    def samples(self) -> int:
        """How many samples these are of."""
        return len(self.sample_ids)

    def summary(self) -> Summary:
        """Counts over these rows."""
        summary = Summary()
        for batch in self.batches:  # one by one: counting holds up other threads, and may take as long as it is large
            summary.add_batch(batch)
        return summary


class RowBuffer:
    """Rows of finished samples, compact, until they are taken to be written."""

    def __init__(self, row_format: RowFormat) -> None:
        self._row_format = row_format
        self._start()

    def _start(self) -> None:
        self.rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._sample_ids: list[str] = []
        self._packed: list[PackedRow] = []
        self._packed_bytes = 0

    def add(self, rows: Sequence[Storable]) -> tuple[int, int]:
        """Buffer all rows of one sample, and say how many positions of them the model did not sample, and did.

        Raises:
            OutputError: a row cannot be stored; none of `rows` was buffered.
        """
        packed = [self._row_format.packed(row) for row in rows]
        self._packed += packed
        self._packed_bytes += sum(map(packed_size, packed))
        self._sample_ids.append(rows[0].metadata["sample_id"])
        self.rows += len(packed)
        if len(self._packed) >= CHUNK_ROWS or self._packed_bytes >= CHUNK_BYTES:
            self._make_batch()
        return self._row_format.lengths(packed)

    def take(self) -> PendingRows:
        """What is buffered; the buffer is empty afterwards."""
        self._make_batch()
        pending = PendingRows(tuple(self._batches), tuple(self._sample_ids))
        self._start()
        return pending

    def _make_batch(self) -> None:
        if self._packed:
            self._batches.append(self._row_format.batch_of(self._packed))
            self._packed, self._packed_bytes = [], 0
