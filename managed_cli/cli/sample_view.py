"""All rows of one sample: its choices side by side, or as the tree that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from managed_cli.cli.page import Page, counted, excerpt, fitted, visible, wrapped
from managed_cli.cli.recording_view import last_text, show_title
from managed_cli.cli.token_texts import find_sampled_spans
from managed_cli.cli.tokens_view import metadata_of
from managed_cli.storage.reader import Recording
from managed_cli.tracking.messages import content_text

NARROWEST_COLUMN = 36
"""Cells of a choice beside others; narrower text is hard to read."""

PIPED_COLUMNS_WIDTH = 160
"""Cells for all choices together where no terminal bounds them."""

LONGEST_PROMPT = 600
"""Characters of the prompt that are shown: its end, which is what the choices answer."""

Row = Mapping[str, Any]  # Any: the columns' values


def show_sample(page: Page, recording: Recording, rows: Mapping[int, Row]) -> None:
    """The prompt, then every row: a tree where rows go on from others, else columns.

    Args:
        rows: number → row, of one sample.
    """
    first = next(iter(rows.values()))
    show_title(page, recording)
    page.line(visible(f"sample {first['sample_id']}: {counted(len(rows), 'row')}"), style="bold")
    prompt = _prompt_of(first)
    if prompt:
        page.heading("prompt" if len(prompt) <= LONGEST_PROMPT else f"prompt, its last {LONGEST_PROMPT} characters")
        page.line(Text(visible(prompt[-LONGEST_PROMPT:], keep_newlines=True), style="dim"))
    if children_of(rows):
        page.heading("tree: what each row goes on from")
        _show_tree(page, rows)
    else:
        page.line()
        _show_columns(page, rows)


def _prompt_of(row: Row) -> str | None:
    """All text before the first sampled turn; None where that cannot be told without the tokenizer."""
    text = row["full_text"] or ""
    spans = find_sampled_spans(metadata_of(row).get("turns"), text, len(row["tokens"] or []))
    return text[: spans[0][0]] if spans else None


def children_of(rows: Mapping[int, Row]) -> dict[int, list[int]]:
    """Number of a row → numbers of the rows that go on from it, where such rows are there."""
    by_node = {row["node_id"]: number for number, row in rows.items()}
    children: dict[int, list[int]] = {}
    for number, row in rows.items():
        parent = by_node.get(row["parent_id"]) if row["parent_id"] is not None else None
        if parent is not None and parent != number:
            children.setdefault(parent, []).append(number)
    return children


def _show_tree(page: Page, rows: Mapping[int, Row]) -> None:
    children = children_of(rows)
    below = {number for numbers in children.values() for number in numbers}
    lines = page.can_show("├─└│")
    roots = [number for number in rows if number not in below]
    # (row, what stands before it, what stands before its children); a stack, since a tree can be deep.
    waiting = [(number, "", "") for number in reversed(roots)]
    shown = set()
    while waiting:
        number, before, indent = waiting.pop()
        shown.add(number)
        row = rows[number]
        page.line(Text(before, style="dim").append_text(_numbers(number, row)))
        has_children = [child for child in children.get(number, []) if child not in shown]
        text_indent = indent + (("│ " if lines else "| ") if has_children else "  ")
        page.line(
            Text(text_indent, style="dim").append(
                excerpt(last_text(row), max(20, page.excerpt_width - cell_len(text_indent))), style="not dim"
            )
        )
        for place, child in reversed(list(enumerate(has_children))):
            is_last = place == len(has_children) - 1
            branch, trunk = (
                (("└─ ", "   ") if is_last else ("├─ ", "│  ")) if lines else ("+- ", "   " if is_last else "|  ")
            )
            waiting.append((child, indent + branch, indent + trunk))
    if len(shown) < len(rows):
        page.line(f"{counted(len(rows) - len(shown), 'row')} go on from each other in a circle", style="yellow")


def _numbers(number: int, row: Row) -> Text:
    mean = row["mean_logprob"]
    text = Text(visible(f"row {number:,}"), style="bold not dim").append(
        visible(f"  node {row['node_id']}  choice {row['choice_index']}  {row['completion_length']} sampled"),
        style="not bold",
    )
    ending = f"  {row['finish_reason']}  mean logprob {'none' if mean is None else f'{mean:.3f}'}"
    return text.append(visible(ending), style="not bold")


def _show_columns(page: Page, rows: Mapping[int, Row]) -> None:
    width = page.width or PIPED_COLUMNS_WIDTH
    abreast = max(1, min(len(rows), (width + 2) // (NARROWEST_COLUMN + 2)))
    room = (width - 2 * (abreast - 1)) // abreast
    entries = list(rows.items())
    first_with: dict[tuple[int, ...], int] = {}
    for number, row in entries:
        first_with.setdefault(tuple(row["tokens"] or []), number)
    for start in range(0, len(entries), abreast):
        columns = []
        for number, row in entries[start : start + abreast]:
            earlier = first_with[tuple(row["tokens"] or [])]
            columns.append(_column(number, row, room, same_as=earlier if earlier != number else None))
        for place in range(max(len(column) for column in columns)):
            line = Text()
            for index, column in enumerate(columns):
                text, style = column[place] if place < len(column) else ("", "")
                line.append(("  " if index else "") + fitted(text, room), style=style)
            line.rstrip()
            page.line(line)
        page.line()


def _column(number: int, row: Row, width: int, *, same_as: int | None) -> list[tuple[str, str]]:
    """The lines of one choice, each with its style."""
    mean = row["mean_logprob"]
    lines = [
        (visible(f"row {number:,}, choice {row['choice_index']}"), "bold"),
        (visible(f"{row['completion_length']} tokens, {row['finish_reason']}"), "dim"),
        (f"mean logprob {'none' if mean is None else f'{mean:.4f}'}", "dim"),
    ]
    if same_as is not None:
        return [*lines, (f"the very tokens of row {same_as:,}", "yellow")]
    turns = _turn_texts(row)
    asked = _asked_between(row, len(turns))
    for turn, text in enumerate(turns, start=1):
        if len(turns) > 1:
            lines.append((f"turn {turn}", "bold dim"))
        for message in asked[turn - 1]:
            lines += [(line, "dim") for line in wrapped(message, width)]
        lines += [(line, "") for line in wrapped(text, width)]
    return lines


def _asked_between(row: Row, turns: int) -> list[list[str]]:
    """For each turn, the messages that followed the answer before it, as `role: words`; the first turn's are the
    prompt, which stands above. Without recorded messages there are none."""
    sent = metadata_of(row).get("messages")
    asked: list[list[str]] = [[]]
    for message in sent if isinstance(sent, list) and turns > 1 else []:
        if not isinstance(message, dict):
            continue
        if message.get("role") == "assistant":
            asked.append([])
        else:
            asked[-1].append(f"{message.get('role')}: {content_text(message.get('content'))}")
    # Counted from the end: a chat may hold answers of its own before the first that was sampled.
    last = asked[-turns:]
    return [[], *last[1:]] if len(last) == turns else [[] for _ in range(turns)]


def _turn_texts(row: Row) -> Sequence[str]:
    turns = metadata_of(row).get("turns")
    if isinstance(turns, list):
        texts = [turn["text"] for turn in turns if isinstance(turn, dict) and isinstance(turn.get("text"), str)]
        if texts:
            return texts
    return [str(row["full_text"] or "")]
