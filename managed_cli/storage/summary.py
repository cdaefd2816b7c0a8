"""Counts over rows, kept in every file's footer so that nobody has to read the rows to know them."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from managed_cli.errors import OutputError
from managed_cli.storage.schema import record_batch
from managed_cli.storage.statistics import STATISTICS_COLUMNS, Statistics

if TYPE_CHECKING:  # pydantic, which readers of files do without
    from managed_cli.node import SequenceNode

SUMMARY_COLUMNS = (
    "sample_id",
    "prompt_length",
    "completion_length",
    "mean_logprob",
    "finish_reason",
    "metadata",
)
"""All that a summary is counted from; none of them is as wide as the token arrays."""

LOGPROB_SUM_RELATIVE_TOLERANCE = 1e-9
"""How far two sums over the same rows may differ: float64 addition in another order."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Summary:
    """Counts over rows; the same whether counted while writing or recounted from a file.

    Attributes:
        samples: distinct sample ids; rows of one sample stand next to each other.
        prompt_tokens: masked positions.
        completion_tokens: sampled positions.
        finish_reasons: reason → rows.
        logprob_sum: natural logs summed over the sampled positions of rows with a finite mean.
        logprob_count: how many positions are in `logprob_sum`.
        nonfinite_rows: rows whose mean is not finite, because a -inf was kept.
        fork_reasons: why a new node was begun → rows; from the metadata key `fork_reason`.
        dummy_rows: rows with placeholder tokens; from the metadata key `dummy_tokens`.
        statistics: how all that is spread; None where not every row was counted with `STATISTICS_COLUMNS`. Kept under
            a footer key of its own.
    """

    rows: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    logprob_sum: float = 0.0
    logprob_count: int = 0
    nonfinite_rows: int = 0
    fork_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    dummy_rows: int = 0
    statistics: Statistics | None = dataclasses.field(default_factory=Statistics, repr=False, compare=False)
    _last_sample_id: str | None = dataclasses.field(default=None, repr=False, compare=False)

    def mean_logprob(self) -> float | None:
        """Mean over the sampled positions in `logprob_sum`, natural log; None without any."""
        return self.logprob_sum / self.logprob_count if self.logprob_count else None

    def add(self, nodes: Sequence[SequenceNode]) -> None:
        """Count `nodes`, which follow the rows counted so far."""
        if nodes:
            self.add_batch(record_batch(nodes))

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Count a batch that follows the rows counted so far and holds those of `SUMMARY_COLUMNS` that its format has.

        What is not sampled has no completion: such a format counts samples and prompt tokens.
        """
        if batch.num_rows == 0:
            return
        self.rows += batch.num_rows
        self._count_samples(batch.column("sample_id"))
        self.prompt_tokens += pc.sum(batch.column("prompt_length")).as_py() or 0
        if self.statistics is not None and set(STATISTICS_COLUMNS) <= set(batch.schema.names):
            self.statistics.add_batch(batch)
        else:
            self.statistics = None
        if "completion_length" not in batch.schema.names:
            return
        self.completion_tokens += pc.sum(batch.column("completion_length")).as_py() or 0
        self._count_logprobs(batch.column("mean_logprob"), batch.column("completion_length"))
        for entry in pc.value_counts(batch.column("finish_reason")).to_pylist():
            reason = entry["values"]
            if reason is not None:
                self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + entry["counts"]
        self._count_marks(batch.column("metadata"))

    def _count_samples(self, sample_ids: pa.Array) -> None:
        changes = pc.not_equal(sample_ids.slice(1), sample_ids.slice(0, len(sample_ids) - 1))
        self.samples += pc.sum(changes).as_py() or 0
        if self.samples == 0 or sample_ids[0].as_py() != self._last_sample_id:
            self.samples += 1
        self._last_sample_id = sample_ids[-1].as_py()

    def _count_logprobs(self, means: pa.Array, lengths: pa.Array) -> None:
        finite = pc.is_finite(means)
        sums = pc.multiply(pc.cast(means.filter(finite), pa.float64()), pc.cast(lengths.filter(finite), pa.float64()))
        self.logprob_sum += pc.sum(sums).as_py() or 0.0
        self.logprob_count += pc.sum(lengths.filter(finite)).as_py() or 0
        self.nonfinite_rows += pc.sum(pc.invert(finite)).as_py() or 0

    def _count_marks(self, metadata: pa.Array) -> None:
        """Count `fork_reason` and `dummy_tokens`, parsing only the rows in which these words stand."""
        for text in metadata.to_pylist():
            if text is None or (FORK_MARK not in text and DUMMY_MARK not in text):
                continue
            try:
                facts = json.loads(text)
            except ValueError:  # found and told by `check_recording`
                continue
            if not isinstance(facts, dict):
                continue
            reason = facts.get("fork_reason")
            if isinstance(reason, str):
                self.fork_reasons[reason] = self.fork_reasons.get(reason, 0) + 1
            self.dummy_rows += facts.get("dummy_tokens") is True

    def merged(self, other: Self) -> Summary:
        """Counts over the rows of both; they have no sample in common."""
        total = Summary()
        for name in _COUNTS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                setattr(total, name, dict(collections.Counter(mine) + collections.Counter(theirs)))
            else:
                setattr(total, name, mine + theirs)
        total.statistics = None
        if self.statistics is not None and other.statistics is not None:
            total.statistics = self.statistics.merged(other.statistics)
        return total

    def agrees_with(self, other: Summary) -> bool:
        """Whether both are counts of the same rows; sums of logprobs may differ by rounding."""
        mine, theirs = self.statistics, other.statistics
        if mine is not None and theirs is not None and not mine.agrees_with(theirs):
            return False
        return dataclasses.replace(self, logprob_sum=0.0) == dataclasses.replace(other, logprob_sum=0.0) and (
            math.isclose(self.logprob_sum, other.logprob_sum, rel_tol=LOGPROB_SUM_RELATIVE_TOLERANCE, abs_tol=1e-9)
        )

    def to_dict(self) -> dict[str, Any]:  # Any: numbers and dicts of numbers
        """The counts by name, as they stand in the footer."""
        return {name: getattr(self, name) for name in _COUNTS}

    def to_json(self) -> str:
        """The counts as one JSON object."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The counts that `to_json` wrote.

        Raises:
            OutputError: `text` is not such an object.
        """
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise OutputError("the summary in a Parquet footer is not JSON") from error
        if not isinstance(facts, dict):
            raise OutputError("the summary in a Parquet footer is not a JSON object")
        for name, default in cls().to_dict().items():
            value = facts.get(name)
            known = isinstance(value, int | float) if isinstance(default, float) else type(value) is type(default)
            if not known:
                raise OutputError(f"the summary in a Parquet footer has no usable `{name}`")
        return cls(**{name: facts[name] for name in _COUNTS})


FORK_MARK, DUMMY_MARK = '"fork_reason"', '"dummy_tokens"'
"""One of them stands somewhere in the metadata of rows that are counted by these facts."""

_COUNTS = tuple(
    field.name for field in dataclasses.fields(Summary) if not field.name.startswith("_") and field.name != "statistics"
)
