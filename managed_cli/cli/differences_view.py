"""Two recordings compared, on a terminal: the counts, then pairs of rows from where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from managed_cli.cli.differences import Comparison, Pair, first_difference, is_in_prompt
from managed_cli.cli.page import Page, counted, excerpt, visible
from managed_cli.cli.recording_view import last_text, show_title
from managed_cli.storage.reader import Recording

Row = dict[str, Any]  # Any: the columns' values

CONTEXT = 16
"""Characters shown before those in which two texts first differ."""


def show_comparison(
    page: Page,
    recordings: tuple[Recording, Recording],
    comparison: Comparison,
    shown: Sequence[tuple[Pair, Row, Row]],
) -> None:
    """The counts, then the pairs `shown` with both their rows."""
    for letter, recording in zip("AB", recordings, strict=True):
        page.line(f"{letter}:", style="bold")
        show_title(page, recording)
    page.line()
    page.facts(_facts(comparison))
    if shown:
        page.heading(f"the first {len(shown)} of {counted(len(comparison.different), 'pair')} that differ")
    for pair, one, other in shown:
        _show_pair(page, pair, one, other)


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    same = comparison.pairs - len(comparison.different)
    facts = [
        ("pairs", f"{comparison.pairs:,} by sample and choice: {same:,} the same, {len(comparison.different):,} not")
    ]
    for name, count, first in (
        ("only in A", comparison.only_in_one, comparison.first_only),
        ("only in B", comparison.only_in_other, comparison.first_other),
    ):
        if count:
            facts.append((name, f"{counted(count, 'row')}, the first of {first}"))
    if comparison.different:
        facts.append(
            ("what differs", ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in comparison.counts().items()))
        )
        facts.append(
            ("tokens, A to B", _change([(pair.one.length, pair.other.length) for pair in comparison.different]))
        )
        means = [
            (pair.one.mean_logprob, pair.other.mean_logprob)
            for pair in comparison.different
            if pair.one.mean_logprob is not None and pair.other.mean_logprob is not None
        ]
        if means:
            facts.append(("mean logprob", _change(means, digits=4)))
    if changes := comparison.finish_changes():
        ordered = sorted(changes.items(), key=lambda entry: (-entry[1], entry[0]))
        facts.append(("finish reasons", ", ".join(f"{name} {count:,}" for name, count in ordered)))
    return facts


def _change(values: Sequence[tuple[float, float]], *, digits: int = 1) -> str:
    """The means of both sides over the pairs that differ, and their difference."""
    one, other = (sum(side) / len(values) for side in zip(*values, strict=True))
    return f"{one:,.{digits}f} to {other:,.{digits}f} ({other - one:+,.{digits}f}) on average, where pairs differ"


def _show_pair(page: Page, pair: Pair, one: Row, other: Row) -> None:
    page.line()
    page.line(Text(visible(pair.sample_id), style="bold").append(f"  choice {pair.choice_index}", style="not bold"))
    page.line(f"   differs in {', '.join(pair.differs).replace('_', ' ')}")
    position = first_difference(one, other)
    if position is not None:
        where = "in the prompt" if is_in_prompt(one, position) and is_in_prompt(other, position) else "sampled"
        page.line(
            f"   first differing token at {position:,} ({where}): {_token(one, position)}, {_token(other, position)}"
        )
    texts = last_text(one), last_text(other)
    begin = max(0, _common_length(*texts) - CONTEXT)
    for letter, row, text in zip("AB", (pair.one, pair.other), texts, strict=True):
        mean = "none" if row.mean_logprob is None else f"{row.mean_logprob:.4f}"
        numbers = f" {letter} row {row.row:,}: {row.length:,} tokens, {row.finish_reason}, mean logprob {mean}"
        page.line(visible(numbers))
        part = ("…" if begin else "") + text[begin:]
        page.line(Text("   " + excerpt(part, page.excerpt_width - 3), style="dim"))


def _common_length(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _token(row: Mapping[str, Any], position: int) -> str:  # Any: columns' values
    return str(row["tokens"][position]) if position < len(row["tokens"]) else "the end"


def comparison_json(
    comparison: Comparison, shown: Sequence[tuple[Pair, Row, Row]]
) -> dict[str, Any]:  # Any: JSON values
    """The same for a script."""
    return {
        "pairs": comparison.pairs,
        "same": comparison.pairs - len(comparison.different),
        "different": len(comparison.different),
        "only_in_a": comparison.only_in_one,
        "only_in_b": comparison.only_in_other,
        "differs": comparison.counts(),
        "finish_changes": comparison.finish_changes(),
        "shown": [
            {
                "sample_id": pair.sample_id,
                "choice_index": pair.choice_index,
                "differs": list(pair.differs),
                "first_differing_position": first_difference(one, other),
                "a": _side_json(pair.one.row, one),
                "b": _side_json(pair.other.row, other),
            }
            for pair, one, other in shown
        ],
    }


def _side_json(number: int, row: Row) -> dict[str, Any]:  # Any: JSON values
    names = ("node_id", "completion_length", "finish_reason", "mean_logprob", "full_text")
    return {"row": number, **{name: row[name] for name in names}}
