"""Histograms and tables as HTML: a drawing for those who see it, and the same numbers as a table for everyone."""

from __future__ import annotations

import html
from collections.abc import Sequence

from managed_cli.cli.figures import Bin, Figures, length_bins, logprob_bins, probability_bins
from managed_cli.cli.page import visible
from managed_cli.storage.shares import Share

WIDTH, BAR_HEIGHT = 360, 22
"""Of a drawing, in its own units: about pixels."""

DIGIT_WIDTH = 7.2
"""Of a character of its 12 unit font, on the generous side."""

SHARE_WIDTH = 58
"""Of the percentage behind a count."""

LONGEST_LABEL = 20
"""Characters; the table has what is cut."""


def escaped(text: object) -> str:
    """`text` as HTML shows it: nothing in it is markup, no character in it hides or reorders others."""
    return html.escape(visible(str(text)), quote=True)


def plots_html(figures: Figures) -> str:
    """All drawings."""
    statistics, summary = figures.statistics, figures.summary
    reasons = sorted(summary.finish_reasons.items(), key=lambda entry: (-entry[1], entry[0]))
    drawings = [
        ("Finish reason", "rows", [Bin(None, None, count, visible(reason)) for reason, count in reasons[:12]]),
        ("Sampled tokens per row", "rows", length_bins(statistics.completion_lengths)),
        ("Mean logprob per row", "rows", logprob_bins(statistics.mean_logprobs)),
        ("Probability of sampled tokens", "tokens", probability_bins(statistics.token_probabilities)),
        ("Masked (prompt) tokens per row", "rows", length_bins(statistics.prompt_lengths)),
    ]
    return "\n".join(_plot(index, title, unit, bins) for index, (title, unit, bins) in enumerate(drawings) if bins)


def _plot(index: int, title: str, unit: str, bins: Sequence[Bin]) -> str:
    most, total = max(bin.count for bin in bins), max(1, sum(bin.count for bin in bins))
    labels = [bin.label if len(bin.label) <= LONGEST_LABEL else bin.label[: LONGEST_LABEL - 1] + "…" for bin in bins]
    left = max(6, *(len(label) for label in labels)) * DIGIT_WIDTH + 10
    room = WIDTH - left - len(f"{most:,}") * DIGIT_WIDTH - SHARE_WIDTH
    bars = []
    for place, (bin, label) in enumerate(zip(bins, labels, strict=True)):
        y = place * BAR_HEIGHT
        length = max(1.5, bin.count / max(1, most) * room) if bin.count else 0
        bars.append(
            f'<text class="bin" x="{left - 8:.1f}" y="{y + 15}" text-anchor="end">{escaped(label)}</text>'
            f'<rect x="{left:.1f}" y="{y + 3}" width="{length:.1f}" height="{BAR_HEIGHT - 6}" rx="2"/>'
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{bin.count:,}'
            f'<tspan class="share" dx="6">{bin.count / total:.1%}</tspan></text>'
        )
    rows = "".join(
        f'<tr><th scope="row">{escaped(bin.label)}</th><td>{bin.count:,}</td><td>{bin.count / total:.1%}</td></tr>'
        for bin in bins
    )
    height = len(bins) * BAR_HEIGHT
    return (
        f'<figure class="plot"><figcaption id="plot{index}">{escaped(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="plot{index}" '
        f'aria-describedby="table{index}">{"".join(bars)}</svg>'
        f'<details><summary>As a table</summary><table id="table{index}"><caption>{escaped(title)}</caption>'
        f'<thead><tr><th scope="col">range</th><th scope="col">{unit}</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></details></figure>"
    )


def shares_html(name: str, of_what: str, shares: Sequence[tuple[str, Share]]) -> str:
    """The table by turn or by server; nothing where there is only one."""
    if len(shares) < 2:
        return ""
    rows = []
    for label, share in shares:
        mean, count = share.mean_logprob(), max(1, share.count)
        cells = (
            f"{share.count:,}",
            f"{share.tokens / count:,.1f}",
            f"{share.length_stops / count:.1%}",
            "none" if mean is None else f"{mean:.4f}",
        )
        rows.append(f'<tr><th scope="row">{escaped(label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in (name, of_what, "tokens each", "ended by length", "mean logprob")
    )
    return (
        f'<div class="scrolls" tabindex="0" role="group" aria-label="By {name}"><table class="shares">'
        f"<caption>By {name}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Label and value."""
    return "".join(f"<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd></div>" for label, value in facts)
