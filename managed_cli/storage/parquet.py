"""How rows lie inside a Parquet file, and how a file comes to be on disk as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.errors import OutputError
from managed_cli.storage.footer import Footer
from managed_cli.storage.schema import ROLLOUTS, Column, RowFormat

ROW_GROUP_ROWS = 2048
"""Most rows per row group, so that one row is found without decoding many others."""

ROW_GROUP_BYTES = 64 * 1024 * 1024
"""Most Arrow bytes per row group: about 4 million tokens at 12 bytes each, and their text. Bounds memory."""

STATISTICS_COLUMNS = (
    "sample_id",
    "choice_index",
    "prompt_length",
    "completion_length",
    "mean_logprob",
    "finish_reason",
)
"""Columns that a filter may skip row groups by; minima of long texts would only swell the footer."""


def leaf_path(column: Column) -> str:
    """The column's path inside Parquet, where a list's values are a leaf of their own."""
    path, type = column.name, column.type
    while pa.types.is_list(type):
        path, type = f"{path}.list.element", type.value_type
    return path


def row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The same rows in the same order, in tables within `ROW_GROUP_ROWS` and `ROW_GROUP_BYTES`.

    A single row larger than that is a table of its own. Rows of a sequence are spread evenly over the tables; of other
    iterables, whose length is not known beforehand, one table's rows are held at a time.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    most_rows = ROW_GROUP_ROWS
    if isinstance(batches, Sequence) and batches:
        most_rows = _even_rows(batches)
        batches = _cut_at_multiples(batches, most_rows)
    for part in (part for batch in batches for part in _halved_to_fit(batch)):
        if held and (rows + part.num_rows > most_rows or size + part.nbytes > ROW_GROUP_BYTES):
            yield pa.Table.from_batches(held, schema=schema)
            held, rows, size = [], 0, 0
        held.append(part)
        rows += part.num_rows
        size += part.nbytes
    if held:
        yield pa.Table.from_batches(held, schema=schema)


def _even_rows(batches: Sequence[pa.RecordBatch]) -> int:
    """Rows of each table where there are as few as can be, and the last is about as long as the others."""
    rows = sum(int(batch.num_rows) for batch in batches)
    size = sum(int(batch.nbytes) for batch in batches)
    tables = max(1, -(-rows // ROW_GROUP_ROWS), -(-size // ROW_GROUP_BYTES))
    return max(1, -(-rows // tables))


def _cut_at_multiples(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows; no batch has rows on both sides of a multiple of `rows`."""
    before = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, rows - before % rows)
            yield part
            start += part.num_rows
            before += part.num_rows


def _halved_to_fit(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= 1 or (batch.num_rows <= ROW_GROUP_ROWS and batch.nbytes <= ROW_GROUP_BYTES):
        yield batch
        return
    half = batch.num_rows // 2
    yield from _halved_to_fit(batch.slice(0, half))
    yield from _halved_to_fit(batch.slice(half))


def is_small(rows: int, arrow_bytes: int) -> bool:
    """Whether two such row groups would fit into one."""
    return 2 * rows < ROW_GROUP_ROWS and 2 * arrow_bytes < ROW_GROUP_BYTES


def write_parquet(
    path: Path, batches: Iterable[pa.RecordBatch], footer: Footer, row_format: RowFormat = ROLLOUTS
) -> None:
    """`path` is a complete Parquet file of `batches`, flushed to the disk itself.

    Raises:
        OSError: the disk is full, read-only, …; `path` is then gone.
        OutputError: `batches` are not the rows that `footer` counts; likewise.
    """
    with whole_file(path) as file, parquet_writer(file, row_format) as writer:
        refuse_other_count(write_row_groups(writer, batches, row_format), footer)
        writer.add_key_value_metadata(footer.key_values())


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to and to read from, afterwards flushed to the disk itself; after an error, it is gone."""
    try:
        with path.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def parquet_writer(file: BinaryIO | pa.NativeFile, row_format: RowFormat) -> pq.ParquetWriter:
    """What writes Parquet of `row_format` to `file`, as all of our files are written; a context manager."""
    return pq.ParquetWriter(
        file,
        row_format.schema,
        compression="zstd",
        use_dictionary=[leaf_path(column) for column in row_format.columns if column.dictionary],
        use_byte_stream_split=[leaf_path(column) for column in row_format.columns if column.byte_stream_split],
        write_statistics=[name for name in STATISTICS_COLUMNS if name in row_format.schema.names],
        write_page_checksum=True,
    )


def write_row_groups(writer: pq.ParquetWriter, batches: Iterable[pa.RecordBatch], row_format: RowFormat) -> int:
    """How many rows `batches` had, all of them written."""
    rows = 0
    for table in row_groups(batches, row_format.schema):
        writer.write_table(table, row_group_size=table.num_rows)
        rows += table.num_rows
    return rows


def refuse_other_count(rows: int, footer: Footer) -> None:
    """Raise OutputError where `rows` are not as many as `footer` counts."""
    if rows != footer.summary.rows:
        raise OutputError(
            f"{rows} rows came together where {footer.summary.rows} were recorded: a shard has changed",
            details=("the shards stay as they are", "nothing was put in their place"),
        )


def fsync_directory(directory: Path) -> None:
    """The names in `directory` are on the disk itself: a rename survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_faults_told(doing: str, *, unharmed: str, hint: str | None = None) -> Iterator[None]:
    """An OSError inside becomes an `OutputError`: cannot `doing`, why, and what is `unharmed`."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OutputError(f"cannot {doing}: {reason.lower()}", details=(unharmed,), hint=hint) from error
