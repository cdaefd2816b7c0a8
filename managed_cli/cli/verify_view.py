"""What `verify` found, for a person and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from managed_cli.cli.page import LABEL_WIDTH, SAMPLED_BEGINS, SAMPLED_ENDS, Page, counted, quoted, visible
from managed_cli.cli.recording_view import show_title
from managed_cli.scoring.statistics import Ratios
from managed_cli.scoring.verify import Finding, RowReport, VerifyReport, WorstToken
from managed_cli.storage.reader import Recording

CONTEXT_CHARACTERS = 28
"""Characters of text shown on either side of a worst token."""


def show(page: Page, recording: Recording, scorer_name: str, report: VerifyReport) -> None:
    """The numbers, then what is wrong, then where it is worst."""
    show_title(page, recording)
    page.line(visible(f"scored by {scorer_name}"))
    page.line()
    page.facts(_numbers(report))
    _show_findings(page, "faults", report.faults)
    title = "what has happened, by the pattern of the differences"
    _show_findings(page, title, report.diagnoses, nameless=report.unexplained)
    if report.not_compared:
        page.heading("not compared")
        for reason, count in report.not_compared.items():
            page.line(visible(f"{counted(count, 'row')}: {reason}"))
    if report.beyond_rows and report.worst:
        page.heading(f"worst token of the rows that differ most, between {SAMPLED_BEGINS} and {SAMPLED_ENDS}")
        for worst in report.worst:
            if abs(worst.difference) > report.tolerance:
                _show_worst(page, worst)
    if report.ok:
        page.line()
        sentence = f"{counted(report.compared_rows, 'row')} and {counted(report.differences.count, 'logprob')} agree"
        page.line(Text("ok: ", style="bold green").append(sentence, style="not bold default"))


def _numbers(report: VerifyReport) -> list[tuple[str, str]]:
    mean = report.differences.mean
    facts = [
        ("rows", f"{report.compared_rows:,} of {report.rows:,} compared"),
        ("positions", f"{report.differences.count:,} compared" + _unscored(report)),
    ]
    if mean is not None:
        largest = report.differences.largest
        facts.append(("difference", f"at most {largest:.2g}, mean {mean:.2g} nats; tolerance {report.tolerance:g}"))
        if report.beyond_rows:
            beyond = f"{counted(report.beyond_positions, 'position')} of {counted(report.beyond_rows, 'row')}"
            facts.append(("beyond", beyond))
        facts.append(("ratio, tokens", _ratios(report.token_ratios)))
        facts.append(("ratio, rows", _ratios(report.sequence_ratios)))
    return facts


def _unscored(report: VerifyReport) -> str:
    return (
        f"; {report.unscored:,} more lie on a filter's edge or at the end of a full context" if report.unscored else ""
    )


def _ratios(ratios: Ratios) -> str:
    """Importance ratios exp(new - recorded); the effective sample size as a share of all."""
    values = (ratios.mean(), ratios.percentile(0.99), ratios.largest(), ratios.effective_share())
    mean, p99, largest, share = (0.0 if value is None else value for value in values)
    return f"mean {mean:.5g}, p99 {p99:.5g}, max {largest:.5g}, effective sample size {share:.1%}"


def _show_findings(page: Page, title: str, findings: Mapping[str, Finding], *, nameless: int = 0) -> None:
    """One block: each kind with its rows and the first of their places; and how many rows have no name for it."""
    facts: list[tuple[str, str]] = []
    for finding in findings.values():
        facts.append((finding.kind, f"{counted(finding.rows, 'row')}: {finding.meaning}"))
        for place in finding.places:
            facts.append(
                ("", f"row {place.row} (sample {place.sample_id}, choice {place.choice_index}): {place.detail}")
            )
        if finding.rows > len(finding.places):
            facts.append(("", "…"))
    if nameless:
        facts.append(("(no name)", f"{counted(nameless, 'row')}: differences without a pattern that is known"))
    if facts:
        page.heading(title)
        page.facts(facts)


def _show_worst(page: Page, worst: WorstToken) -> None:
    where = f"sample {worst.sample_id}, choice {worst.choice_index}, position {worst.position}"
    numbers = f"recorded {worst.recorded:.4f}, scored {worst.expected:.4f}, off by {worst.difference:+.2g}"
    page.facts([(f"row {worst.row}", f"{where}: {numbers}")])
    before = visible(worst.before[-CONTEXT_CHARACTERS:].replace("\n", "↵"))
    after = visible(worst.after[:CONTEXT_CHARACTERS].replace("\n", "↵"))
    text = Text(" " * LABEL_WIDTH).append(before, style="dim").append(SAMPLED_BEGINS, style="bold")
    shown = quoted(worst.text)[1:-1] if worst.text else f"id {worst.token}"
    page.line(text.append(shown, style="bold red").append(SAMPLED_ENDS, style="bold").append(after, style="dim"))


def document(recording: Recording, scorer_name: str, report: VerifyReport) -> dict[str, Any]:  # Any: JSON values
    """The report as one JSON object."""
    return {
        "path": str(recording.path),
        "state": str(recording.state),
        "rows": recording.rows,
        "scorer": scorer_name,
        "ok": report.ok,
        "tolerance": report.tolerance,
        "verified_rows": report.rows,
        "compared_rows": report.compared_rows,
        "compared_positions": report.differences.count,
        "unscored_positions": report.unscored,
        "max_difference": report.differences.largest if report.differences.count else None,
        "mean_difference": report.differences.mean,
        "beyond_tolerance": {"rows": report.beyond_rows, "positions": report.beyond_positions},
        "token_ratios": report.token_ratios.to_json(),
        "sequence_ratios": report.sequence_ratios.to_json(),
        "not_compared": report.not_compared,
        "faults": [dataclasses.asdict(finding) for finding in report.faults.values()],
        "diagnoses": [dataclasses.asdict(finding) for finding in report.diagnoses.values()],
        "undiagnosed_rows": report.unexplained,
        "worst": [dataclasses.asdict(worst) for worst in report.worst],
    }


def row_document(row: RowReport) -> dict[str, Any]:  # Any: JSON values
    """One row's report as a JSON object."""
    return {
        "row": row.row,
        "sample_id": row.sample_id,
        "choice_index": row.choice_index,
        "compared": row.compared,
        "max_difference": row.max_difference,
        "mean_difference": row.mean_difference,
        "worst_position": row.worst_position,
        "log_ratio": row.log_ratio,
        "faults": [dataclasses.asdict(fault) for fault in row.faults],
        "diagnosis": None if row.diagnosis is None else dataclasses.asdict(row.diagnosis),
        "not_compared": row.not_compared,
    }
