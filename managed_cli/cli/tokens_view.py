"""One row, token by token: what was sent dim, what was sampled between marks and coloured by its probability."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from managed_cli.cli.page import SAMPLED_BEGINS, SAMPLED_ENDS, Page, excerpt, quoted, visible
from managed_cli.cli.token_texts import find_sampled_spans, find_token_texts
from managed_cli.types import IGNORED_TOKEN_ID

PROBABILITY_STYLES = ((0.9, "green"), (0.5, "yellow"), (0.1, "magenta"), (0.0, "bold red"))
"""Least probability of a sampled token → its colour."""

MASKED_SHOWN = (2, 2)
SAMPLED_SHOWN = (40, 10)
"""First and last tokens listed of a run of masked or sampled ones; `--tokens` lists them all."""

Row = Mapping[str, Any]  # Any: the columns' values


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLine:
    """One position; a value is None where its array is too short or holds a null."""

    position: int
    token: int | None
    mask: int | None
    logprob: float | None
    text: str | None

    @property
    def sampled(self) -> bool:
        """Whether the model sampled it."""
        return self.mask is not None and self.mask != IGNORED_TOKEN_ID

    @property
    def style(self) -> str:
        """Dim where masked; else the colour of its probability."""
        if not self.sampled:
            return "dim"
        probability = math.exp(min(self.logprob, 0.0)) if self.logprob is not None else 0.0
        return next((style for least, style in PROBABILITY_STYLES if probability >= least), "bold red")


def metadata_of(row: Row) -> dict[str, Any]:  # Any: free-form JSON values
    """The row's metadata; empty where it is not a JSON object."""
    try:
        value = json.loads(row["metadata"])
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def show_row(page: Page, row: Row, run_facts: Mapping[str, Any], *, every_token: bool) -> None:  # Any: JSON values
    """The row's facts, its text, its turns and its tokens."""
    metadata = metadata_of(row)
    tokens = row["tokens"] or []
    whole = all(token is not None for token in tokens)
    texts = find_token_texts(run_facts, tokens, row["full_text"] or "") if whole else None
    lines = _token_lines(row, texts)
    page.facts(_row_facts(row, metadata))
    _show_text(page, row, metadata, lines if texts is not None else None)
    _show_turns(page, metadata)
    _show_tokens(page, lines, every_token=every_token)


def _token_lines(row: Row, texts: Sequence[str] | None) -> list[TokenLine]:
    arrays = [row["tokens"] or [], row["masked_tokens"] or [], row["logprobs"] or [], texts or []]
    return [TokenLine(position, *values) for position, values in enumerate(itertools.zip_longest(*arrays))]


