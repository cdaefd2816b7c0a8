"""Rows on their way to the disk: buffered sample by sample, taken as one shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from managed_cli.errors import OutputError
from managed_cli.storage.schema import ROLLOUTS, RowFormat, Storable
from managed_cli.storage.statistics import STATISTICS_COLUMNS
from managed_cli.storage.summary import SUMMARY_COLUMNS, Summary


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

    @property
    def samples(self) -> int:
        """How many samples these are of."""
        return len(self.batches)

    def sample_ids(self) -> list[str]:
        """The samples that these are of."""
        return [batch.column("sample_id")[0].as_py() for batch in self.batches]

    def summary(self) -> Summary:
        """Counts over these rows."""
        summary = Summary()
        if not self.batches:
            return summary
        table = pa.Table.from_batches(self.batches)
        table = table.select([name for name in table.column_names if name in {*SUMMARY_COLUMNS, *STATISTICS_COLUMNS}])
        for batch in table.combine_chunks().to_batches():
            summary.add_batch(batch)
        return summary


def storable_batch(nodes: Sequence[Storable], row_format: RowFormat = ROLLOUTS) -> pa.RecordBatch:
    """`nodes` as a batch of the format's schema, nulls only where it allows them.

    Raises:
        OutputError: a value does not fit its column; the row's sample is named.
    """
    sample = nodes[0].metadata.get("sample_id")
    try:
        batch = row_format.record_batch(nodes)
    except (ValueError, TypeError, OverflowError) as error:
        raise OutputError(f"a row of sample {sample} cannot be stored: {error}") from error
    for field in batch.schema:
        if not field.nullable and batch.column(field.name).null_count:
            raise OutputError(f"a row of sample {sample} cannot be stored: it has no {field.name}")
    return batch
