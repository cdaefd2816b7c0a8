"""A recording scored again: every sampled logprob against what it should be, and every row against its own rules."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from managed_cli.scoring.diagnosis import DIAGNOSES, Diagnosis, Examined, diagnose, structural_diagnosis
from managed_cli.scoring.faults import FAULT_KINDS, Fault, find_faults
from managed_cli.scoring.processing import Processing, find_processing
from managed_cli.scoring.rows import Row, RowChoice, windows
from managed_cli.scoring.scorers import Score, Scorer
from managed_cli.scoring.statistics import Differences, Ratios
from managed_cli.storage.reader import Recording
from managed_cli.types import Tokenizer

DEFAULT_TOLERANCE = 5e-4
"""Nats. vLLM in float32 on a CPU lies within 8e-5 of another float32 forward pass; alignment faults lie above 1e-2."""

PLACES_KEPT = 5
"""First places remembered per kind of fault or diagnosis."""

CONTEXT_TOKENS = 12
"""Tokens shown on either side of a worst one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """What was found of one row.

    Attributes:
        compared: sampled positions that were compared.
        max_difference, mean_difference: absolute, nats; None where nothing was compared.
        log_ratio: sum of expected - recorded, nats: the logarithm of the row's importance ratio.
        not_compared: in words why it was not; None where it was.
    """

    row: int
    sample_id: str
    choice_index: int
    compared: int = 0
    max_difference: float | None = None
    mean_difference: float | None = None
    worst_position: int | None = None
    log_ratio: float | None = None
    faults: tuple[Fault, ...] = ()
    diagnosis: Diagnosis | None = None
    not_compared: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """The token of a row that differs most, in its text.

    Attributes:
        difference: expected - recorded, nats.
    """

    row: int
    sample_id: str
    choice_index: int
    position: int
    token: int
    recorded: float
    expected: float
    difference: float
    before: str
    text: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fault or a pattern was found."""

    row: int
    sample_id: str
    choice_index: int
    detail: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Finding:
    """All rows with one kind of fault or diagnosis: how many, and the first of them."""

    kind: str
    meaning: str
    rows: int = 0
    places: list[Place] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What was found of all rows that were looked at.

    Attributes:
        rows: rows looked at.
        compared_rows: rows of which at least one position was compared.
        unscored: sampled positions that were not: on a filter's edge, or at the end of a full context.
        beyond_rows, beyond_positions: with a difference above `tolerance`.
        unexplained: rows above `tolerance` whose pattern has no name.
        not_compared: reason → rows.
        worst: the worst token of each of the rows that differ most, most first.
    """

    tolerance: float
    rows: int = 0
    compared_rows: int = 0
    unscored: int = 0
    beyond_rows: int = 0
    beyond_positions: int = 0
    unexplained: int = 0
    differences: Differences = dataclasses.field(default_factory=Differences)
    token_ratios: Ratios = dataclasses.field(default_factory=Ratios)
    sequence_ratios: Ratios = dataclasses.field(default_factory=Ratios)
    not_compared: dict[str, int] = dataclasses.field(default_factory=dict)
    faults: dict[str, Finding] = dataclasses.field(default_factory=dict)
    diagnoses: dict[str, Finding] = dataclasses.field(default_factory=dict)
    worst: list[WorstToken] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared, all of it is what it should be, and no row has a fault."""
        return self.compared_rows > 0 and not self.faults and not self.beyond_rows


class Verifier:
    """Looks at the rows of a recording, window by window.

    Args:
        worst: how many of the rows that differ most are kept with their worst token.
        tell_row: given the report of every row, in order.
        tell_done: given how many rows are finished, whenever some are.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        tolerance: float = DEFAULT_TOLERANCE,
        worst: int = 5,
        tell_row: Callable[[RowReport], None] = lambda _: None,
        tell_done: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.report = VerifyReport(tolerance=tolerance)
        self._scorer = scorer
        self._worst_kept = worst
        self._tell_row = tell_row
        self._tell_done = tell_done
        self._worst: list[tuple[float, int, Examined]] = []

    async def run(self, recording: Recording, choice: RowChoice) -> VerifyReport:
        """The report on the chosen rows; memory is one window of them.

        Raises:
            OutputError: a file is damaged or has gone.
            ServerError: the scorer is a server, and cannot be reached or breaks its contract.
        """
        for window in windows(recording, choice):
            await self._add(window)
        ordered = sorted(self._worst, key=lambda entry: (-entry[0], entry[1]))
        self.report.worst = [_worst_token(examined, self._scorer.tokenizer) for _, _, examined in ordered]
        return self.report

    async def _add(self, window: Sequence[Row]) -> None:
        tokenizer, vocab_size = self._scorer.tokenizer, self._scorer.vocab_size
        faults = {row.number: find_faults(row, tokenizer, vocab_size) for row in window}
        reasons, asked = self._comparable(window, faults)
        self._tell_done(len(reasons))
        scores = await self._scorer.score(asked, self._tell_done)
        examined = {}
        for (row, _), score in zip(asked, scores, strict=True):
            if isinstance(score, Score):
                examined[row.number] = Examined(row, score)
            else:
                reasons[row.number] = score
        for row in window:
            found = examined.get(row.number)
            if found is None or not len(found.positions):
                self._count(self._uncompared(row, faults[row.number], reasons.get(row.number)))
            else:
                self._count(self._compared(found, list(examined.values()), faults[row.number]))

    def _comparable(
        self, window: Sequence[Row], faults: dict[int, list[Fault]]
    ) -> tuple[dict[int, str], list[tuple[Row, Processing]]]:
        """Row number → why it cannot be compared; and what is to be scored, how processed."""
        reasons: dict[int, str] = {}
        asked = []
        for row in window:
            processing = find_processing(row.metadata)
            kinds = {fault.kind for fault in faults[row.number]}
            if not row.is_whole:
                reasons[row.number] = "its arrays do not fit together"
            elif "outside_vocabulary" in kinds:
                reasons[row.number] = "it holds ids that the model does not have"
            elif not len(row.sampled):
                reasons[row.number] = "nothing is sampled in it"
            elif isinstance(processing, str):
                reasons[row.number] = processing
            elif (refusal := self._scorer.refusal(processing)) is not None:
                reasons[row.number] = refusal
            else:
                asked.append((row, processing))
        return reasons, asked

    def _uncompared(self, row: Row, faults: Sequence[Fault], reason: str | None) -> RowReport:
        return RowReport(
            row=row.number,
            sample_id=row.sample_id,
            choice_index=row.choice_index,
            faults=tuple(faults),
            diagnosis=structural_diagnosis(row, faults) if faults else None,
            not_compared=reason or "none of its sampled positions could be scored",
        )

    def _compared(self, found: Examined, window: Sequence[Examined], faults: Sequence[Fault]) -> RowReport:
        report, row, tolerance = self.report, found.row, self.report.tolerance
        absolute = np.abs(found.differences)
        beyond = int(np.count_nonzero(~(absolute <= tolerance)))
        diagnosis = structural_diagnosis(row, faults) if faults else None
        if beyond:
            diagnosis = diagnose(found, window, faults, self._scorer.tokenizer, tolerance)
            report.beyond_rows += 1
            report.beyond_positions += beyond
            report.unexplained += diagnosis is None
        report.compared_rows += 1
        report.unscored += len(row.sampled) - len(found.positions)
        report.differences.add(found.differences)
        report.token_ratios.add(found.differences)
        log_ratio = float(found.differences.sum())
        report.sequence_ratios.add(np.array([log_ratio]))
        self._keep_worst(found.largest, found)
        return RowReport(
            row=row.number,
            sample_id=row.sample_id,
            choice_index=row.choice_index,
            compared=len(found.positions),
            max_difference=found.largest,
            mean_difference=float(absolute.mean()),
            worst_position=int(found.positions[found.worst]),
            log_ratio=log_ratio,
            faults=tuple(faults),
            diagnosis=diagnosis,
        )

    def _keep_worst(self, difference: float, found: Examined) -> None:
        if self._worst_kept:
            push = heapq.heappush if len(self._worst) < self._worst_kept else heapq.heappushpop
            push(self._worst, (difference, -found.row.number, found))

    def _count(self, row: RowReport) -> None:
        report = self.report
        report.rows += 1
        if row.not_compared is not None:
            report.not_compared[row.not_compared] = report.not_compared.get(row.not_compared, 0) + 1
        _note(report.faults, row, ((fault.kind, FAULT_KINDS[fault.kind], fault.detail) for fault in row.faults))
        if row.diagnosis is not None:
            kind = row.diagnosis.kind
            _note(report.diagnoses, row, [(kind, DIAGNOSES[kind], row.diagnosis.detail)])
        self._tell_row(row)


def _note(findings: dict[str, Finding], row: RowReport, found: Iterable[tuple[str, str, str]]) -> None:
    for kind, meaning, detail in found:
        finding = findings.setdefault(kind, Finding(kind=kind, meaning=meaning))
        finding.rows += 1
        if len(finding.places) < PLACES_KEPT:
            place = Place(row=row.row, sample_id=row.sample_id, choice_index=row.choice_index, detail=detail)
            finding.places.append(place)


def _worst_token(found: Examined, tokenizer: Tokenizer) -> WorstToken:
    row, index = found.row, found.worst
    position = int(found.positions[index])
    ids = row.tokens.tolist()
    return WorstToken(
        row=row.number,
        sample_id=row.sample_id,
        choice_index=row.choice_index,
        position=position,
        token=ids[position],
        recorded=float(found.recorded[index]),
        expected=float(found.expected[index]),
        difference=float(found.differences[index]),
        before=tokenizer.decode(ids[max(0, position - CONTEXT_TOKENS) : position]),
        text=tokenizer.decode(ids[position : position + 1]),
        after=tokenizer.decode(ids[position + 1 : position + 1 + CONTEXT_TOKENS]),
    )