def _row_facts(row: Row, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:  # Any: free-form JSON values
    parent = row["parent_id"]
    mean = row["mean_logprob"]
    facts = [
        ("sample", str(row["sample_id"])),
        ("choice", str(row["choice_index"])),
        ("node", f"{row['node_id']}" + (f", continues {parent}" if parent is not None else "")),
        ("tokens", f"{row['prompt_length']} masked + {row['completion_length']} sampled"),
        ("finish reason", _ending(row["finish_reason"], metadata.get("stop_reason"))),
        ("mean logprob", "none: nothing was sampled" if mean is None else f"{mean:.4f} per sampled token"),
    ]
    # Shown above, below as turns, or made of the whole row.
    told = {"sample_id", "choice_index", "node_id", "parent_id", "finish_reason", "stop_reason", "turns", "messages"}
    facts += [(key.replace("_", " "), in_words(value)) for key, value in metadata.items() if key not in told]
    return facts


def _ending(finish_reason: object, stop_reason: object) -> str:
    if stop_reason is None:
        return str(finish_reason)
    named = quoted(stop_reason) if isinstance(stop_reason, str) else f"token {in_words(stop_reason)}"
    return f"{finish_reason} (stop reason: {named})"


def in_words(value: object) -> str:
    """A JSON value on one line: `name=value` of an object, entries of a list; what lies deeper as JSON."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={_deeper_in_words(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_deeper_in_words(entry) for entry in value) or "none"
    return _deeper_in_words(value)


def _deeper_in_words(value: object) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_text(page: Page, row: Row, metadata: Mapping[str, Any], lines: list[TokenLine] | None) -> None:  # Any: JSON
    full_text = row["full_text"] or ""
    marks = f"sampled between {SAMPLED_BEGINS} and {SAMPLED_ENDS}"
    if lines is not None:
        page.heading(f"text, {marks}")
        if page.coloured:
            page.line(_legend())
        page.line(_marked_tokens(lines))
        return
    spans = find_sampled_spans(metadata.get("turns"), full_text, len(row["tokens"] or []))
    if spans is None:
        page.heading("text (where it was sampled cannot be told without the tokenizer; see the tokens)")
        page.line(visible(full_text, keep_newlines=True))
        return
    page.heading(f"text, {marks} (special tokens at the edges stand outside)")
    page.line(_marked_spans(full_text, spans))


def _legend() -> Text:
    legend = Text("probability", style="dim")
    for least, style in PROBABILITY_STYLES:
        legend.append("  ").append(f"{least:.0%} and more" if least else "less", style=f"not dim {style}")
    return legend


def _marked_tokens(lines: Sequence[TokenLine]) -> Text:
    text = Text()
    for sampled, run in itertools.groupby(lines, key=lambda line: line.sampled):
        text.append(SAMPLED_BEGINS if sampled else "", style="bold")
        for line in run:
            text.append(visible(line.text or "", keep_newlines=True), style=line.style)
        text.append(SAMPLED_ENDS if sampled else "", style="bold")
    return text


def _marked_spans(full_text: str, spans: Sequence[tuple[int, int]]) -> Text:
    text, cursor = Text(), 0
    for start, end in spans:
        text.append(visible(full_text[cursor:start], keep_newlines=True), style="dim")
        text.append(SAMPLED_BEGINS, style="bold")
        text.append(visible(full_text[start:end], keep_newlines=True), style="green")
        text.append(SAMPLED_ENDS, style="bold")
        cursor = end
    return text.append(visible(full_text[cursor:], keep_newlines=True), style="dim")


def _show_turns(page: Page, metadata: Mapping[str, Any]) -> None:  # Any: free-form JSON values
    turns = [turn for turn in metadata.get("turns") or [] if isinstance(turn, dict)]
    if not turns:
        return
    page.heading("sampled turns")
    page.line(f"  {'positions':>13}  {'finish':<8}  text", style="dim")
    for turn in turns:
        start, end = turn.get("start"), turn.get("end")
        last = end - 1 if isinstance(end, int) else end
        positions = f"{in_words(start)}-{in_words(last)}"
        begin = visible(f"  {positions:>13}  {in_words(turn.get('finish_reason')):<8}  ")
        page.line(begin + excerpt(str(turn.get("text") or ""), page.excerpt_width - len(begin)))


def _show_tokens(page: Page, lines: Sequence[TokenLine], *, every_token: bool) -> None:
    page.heading("tokens" if every_token else "tokens (`--tokens` lists them all)")
    text_column = "  text" if any(line.text is not None for line in lines) else ""
    page.line(f"  {'position':>8}  {'id':>8}  {'logprob':>9}  {'p':>6}{text_column}", style="dim")
    for _, run in itertools.groupby(lines, key=lambda line: line.sampled):
        for shown in _elided(list(run), every_token=every_token):
            page.line(_token_text(shown, page) if isinstance(shown, TokenLine) else Text(shown, style="dim"))


def _elided(run: list[TokenLine], *, every_token: bool) -> Iterator[TokenLine | str]:
    """The lines of one run, its middle as one line in words."""
    first, last = SAMPLED_SHOWN if run[0].sampled else MASKED_SHOWN
    left_out = len(run) - first - last
    if every_token or left_out <= 1:
        yield from run
        return
    yield from run[:first]
    yield f"  {'…':>8}  {left_out} more {'sampled' if run[0].sampled else 'masked'}"
    yield from run[-last:]


def _token_text(line: TokenLine, page: Page) -> Text:
    token = "none" if line.token is None else str(line.token)
    text = Text(f"{'>' if line.sampled else ' '} {line.position:>8}  {token:>8}  ", style="" if line.sampled else "dim")
    if line.sampled and line.logprob is not None:
        text.append(f"{line.logprob:>9.4f}  {math.exp(min(line.logprob, 0.0)):>6.1%}", style=line.style)
    else:
        text.append(f"{'none' if line.sampled else 'masked':>9}  {'':>6}")
    if line.text is not None:
        shown = quoted(line.text) if line.text else "(part of the next)"
        text.append("  ").append(excerpt(shown, max(20, page.excerpt_width - len(text) - 2)), style=line.style)
    return text
