"""A recording as a whole: its counts and run, its first rows, and what a check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from managed_cli.cli.figures import Figures
from managed_cli.cli.figures_view import repeats_in_words, show_figures, spread_in_words, truncation_in_words
from managed_cli.cli.page import LABEL_WIDTH, Page, counted, excerpt, visible
from managed_cli.cli.tokens_view import in_words, metadata_of
from managed_cli.storage.footer import Session
from managed_cli.storage.reader import Recording, RecordingState

if TYPE_CHECKING:  # numpy, which only `--check` needs
    from managed_cli.storage.check import Breach, CheckReport, Place

BYTES_PER_UNIT = 1000
"""Sizes as disks and `ls --si` count them."""

SESSIONS_SHOWN = 8
"""Starts of a run whose rows are told; all of them stand in the file."""


def show_title(page: Page, recording: Recording, *, row: int | None = None) -> None:
    """Which recording (or row of it) this is, whether it is finished, and what to know about the choice of path."""
    files = counted(len(recording.files), "file")
    size = f"{counted(recording.rows, 'row')} in {files}, {size_in_words(recording.bytes_on_disk)}"
    subject = visible(str(recording.path))
    page.line(f"{subject}: {size}" if row is None else f"{subject}: row {row:,} of {size}", style="bold")
    state = state_in_words(recording)
    for sentence in (state, recording.note):
        if sentence:
            page.line(visible(sentence), style="yellow")


def state_in_words(recording: Recording) -> str | None:
    """What a person should know of an output that is not finished; None of one that is."""
    if recording.state is RecordingState.GROWING:
        return f"still growing: {recording.writer} writes it"
    if recording.state is RecordingState.UNFINISHED:
        return "not finished: its writer has ended, what it wrote is whole"
    return None


def show_summary(page: Page, recording: Recording, figures: Figures, *, filters: Sequence[str] = ()) -> None:
    """The counts of the rows, how they are spread, and the facts of the run."""
    show_title(page, recording)
    if figures.selected:
        share = f"{figures.rows:,} of {counted(recording.rows, 'row')} ({figures.rows / max(1, recording.rows):.1%})"
        page.line(visible(f"{share} where {' and '.join(filters)}; list them with `--head 20`"), style="yellow")
    page.line()
    page.facts(counts_in_words(recording, figures))
    show_figures(page, figures)
    if recording.run_facts and not figures.selected:
        page.heading("run")
        page.facts([(key.replace("_", " "), in_words(value)) for key, value in recording.run_facts.items()])


def counts_in_words(recording: Recording, figures: Figures) -> list[tuple[str, str]]:
    """Label and value of all that is counted."""
    summary = figures.summary
    rows = max(1, summary.rows)
    mean = summary.mean_logprob()
    facts = [
        ("samples", f"{summary.samples:,}"),
        ("prompt", f"{summary.prompt_tokens:,} tokens, {summary.prompt_tokens / rows:,.1f} a row"),
        ("sampled", f"{summary.completion_tokens:,} tokens, {summary.completion_tokens / rows:,.1f} a row"),
        ("finish reasons", _shares(summary.finish_reasons, summary.rows) or "none"),
        ("truncated", truncation_in_words(summary.finish_reasons, summary.rows)),
        ("mean logprob", "none: nothing was sampled" if mean is None else f"{mean:.4f} per sampled token"),
        ("repeats", repeats_in_words(figures)),
    ]
    if (spread := spread_in_words(figures)) is not None:
        facts.append(("sampled figures", spread))
    sessions = recording.sessions()
    if len(sessions) > 1 and not figures.selected:
        facts.append(("sessions", f"{len(sessions):,}: {_rows_of(sessions)}"))
    if summary.fork_reasons:
        facts.append(("new nodes", _shares(summary.fork_reasons, summary.rows)))
    if summary.nonfinite_rows:
        facts.append(("not finite", f"{counted(summary.nonfinite_rows, 'row')} with a -inf logprob, not in the mean"))
    if summary.dummy_rows:
        facts.append(("dummy tokens", f"{counted(summary.dummy_rows, 'row')} of placeholders, not tokens of a model"))
    if recording.failures_path is not None and not figures.selected:
        facts.append(
            ("failed", f"{counted(recording.failed_samples(), 'sample')}, listed in {recording.failures_path}")
        )
    return facts


def _rows_of(sessions: Sequence[Session]) -> str:
    """`120, 80, 40 rows`; of a run that was resumed often, the first sessions."""
    shown = ", ".join(f"{session.rows:,}" for session in sessions[:SESSIONS_SHOWN])
    return f"{shown}{', …' if len(sessions) > SESSIONS_SHOWN else ''} rows"


def _shares(counts: Mapping[str, int], total: int) -> str:
    """Most frequent first: `stop 900 (90.0%), length 100 (10.0%)`."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{reason} {count:,} ({count / max(1, total):.1%})" for reason, count in ordered)


