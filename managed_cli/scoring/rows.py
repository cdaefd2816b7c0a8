"""Rows of a recording as scorers take them: numpy arrays, a window of rows at a time."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from managed_cli.storage.check import row_flags
from managed_cli.storage.reader import Recording
from managed_cli.types import IGNORED_TOKEN_ID

WINDOW_ROWS = 256
"""Rows held at once: enough to sort by length and to find the logprobs of one row in another."""

WINDOW_TOKENS = 2_000_000
"""Tokens held at once, where rows are long: some 50 MB with what is computed of them."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One recorded row of T tokens.

    Attributes:
        number: counted from 0 in the recording, as `inspect --row` takes it.
        sizes: lengths of tokens, masked_tokens and logprobs; None for one that is null.
        tokens, logprobs: [T]; empty where the row is not whole.
        sampled: positions that the mask does not hide, ascending.
        breaches: kinds of `storage.check.KINDS` that the row breaks.
        is_whole: its arrays have one length and hold no null, no NaN and no negative id.
    """

    number: int
    sample_id: str
    choice_index: int
    full_text: str
    sizes: tuple[int | None, ...]
    tokens: Ints
    sampled: Positions
    logprobs: Floats
    metadata: dict[str, Any]  # Any: free-form JSON values
    breaches: tuple[str, ...]
    is_whole: bool

    @property
    def recorded(self) -> Floats:
        """The recorded logprobs of the sampled positions."""
        return self.logprobs[self.sampled]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """Which rows of a recording are looked at.

    Attributes:
        limit: only so many, from the start.
        sample: only so many, drawn at random with `seed`.
    """

    limit: int | None = None
    sample: int | None = None
    seed: int = 0

    def numbers(self, rows: int) -> Positions:
        """The chosen of `rows` rows, ascending."""
        if self.sample is not None and self.sample < rows:
            return np.array(sorted(random.Random(self.seed).sample(range(rows), self.sample)), dtype=np.intp)
        return np.arange(rows if self.limit is None else min(rows, self.limit))


def windows(recording: Recording, choice: RowChoice) -> Iterator[list[Row]]:
    """The chosen rows in their order, at most `WINDOW_ROWS` and about `WINDOW_TOKENS` at a time.

    Raises:
        OutputError: a file is damaged or has gone.
    """
    window: list[Row] = []
    tokens = 0
    for row in _chosen_rows(recording, choice):
        if window and (len(window) == WINDOW_ROWS or tokens + len(row.tokens) > WINDOW_TOKENS):
            yield window
            window, tokens = [], 0
        window.append(row)
        tokens += len(row.tokens)
    if window:
        yield window


def _chosen_rows(recording: Recording, choice: RowChoice) -> Iterator[Row]:
    numbers = choice.numbers(recording.rows)
    for file in recording.files:
        first = file.first_row
        chosen = _between(numbers, first, first + file.rows)
        for batch in file.iter_batches() if len(chosen) else ():
            wanted = _between(chosen, first, first + batch.num_rows)
            if len(wanted):
                yield from _rows_of(batch.take(pa.array(wanted - first)), wanted.tolist())
            first += batch.num_rows
            if chosen[-1] < first:
                break


def _between(numbers: Positions, first: int, end: int) -> Positions:
    return numbers[slice(*np.searchsorted(numbers, [first, end]))]


def _rows_of(batch: Any, numbers: Sequence[int]) -> Iterator[Row]:  # Any: pyarrow publishes no types
    breaches: dict[int, list[str]] = {}
    for kind, flags in row_flags(batch):
        for index in np.flatnonzero(flags).tolist():
            breaches.setdefault(index, []).append(kind)
    for index, number in enumerate(numbers):
        yield _row(batch.slice(index, 1), number, tuple(breaches.get(index, ())))


def _row(one: Any, number: int, breaches: tuple[str, ...]) -> Row:  # Any: as above
    arrays = [one.column(name)[0].values for name in ("tokens", "masked_tokens", "logprobs")]
    is_whole = not {"null", "length", "negative_token", "nan_logprob"} & set(breaches)
    tokens, masks, logprobs = (array.to_numpy() for array in arrays) if is_whole else (np.empty(0),) * 3
    scalars = {name: one.column(name)[0].as_py() for name in ("sample_id", "choice_index", "full_text", "metadata")}
    return Row(
        number=number,
        sample_id=str(scalars["sample_id"]),
        choice_index=int(scalars["choice_index"] or 0),
        full_text=scalars["full_text"] or "",
        sizes=tuple(None if array is None else len(array) for array in arrays),
        tokens=tokens.astype(np.int32),
        sampled=np.flatnonzero(masks != IGNORED_TOKEN_ID),
        logprobs=logprobs.astype(np.float64),
        metadata=_object(scalars["metadata"]),
        breaches=breaches,
        is_whole=is_whole,
    )


def _object(text: str | None) -> dict[str, Any]:  # Any: free-form JSON values
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
