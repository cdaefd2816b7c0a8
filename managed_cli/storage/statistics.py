"""How lengths, logprobs, turns and servers are spread over rows: histograms that add up, kept in every file's footer.

Bins are fixed, so that those of two files can be added. A bin is named by its lower edge:

    lengths     exact below 64 tokens, above that 32 bins per doubling: each edge is a multiple of its bin's width
    logprobs    1/64 nat wide, named by their lower edge in 64ths; the lowest holds all below -16 nats
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from managed_cli.storage.shares import SampledPositions, Share, Shares, integers

STATISTICS_COLUMNS = (
    "sample_id",
    "node_id",
    "parent_id",
    "tokens",
    "masked_tokens",
    "logprobs",
    "prompt_length",
    "completion_length",
    "mean_logprob",
    "finish_reason",
    "metadata",
)
"""All that statistics are counted from."""

EXACT_LENGTHS = 64
"""Lengths below are bins of their own; above, a bin is a 32nd of the power of two below it wide."""

LOGPROB_BINS_PER_NAT = 64
LOWEST_LOGPROB_BIN = -16 * LOGPROB_BINS_PER_NAT

PROBABILITY_FLOORS = (0.9, 0.5, 0.1, 0.01, 0.001, 0.0)
"""Sampled tokens are counted by the first of these that their probability reaches."""

MOST_SERVERS = 32
"""Servers counted by name; the rows of further ones are counted together."""

OTHER_SERVERS = "other servers"

SUM_TOLERANCE = 1e-6
"""How far two sums of logprobs over the same positions may differ, relative: additions in another order."""


class _Turn(msgspec.Struct):
    start: int
    end: int
    finish_reason: str | None = None


class _Facts(msgspec.Struct):
    """What is counted of a row's metadata."""

    turns: list[_Turn] = []
    server: str | None = None


_FACTS = msgspec.json.Decoder(_Facts)


