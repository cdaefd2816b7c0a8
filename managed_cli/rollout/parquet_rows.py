"""Rows of a Parquet file as the objects that JSON lines would hold: columns are fields, null is absent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import PARQUET_MAGIC, InputSource

BATCH_BYTES = 8 * 2**20
"""About how much of a file, uncompressed, is turned into Python objects at once."""

MAX_BATCH_ROWS = 2048
"""Rows turned into objects at once, however small: more are not faster."""

Read = Callable[[Any], object]


def is_parquet(source: InputSource) -> bool:
    """Whether the file begins as Parquet does; False for one that cannot be read, which reading it tells."""
    try:
        if not source.path.is_file():
            return False
        with source.path.open("rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError:
        return False


class ParquetRows:
    """The rows of one file.

    Raises:
        InputError: the file is broken, or has a column that cannot be read.
    """

    def __init__(self, source: InputSource) -> None:
        self._name = source.name
        try:
            self._file = pq.ParquetFile(source.path, pre_buffer=False)
            self._schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, error) from error
        self._types = [_plain_type(field.type) for field in self._schema]
        self._readers = {
            field.name: read for field, kind in zip(self._schema, self._types, strict=True) if (read := _reader(kind))
        }

    def numbered(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Rows from 1, as `parse` takes them."""
        number = 0
        with self._file:
            try:
                for batch in self._file.iter_batches(batch_size=self._batch_rows(), use_threads=False):
                    columns = [_cast(batch.column(i), kind) for i, kind in enumerate(self._types)]
                    for row in pa.RecordBatch.from_arrays(columns, names=self._schema.names).to_pylist():
                        number += 1
                        yield number, row
            except (pa.ArrowException, OSError) as error:
                raise self._broken(number, error) from error

    def parse(self, row: dict[str, object]) -> dict[str, object]:
        """The object of a row: nested values as Python's, null columns left out.

        Raises:
            InputError: a value that no field can hold. The message has no file and row yet.
        """
        for name, read in self._readers.items():
            try:
                row[name] = read(row[name])
            except UnicodeDecodeError as error:
                raise InputError(f"`{name}`: expected text, came binary data") from error
        return {name: value for name, value in row.items() if value is not None}

    def _batch_rows(self) -> int:
        metadata = self._file.metadata
        total: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        per_row = total // max(int(metadata.num_rows), 1) + 1
        return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // per_row))

    def _broken(self, rows_read: int, error: Exception) -> InputError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return InputError(
            f"{self._name}: the Parquet file cannot be read after row {rows_read}",
            details=[reason],
            hint="it may have been cut or still be growing; copy or write it again",
        )


def _cast(column: Any, kind: pa.DataType) -> Any:  # Any: arrow arrays
    array = column.storage if isinstance(column, pa.ExtensionArray) else column
    return array if array.type.equals(kind) else array.cast(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type to read a column as: times and decimals as text, categories as what they stand for."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


def _reader(kind: pa.DataType) -> Read | None:
    """What turns a value into one that JSON knows; None where it is one already."""
    if pa.types.is_floating(kind):
        return _finite
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return lambda value: None if value is None else value.decode()
    if pa.types.is_map(kind):
        return _mapping_reader(_reader(kind.item_type))
    if pa.types.is_struct(kind):
        return _struct_reader({kind.field(i).name: _reader(kind.field(i).type) for i in range(kind.num_fields)})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        read = _reader(kind.value_type)
        return None if read is None else lambda value: None if value is None else [read(item) for item in value]
    return None


def _finite(value: float | None) -> object:
    """A number as it is; NaN, which tables put where a number is missing, as null; infinity as a word."""
    if value is None or math.isfinite(value):
        return value
    return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _struct_reader(readers: dict[str, Read | None]) -> Read:
    def read_struct(value: dict[str, Any] | None) -> object:  # Any: values of any column type
        if value is None:
            return None
        members = ((name, read(value[name]) if read else value[name]) for name, read in readers.items())
        # A struct has the keys of all rows: what is null was not there, and a template must not see it.
        return {name: member for name, member in members if member is not None}

    return read_struct


def _mapping_reader(read: Read | None) -> Read:
    def read_mapping(pairs: list[tuple[object, Any]] | None) -> object:  # Any: as above
        if pairs is None:
            return None
        return {str(key): read(value) if read else value for key, value in pairs}

    return read_mapping
