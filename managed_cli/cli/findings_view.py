"""A checkup on a page: a line for each finding, what to do about it under it, and what it all means at the end."""

from __future__ import annotations

import textwrap

from rich.text import Text

from managed_cli.cli.page import Page, visible
from managed_cli.doctor.findings import Checkup, Finding, Level

STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.UNSAFE: "bold red", Level.UNKNOWN: "cyan"}

LEVEL_WIDTH, CHECK_WIDTH = 9, 19
"""Cells of the first two columns."""

NARROWEST = 30
"""Cells that a sentence gets at least, however narrow the terminal."""


def show_checkup(page: Page, checkup: Checkup) -> None:
    """Every finding in order, and the sum of them."""
    page.line(visible(checkup.subject), style="bold")
    page.line()
    for finding in checkup.findings:
        _show_finding(page, finding)
    page.line()
    counts = [f"{checkup.count(level)} {level}" for level in Level if checkup.count(level)]
    said, style = ("recording is safe", "bold green") if checkup.is_safe else ("recording is NOT safe", "bold red")
    page.line(Text(said, style=style).append(f": {', '.join(counts)}", style="not bold default"))


def _show_finding(page: Page, finding: Finding) -> None:
    """The sentence beside its level and check, and the advice under it."""
    indent = LEVEL_WIDTH + CHECK_WIDTH
    room = max(NARROWEST, page.width - indent) if page.width else 0
    line = Text(f"{finding.level:<{LEVEL_WIDTH}}", style=STYLES[finding.level])
    line.append(f"{visible(finding.check):<{CHECK_WIDTH}}", style="not bold default")
    line.append(_wrapped(visible(finding.said), room, indent), style="not bold default")
    if finding.advice is not None:
        line.append("\n" + " " * indent)
        line.append(_wrapped(visible(f"→ {finding.advice}"), room, indent), style="not bold dim")
    page.line(line)


def _wrapped(text: str, room: int, indent: int) -> str:
    """`text` in lines of `room` cells, all but the first behind `indent`; as it is where nothing bounds it."""
    if not room:
        return text
    return ("\n" + " " * indent).join(textwrap.wrap(text, room, break_on_hyphens=False) or [""])