@dataclasses.dataclass(slots=True, kw_only=True)
class Statistics:
    """Spreads over rows; the same whether counted while writing or recounted from a file.

    Attributes:
        prompt_lengths: lower edge (tokens) → rows.
        completion_lengths: likewise.
        mean_logprobs: lower edge (64ths of a nat) → rows with a finite mean.
        token_probabilities: one count for each of `PROBABILITY_FLOORS`, of sampled tokens.
        longest: most sampled tokens of a row.
        turn_counts: sampled turns of a row → rows.
        by_turn: number of the turn, from 1 → what was sampled in it; a turn that a row has from its parent's row is
            not counted again.
        by_server: address → its rows.
        samples_of_several: samples with more than one row.
        repeated_rows: rows with the very tokens of an earlier row of their sample.
        samples_with_repeats: samples with such a row.
    """

    prompt_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    completion_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    mean_logprobs: dict[int, int] = dataclasses.field(default_factory=dict)
    token_probabilities: list[int] = dataclasses.field(default_factory=lambda: [0] * len(PROBABILITY_FLOORS))
    longest: int = 0
    turn_counts: dict[int, int] = dataclasses.field(default_factory=dict)
    by_turn: dict[int, Share] = dataclasses.field(default_factory=dict)
    by_server: dict[str, Share] = dataclasses.field(default_factory=dict)
    samples_of_several: int = 0
    repeated_rows: int = 0
    samples_with_repeats: int = 0
    _sample: _Sample | None = dataclasses.field(default=None, repr=False, compare=False)

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Count a batch that holds `STATISTICS_COLUMNS` and follows the rows counted so far."""
        if batch.num_rows == 0:
            return
        _count(self.prompt_lengths, length_bins(integers(batch.column("prompt_length"))))
        lengths = integers(batch.column("completion_length"))
        _count(self.completion_lengths, length_bins(lengths))
        self.longest = max(self.longest, int(lengths.max()))
        means = pc.drop_null(batch.column("mean_logprob")).to_numpy(zero_copy_only=False)
        _count(self.mean_logprobs, logprob_bins(means[np.isfinite(means)]))
        sampled = SampledPositions(batch)
        self._count_tokens(sampled)
        self._count_rows(batch, sampled)

    def _count_tokens(self, sampled: SampledPositions) -> None:
        probabilities, flags = np.exp(np.minimum(sampled.logprobs, 0.0)), sampled.flags
        floors = PROBABILITY_FLOORS[:-1]  # the last is reached by all
        reached = [np.count_nonzero((probabilities >= np.float32(floor)) & flags) for floor in floors]
        counts = np.diff([0, *reached, np.count_nonzero(flags)])
        self.token_probabilities = [
            mine + int(more) for mine, more in zip(self.token_probabilities, counts, strict=True)
        ]

    def _count_rows(self, batch: pa.RecordBatch, sampled: SampledPositions) -> None:
        names = ("sample_id", "node_id", "parent_id", "finish_reason", "metadata")
        columns = [batch.column(name).to_pylist() for name in names]
        edges = sampled.edges.tolist()
        turns, servers = Shares(), Shares()
        for row, (sample_id, node_id, parent_id, finish_reason, metadata) in enumerate(zip(*columns, strict=True)):
            sample = self._sample
            if sample is None or sample.sample_id != sample_id:
                sample = self._sample = _Sample(sample_id)
            begin, end = edges[row], edges[row + 1]
            self._count_repeat(sample, sampled.ids[begin:end])
            facts = _facts_of(metadata)
            taken_over = sample.lengths.get(parent_id, 0)
            sample.lengths[node_id] = end - begin
            if facts is None:
                continue
            if facts.turns:
                _count_one(self.turn_counts, len(facts.turns))
            for number, turn in enumerate(facts.turns, start=1):
                if taken_over <= turn.start <= turn.end <= end - begin:
                    turns.note(number, begin + turn.start, begin + turn.end, turn.finish_reason)
            if facts.server is not None:
                servers.note(facts.server, begin, end, finish_reason)
        for number, share in turns.added_up(sampled):
            self.by_turn.setdefault(number, Share()).add(share)
        for server, share in servers.added_up(sampled):
            self._count_server(server, share)

    def _count_repeat(self, sample: _Sample, ids: npt.NDArray[np.int32]) -> None:
        sample.rows += 1
        if sample.rows == 1:  # most samples have one row, and nothing to compare it with
            sample.first = ids.tobytes()
            return
        if sample.rows == 2:
            self.samples_of_several += 1
            sample.seen.add(hash(sample.first))
        key = hash(ids.tobytes())
        if key in sample.seen:
            self.repeated_rows += 1
            self.samples_with_repeats += not sample.repeats
            sample.repeats = True
        sample.seen.add(key)

    def _count_server(self, server: str, share: Share) -> None:
        if server not in self.by_server and len(self.by_server) >= MOST_SERVERS:
            server = OTHER_SERVERS
        self.by_server.setdefault(server, Share()).add(share)

    def merged(self, other: Self) -> Statistics:
        """Statistics over the rows of both; they have no sample in common."""
        total = Statistics()
        for part in (self, other):
            for name in ("prompt_lengths", "completion_lengths", "mean_logprobs", "turn_counts"):
                for key, count in getattr(part, name).items():
                    _count_one(getattr(total, name), key, count)
            for name in ("samples_of_several", "repeated_rows", "samples_with_repeats"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.longest = max(total.longest, part.longest)
            total.token_probabilities = [
                mine + more for mine, more in zip(total.token_probabilities, part.token_probabilities, strict=True)
            ]
            for number, share in part.by_turn.items():
                total.by_turn.setdefault(number, Share()).add(share)
            for server, share in part.by_server.items():
                total._count_server(server, share)
        return total

    def agrees_with(self, other: Statistics) -> bool:
        """Whether both are of the same rows; sums of logprobs may differ by rounding."""
        mine, theirs = self.to_dict(), other.to_dict()
        if OTHER_SERVERS in mine["by_server"] or OTHER_SERVERS in theirs["by_server"]:
            del mine["by_server"], theirs["by_server"]  # which servers have a name depends on the order of adding
        return _same(mine, theirs)

    def to_dict(self) -> dict[str, Any]:  # Any: numbers, and dicts of them
        """The statistics by name, as they stand in the footer; keys are text, in order."""
        facts: dict[str, Any] = {}  # Any: as above
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                value = {
                    str(key): dataclasses.asdict(entry) if isinstance(entry, Share) else entry
                    for key, entry in sorted(value.items())
                }
            if not field.name.startswith("_"):
                facts[field.name] = value
        return facts

    def to_json(self) -> str:
        """The statistics as one JSON object."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def find(cls, text: str | bytes | None) -> Self | None:
        """The statistics that `to_json` wrote; None where `text` is something else."""
        if text is None:
            return None
        try:
            stored = msgspec.json.decode(text, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if len(stored.token_probabilities) != len(PROBABILITY_FLOORS):
            return None
        return cls(**{name: getattr(stored, name) for name in _Stored.__struct_fields__})


class _Stored(msgspec.Struct, kw_only=True):
    """`Statistics` as they stand in a footer."""

    prompt_lengths: dict[int, int]
    completion_lengths: dict[int, int]
    mean_logprobs: dict[int, int]
    token_probabilities: list[int]
    longest: int
    turn_counts: dict[int, int]
    by_turn: dict[int, Share]
    by_server: dict[str, Share]
    samples_of_several: int
    repeated_rows: int
    samples_with_repeats: int


class _Sample:
    """The sample whose rows are being counted, which stand next to each other."""

    __slots__ = ("first", "lengths", "repeats", "rows", "sample_id", "seen")

    def __init__(self, sample_id: object) -> None:
        self.sample_id = sample_id
        self.rows = 0
        self.repeats = False
        self.first = b""
        self.seen: set[int] = set()
        self.lengths: dict[object, int] = {}


def length_bins(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Lower edge of each length's bin."""
    widths = length_bin_width(lengths)
    return lengths // widths * widths


def length_bin_width(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Width of the bin of each length (tokens)."""
    doublings = np.frexp(np.maximum(lengths, 1) / EXACT_LENGTHS)[1]
    return np.left_shift(np.int64(1), np.maximum(doublings, 0).astype(np.int64))


def logprob_bins(logprobs: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:  # Any: its precision
    """Lower edge of each finite logprob's bin, in 64ths of a nat."""
    edges = np.floor(logprobs.astype(np.float64) * LOGPROB_BINS_PER_NAT)
    return np.clip(edges, LOWEST_LOGPROB_BIN, -1).astype(np.int64)


def _count(counts: dict[int, int], edges: npt.NDArray[np.int64]) -> None:
    for edge, count in collections.Counter(edges.tolist()).items():
        _count_one(counts, edge, count)


def _count_one(counts: dict[Any, int], key: int | str, count: int = 1) -> None:  # Any: int or str
    counts[key] = counts.get(key, 0) + count


def _facts_of(text: str | None) -> _Facts | None:
    if text is None:
        return None
    try:
        return _FACTS.decode(text)
    except msgspec.DecodeError:
        pass
    try:  # what msgspec refuses and JSON allows: lone surrogates as escapes
        return msgspec.convert(json.loads(text), _Facts)
    except (ValueError, msgspec.ValidationError):  # found and told by `check_recording`, or another program's
        return None


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE)
    return one == other
