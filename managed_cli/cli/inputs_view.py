"""The text of `managed-cli inputs`."""

from __future__ import annotations

from rich.text import Text

from managed_cli.cli.page import Page, counted, excerpt, visible
from managed_cli.rollout.input_files import InputFiles
from managed_cli.rollout.refusals import MAX_BAD_LINES_SHOWN
from managed_cli.rollout.survey import KindSummary, Lengths, Survey

BAR_CELLS = 40
"""Cells of the longest bar: with the numbers beside it, it fits into 80."""

SHOWN_FIELDS = 8
"""Names of kept fields in a row of the table; a data set rarely has more."""

KIND_CELLS, COUNT_CELLS = 14, 9
"""Widths of the first columns: the longest kind is `openai-batch`."""


def show_survey(sheet: Page, files: InputFiles, survey: Survey, tokenizer: str | None) -> None:
    """Kinds of lines, lines that cannot be used, and the lengths where they were counted."""
    sheet.line(f"{visible(files.name)}: {counted(survey.samples, 'sample')}", style="bold")
    if survey.kinds:
        sheet.heading(f"{'kind':<{KIND_CELLS}}{'samples':>{COUNT_CELLS}}  first at, and other fields")
    for kind, summary in survey.kinds.items():
        _show_kind(sheet, kind, summary)
    if survey.bad_count:
        show_bad_lines(sheet, survey)
    if survey.lengths is not None:
        show_lengths(sheet, survey.lengths, tokenizer or "")


def _show_kind(sheet: Page, kind: str, summary: KindSummary) -> None:
    indent = " " * (KIND_CELLS + COUNT_CELLS + 2)
    sheet.line(f"{kind:<{KIND_CELLS}}{summary.count:>{COUNT_CELLS},}  {visible(summary.first)}")
    room = max(20, sheet.excerpt_width - len(indent))
    sheet.line(Text(indent + excerpt(summary.example, room), style="dim"))
    notes = [
        f"{counted(count, 'sample')} {what}"
        for count, what in (
            (summary.with_sampling, "with sampling of their own"),
            (summary.with_tools, "with tools"),
            (summary.continued, "whose last answer is continued"),
        )
        if count
    ]
    if summary.fields:
        notes.insert(0, f"kept: {_fields_in_words(summary)}")
    for note in notes:
        sheet.line(indent + note)


def _fields_in_words(summary: KindSummary) -> str:
    """Names of the kept fields; how many samples have one, where not all do."""
    common = summary.fields.most_common()
    words = [
        visible(name) + (f" ({count:,})" if count < summary.count else "") for name, count in common[:SHOWN_FIELDS]
    ]
    return ", ".join(words) + (f", and {len(common) - SHOWN_FIELDS} more" if len(common) > SHOWN_FIELDS else "")


def show_bad_lines(sheet: Page, survey: Survey) -> None:
    """How many lines cannot be used, and why, for the first of them."""
    sheet.heading(f"{counted(survey.bad_count, 'line')} cannot be used")
    shown = survey.bad_lines[:MAX_BAD_LINES_SHOWN]
    for bad in shown:
        sheet.line(f"  {visible(str(bad))}")
    if survey.bad_count > len(shown):
        sheet.line(f"  … and {survey.bad_count - len(shown):,} more")
    hint = next((bad.error.hint for bad in shown if bad.error.hint), None)
    if hint:
        sheet.line(f"  hint: {visible(hint)}")


def show_lengths(sheet: Page, lengths: Lengths, tokenizer: str) -> None:
    """How long the prompts are, and which leave no room for an answer."""
    sheet.heading(f"prompt tokens ({visible(tokenizer)})")
    if not lengths.samples:
        sheet.line("  none was counted")
        return
    marks = [("min", 0.0), ("median", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)]
    sheet.line("  " + ", ".join(f"{name} {lengths.quantile(share):,}" for name, share in marks))
    sheet.line(f"  {counted(lengths.total, 'token')} in {counted(lengths.samples, 'prompt')}")
    if lengths.first_turns:
        sheet.line(f"  of {counted(lengths.first_turns, 'conversation')} in turns only the first is counted")
    _show_histogram(sheet, lengths)
    if lengths.budget is not None:
        _show_room(sheet, lengths, lengths.budget)


def _show_room(sheet: Page, lengths: Lengths, budget: int) -> None:
    if lengths.sampling is not None and lengths.shortened:
        sheet.line(
            f"  {counted(lengths.shortened, 'prompt')} with room for a part of max_tokens only: "
            f"prompt + answer are at most {budget:,} tokens"
        )
    if not lengths.over_budget:
        sheet.line(f"  every prompt leaves room for an answer within {budget:,} tokens")
        return
    sheet.heading(f"{counted(lengths.over_budget, 'prompt')} without room for an answer in {budget:,} tokens")
    for prompt in lengths.first_over_budget:
        sheet.line(f"  {visible(prompt.source)}: {prompt.length:,} tokens (sample {visible(prompt.sample_id)})")
    if lengths.over_budget > len(lengths.first_over_budget):
        sheet.line(f"  … and {lengths.over_budget - len(lengths.first_over_budget):,} more")


def _show_histogram(sheet: Page, lengths: Lengths) -> None:
    bins = list(lengths.histogram())
    most, width = max(count for *_, count in bins), len(f"{bins[-1][1]:,}")
    for low, high, count in bins:
        bar = "█" * -(-count * BAR_CELLS // most)
        sheet.line(f"  {low:>{width},} – {high:>{width},}  {bar:<{BAR_CELLS}} {count:,}")
