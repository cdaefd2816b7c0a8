"""Every rule that a recorded row obeys, tested again on what is on disk: vectorised, one batch at a time."""

from __future__ import annotations

import array
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from managed_cli.errors import OutputError
from managed_cli.storage.reader import RecordedFile, Recording
from managed_cli.storage.schema import SCHEMA
from managed_cli.storage.summary import Summary
from managed_cli.types import IGNORED_TOKEN_ID, LOGPROB_TOLERANCE, MASKED_LOGPROB

KINDS = {
    "unreadable": "rows that cannot be decoded: the file is damaged",
    "null": "a null where the schema allows none",
    "length": "tokens, masked_tokens and logprobs of different lengths",
    "negative_token": "a token id below 0",
    "nan_logprob": "a logprob that is not a number",
    "masked_logprob": "a masked position whose logprob is not 1.0",
    "mask_value": "a mask that is neither -100 nor the token",
    "sampled_logprob": "a sampled position whose logprob is above 0",
    "prompt_length": "prompt_length is not the number of masked positions",
    "completion_length": "completion_length is not the number of sampled positions",
    "mean_logprob": "mean_logprob is not the mean over sampled positions",
    "choice_index": "a choice_index below 0",
    "metadata": "metadata that is not a JSON object",
    "duplicate": "sample_id, choice_index and node_id of an earlier row",
    "summary": "a footer whose counts are not those of its rows",
}
"""Kind of breach → what it means. Those of `node.alignment_breach` bear the same names."""

PLACES_KEPT = 5
"""First places remembered per kind; enough to look at, however many rows are broken."""

MEAN_TOLERANCE = 1e-5
"""How far `mean_logprob` may lie from the mean, relative above 1: float32 logprobs, a float32 mean."""

_ID_COLUMNS = ("sample_id", "choice_index", "node_id")

Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a breach stands.

    Attributes:
        row: number of the row in the recording, as `--row` takes it; None where the file as a whole is meant.
        row_in_file: the same, counted from the file's first row.
    """

    file: Path
    row: int | None
    row_in_file: int | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Breach:
    """All breaches of one kind: how many rows (or files), and the first places."""

    kind: str
    count: int = 0
    places: list[Place] = dataclasses.field(default_factory=list)

    @property
    def meaning(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]


@dataclasses.dataclass(slots=True, kw_only=True)
class CheckReport:
    """What `check_recording` found.

    Attributes:
        rows: rows tested.
        tokens: positions tested.
        breaches: kind → breach, only the kinds that occur.
    """

    rows: int = 0
    tokens: int = 0
    breaches: dict[str, Breach] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every row obeys every rule."""
        return not self.breaches

    def found(self, kind: str, places: Sequence[Place], *, count: int) -> None:
        """Note `count` more breaches of `kind`, the first of them at `places`."""
        breach = self.breaches.setdefault(kind, Breach(kind=kind))
        breach.count += count
        breach.places += places[: PLACES_KEPT - len(breach.places)]


def check_recording(recording: Recording) -> CheckReport:
    """Every rule tested on every row; memory is one batch and 8 bytes per row."""
    report = CheckReport()
    key_hashes = array.array("q")
    for file in recording.files:
        _check_file(file, report, key_hashes)
    for file, row_in_file in _duplicates(recording, key_hashes):
        report.found("duplicate", [_place(file, row_in_file)], count=1)
    report.breaches = {kind: report.breaches[kind] for kind in KINDS if kind in report.breaches}
    return report


def _place(file: RecordedFile, row_in_file: int) -> Place:
    return Place(file=file.path, row=file.first_row + row_in_file, row_in_file=row_in_file)


def _check_file(file: RecordedFile, report: CheckReport, key_hashes: array.array[int]) -> None:
    counted, first_row = Summary(), 0
    try:
        for batch in file.iter_batches():
            for kind, flags in row_flags(batch):
                if flags.any():
                    places = [_place(file, first_row + int(row)) for row in np.flatnonzero(flags)[:PLACES_KEPT]]
                    report.found(kind, places, count=int(flags.sum()))
            key_hashes.extend(hash(key) for key in _keys(batch))
            counted.add_batch(batch)
            report.tokens += len(batch.column("tokens").flatten())
            first_row += batch.num_rows
    except OutputError:
        report.found("unreadable", [_place(file, first_row)], count=file.rows - first_row)
    else:
        if file.summary is not None and not file.summary.agrees_with(counted):
            report.found("summary", [Place(file=file.path, row=None, row_in_file=None)], count=1)
    report.rows += first_row