def size_in_words(size: int) -> str:
    """`3.4 MB` of a number of bytes."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < BYTES_PER_UNIT:
            break
        value, unit = value / BYTES_PER_UNIT, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def show_rows(
    page: Page,
    recording: Recording,
    rows: Mapping[int, Mapping[str, Any]],  # Any: columns' values
    *,
    matching: int,
) -> None:
    """Two lines a row: its numbers, and how its text ends.

    Args:
        rows: number → row, in the order to show them.
        matching: how many rows there are of the kind, those shown included.
    """
    show_title(page, recording)
    page.line()
    number_width = len(str(max(rows, default=0)))
    sample_width = min(40, max((len(visible(str(row["sample_id"]))) for row in rows.values()), default=0))
    for number, row in rows.items():
        mean = f"{row['mean_logprob']:.3f}" if row["mean_logprob"] is not None else "none"
        line = Text(f"{number:>{number_width}}  ").append(
            f"{visible(str(row['sample_id'])):<{sample_width}}", style="bold"
        )
        line.append(f"  choice {row['choice_index']}  {row['prompt_length']}+{row['completion_length']} tokens")
        line.append(f"  {visible(str(row['finish_reason']))}  mean logprob {mean}")
        page.line(line)
        indent = " " * (number_width + 2)
        page.line(Text(indent + excerpt(last_text(row), page.excerpt_width - len(indent)), style="dim"))
    if not matching:
        page.line("no row passes the filter", style="dim")
    if len(rows) < matching:
        page.line("\n" + counted(matching - len(rows), "more row"), style="dim")


def last_text(row: Mapping[str, Any]) -> str:  # Any: columns' values
    """What was sampled last as a person reads it; else the end of the whole text."""
    turns = metadata_of(row).get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and isinstance(turns[-1].get("text"), str):
        return str(turns[-1]["text"])
    return str(row["full_text"] or "")[-200:]


def show_check(page: Page, recording: Recording, report: CheckReport) -> None:
    """That every rule holds, or each kind of breach with its count and first places."""
    show_title(page, recording)
    page.line()
    if report.ok:
        page.line(
            Text("ok: ", style="bold green").append(
                f"{counted(report.rows, 'row')} and {counted(report.tokens, 'token')} obey every rule",
                style="not bold default",
            )
        )
        return
    for breach in report.breaches.values():
        many = " or more" if breach.kind == "unreadable" else ""
        page.line(
            Text(f"{breach.kind:<{LABEL_WIDTH}}", style="bold red").append(
                f"{breach.count:,}{many}  {breach.meaning}", style="not bold default"
            )
        )
        page.line(f"{'':{LABEL_WIDTH}}{_places(breach, recording)}", style="dim")


def _places(breach: Breach, recording: Recording) -> str:
    shown = ", ".join(_place(place, recording) for place in breach.places)
    return visible(shown) + (", …" if breach.count > len(breach.places) else "")


def _place(place: Place, recording: Recording) -> str:
    if place.row is None:
        return place.file.name
    if len(recording.files) == 1:
        return f"row {place.row}"
    return f"row {place.row} ({place.file.name}:{place.row_in_file})"
