"""The figures of a recording on a terminal: histograms as bars, and tables by turn and by server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from managed_cli.cli.figures import Bin, Figures, length_bins, logprob_bins, probability_bins
from managed_cli.cli.page import LABEL_WIDTH, Page, counted, fitted, visible
from managed_cli.storage.shares import Share

WIDE = 120
"""Cells from which on two histograms stand side by side."""

PIPED_WIDTH = 80
"""Cells of a histogram where no terminal bounds it."""

LONGEST_BAR = 48
"""Cells: longer bars are no easier to compare."""

TURNS_SHOWN = 12

EIGHTHS = " ▏▎▍▌▋▊▉"
FULL = "█"
PLAIN = "#"
"""Of a bar where the encoding has no blocks."""


def repeats_in_words(figures: Figures) -> str:
    """How many rows are copies of another choice of their sample."""
    statistics = figures.statistics
    if not statistics.samples_of_several:
        return "no sample has several rows"
    if not statistics.repeated_rows:
        return f"none among the rows of {counted(statistics.samples_of_several, 'sample')}"
    rows = counted(statistics.repeated_rows, "row")
    return f"{rows} of {counted(statistics.samples_with_repeats, 'sample')}: the very tokens of an earlier choice"


def spread_in_words(figures: Figures) -> str | None:
    """What the histograms were counted from, where that is not every row."""
    if figures.exact:
        return None
    why = "the filter chose more than are read" if figures.selected else "the footers keep no statistics"
    return f"repeats, histograms, turns and servers are of {figures.rows_counted:,} of {figures.rows:,} rows: {why}"


def show_figures(page: Page, figures: Figures) -> None:
    """Histograms, then a table by turn and one by server where there are several."""
    width = page.width or PIPED_WIDTH
    together = width >= WIDE
    room = (width - 4) // 2 if together else width
    statistics = figures.statistics
    blocks = [
        _histogram(page, title, bins, room)
        for title, bins in (
            ("sampled tokens per row", length_bins(statistics.completion_lengths)),
            ("mean logprob per row", logprob_bins(statistics.mean_logprobs)),
            ("probability of sampled tokens", probability_bins(statistics.token_probabilities)),
            ("masked (prompt) tokens per row", length_bins(statistics.prompt_lengths)),
        )
        if bins
    ]
    step = 2 if together else 1
    for first in range(0, len(blocks), step):
        page.line()
        for line in _side_by_side(blocks[first : first + step], room):
            page.line(line)
    if len(statistics.by_turn) > 1:
        turns = sorted(statistics.by_turn.items())
        shown = [(f"{number}", share) for number, share in turns[:TURNS_SHOWN]]
        _show_table(page, "turn", "completions", shown)
        if len(turns) > TURNS_SHOWN:
            page.line(f"{'…':<{LABEL_WIDTH}}{counted(len(turns) - TURNS_SHOWN, 'more turn')}", style="dim")
    if len(statistics.by_server) > 1:
        _show_table(page, "server", "rows", sorted(statistics.by_server.items()))


def _histogram(page: Page, title: str, bins: Sequence[Bin], width: int) -> list[Text]:
    """A title, then a line a bar: what it holds, how many, its length."""
    total, most = sum(bin.count for bin in bins), max(bin.count for bin in bins)
    label_width = max(max(cell_len(bin.label) for bin in bins), LABEL_WIDTH - 2)
    count_width = len(f"{most:,}")
    longest = max(8, min(LONGEST_BAR, width - label_width - count_width - 11))
    lines = [Text(title, style="bold")]
    blocks = page.can_show(FULL + EIGHTHS)
    for bin in bins:
        line = Text(f"{bin.label:<{label_width}}  ", style="dim").append(
            f"{bin.count:>{count_width},}", style="not dim"
        )
        line.append(f" {bin.count / total:>6.1%}  ")
        lines.append(line.append(_bar(bin.count / most * longest, blocks=blocks), style="not dim cyan"))
    return lines


def _bar(cells: float, *, blocks: bool) -> str:
    """A bar of that length; whatever is not 0 is seen."""
    if not blocks:
        return PLAIN * (max(1, round(cells)) if cells else 0)
    eighths = max(1, round(cells * 8)) if cells else 0
    return FULL * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _side_by_side(blocks: Sequence[Sequence[Text]], width: int) -> Iterable[Text]:
    for number in range(max(len(block) for block in blocks)):
        line = Text()
        for place, block in enumerate(blocks):
            part = block[number] if number < len(block) else Text()
            line.append(" " * (place * (width + 4) - cell_len(line.plain))).append_text(part)
        yield line


def _show_table(page: Page, name: str, of_what: str, shares: Sequence[tuple[str, Share]]) -> None:
    page.line()
    labels = [visible(label) for label, _ in shares]
    room = max(LABEL_WIDTH, (page.width or PIPED_WIDTH * 2) - 56)
    width = min(room, max(LABEL_WIDTH, max(cell_len(label) for label in labels) + 2))
    page.line(
        Text(fitted(f"by {name}", width), style="bold").append(
            f"{of_what:>12}{'tokens each':>14}{'ended by length':>17}{'mean logprob':>14}", style="not bold dim"
        )
    )
    for label, (_, share) in zip(labels, shares, strict=True):
        mean = share.mean_logprob()
        count = max(1, share.count)
        line = Text(fitted(label, width), style="dim").append(f"{share.count:>12,}", style="not dim")
        line.append(f"{share.tokens / count:>14,.1f}{share.length_stops / count:>17.1%}", style="not dim")
        page.line(line.append(f"{'none' if mean is None else f'{mean:.4f}':>14}", style="not dim"))


def truncation_in_words(finish_reasons: Mapping[str, int], rows: int) -> str:
    """How many rows ended because of a limit on their length."""
    cut = finish_reasons.get("length", 0)
    return f"{counted(cut, 'row')} ({cut / max(1, rows):.1%}) ended by a limit on their length"