def _keys(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:  # Any: str and int
    return zip(*(batch.column(name).to_pylist() for name in _ID_COLUMNS), strict=True)


def _duplicates(recording: Recording, key_hashes: array.array[int]) -> Iterator[tuple[RecordedFile, int]]:
    """Rows whose identity an earlier row has; keys of equal hash are read again and compared as they are."""
    hashes = np.frombuffer(key_hashes, dtype=np.int64) if key_hashes else np.empty(0, dtype=np.int64)
    values, counts = np.unique(hashes, return_counts=True)
    repeated = set(values[counts > 1].tolist())
    if not repeated:
        return
    seen = set()
    for file in recording.files:
        row_in_file = 0
        try:
            for batch in file.iter_batches(_ID_COLUMNS):
                for key in _keys(batch):
                    if hash(key) in repeated:
                        if key in seen:
                            yield file, row_in_file
                        seen.add(key)
                    row_in_file += 1
        except OutputError:  # told as `unreadable` already
            continue


def row_flags(batch: pa.RecordBatch) -> Iterator[tuple[str, Flags]]:
    """Per kind, which rows of `batch` breach it: [rows]."""
    nulls = _rows_with_nulls(batch)
    yield "null", nulls
    yield "choice_index", _as_flags(pc.less(batch.column("choice_index"), 0))
    yield "metadata", np.array([not _is_json_object(text) for text in batch.column("metadata").to_pylist()], dtype=bool)
    lengths = [pc.list_value_length(batch.column(name)) for name in ("tokens", "masked_tokens", "logprobs")]
    uneven = _as_flags(pc.or_(pc.not_equal(lengths[0], lengths[1]), pc.not_equal(lengths[0], lengths[2])))
    yield "length", uneven
    # Positions can be compared only in rows whose arrays are whole and of one length.
    comparable = ~(nulls | uneven)
    if not comparable.any():
        return
    rows = batch if comparable.all() else batch.filter(pa.array(comparable))
    for kind, flags in _array_flags(rows):
        spread = np.zeros(batch.num_rows, dtype=bool)
        spread[comparable] = flags
        yield kind, spread


def _array_flags(batch: pa.RecordBatch) -> Iterator[tuple[str, Flags]]:
    """Per kind, which rows breach it, where all three arrays have the T positions of their row."""
    rows = batch.num_rows
    row_of_position = np.repeat(np.arange(rows), pc.list_value_length(batch.column("tokens")).to_numpy())
    tokens, masks, logprobs = (
        batch.column(name).flatten().to_numpy() for name in ("tokens", "masked_tokens", "logprobs")
    )

    def of_rows(positions: Flags) -> Flags:
        flags = np.zeros(rows, dtype=bool)
        flags[row_of_position[positions]] = True
        return flags

    masked, not_a_number = masks == IGNORED_TOKEN_ID, np.isnan(logprobs)
    fine = (tokens >= 0) & ~not_a_number
    yield "negative_token", of_rows(tokens < 0)
    yield "nan_logprob", of_rows(not_a_number)
    yield "masked_logprob", of_rows(fine & masked & (logprobs != MASKED_LOGPROB))
    yield "mask_value", of_rows(fine & ~masked & (masks != tokens))
    yield "sampled_logprob", of_rows(fine & ~masked & (masks == tokens) & (logprobs > LOGPROB_TOLERANCE))

    sampled = np.bincount(row_of_position[~masked], minlength=rows)
    yield (
        "prompt_length",
        batch.column("prompt_length").to_numpy() != np.bincount(row_of_position, minlength=rows) - sampled,
    )
    yield "completion_length", batch.column("completion_length").to_numpy() != sampled
    sums = np.bincount(row_of_position[~masked], weights=logprobs[~masked], minlength=rows).astype(np.float64)
    yield "mean_logprob", _wrong_means(batch.column("mean_logprob"), sums, sampled)


def _wrong_means(column: pa.Array, sums: npt.NDArray[np.float64], sampled: npt.NDArray[np.intp]) -> Flags:
    """Rows whose recorded mean is not `sums / sampled`, or is there without a sampled position; [rows]."""
    recorded = column.to_numpy(zero_copy_only=False).astype(np.float64)
    null = column.is_null().to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / sampled
        near = np.isclose(recorded, means, rtol=MEAN_TOLERANCE, atol=MEAN_TOLERANCE, equal_nan=True)
    wrong: Flags = np.where(sampled == 0, ~null, null | ~near)
    return wrong


def _rows_with_nulls(batch: pa.RecordBatch) -> Flags:
    flags = np.zeros(batch.num_rows, dtype=bool)
    for field in SCHEMA:
        column = batch.column(field.name)
        if not field.nullable and column.null_count:
            flags |= column.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_list(field.type):
            values = column.flatten()
            if values.null_count:
                lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
                flags[
                    np.repeat(np.arange(batch.num_rows), lengths)[values.is_null().to_numpy(zero_copy_only=False)]
                ] = True
    return flags


def _as_flags(column: pa.Array) -> Flags:
    """A boolean column, null as false: [rows]."""
    flags: Flags = pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool)
    return flags


_JSON_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _is_json_object(text: str | None) -> bool:
    if text is None:
        return True  # told as `null`
    try:
        _JSON_OBJECT.decode(text)
    except msgspec.DecodeError:
        return _is_json_object_slowly(text)
    return True


def _is_json_object_slowly(text: str) -> bool:
    """For what msgspec refuses and JSON allows: lone surrogates as escapes."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except ValueError:
        return False


def _refuse_constant(name: str) -> Sequence[Any]:  # Any: never returns
    raise ValueError(f"{name} is not JSON")
