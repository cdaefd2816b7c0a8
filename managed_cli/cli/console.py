"""What people see on stderr: progress, and text of models made harmless."""

from __future__ import annotations

import asyncio
import sys
import unicodedata
from typing import Any

from managed_cli.rollout.events import Progress

LINE_SECONDS = 10.0
"""Between progress lines where stderr is not a terminal."""

BAR_SECONDS = 0.25
"""Between updates of the bar on a terminal."""


def printable(text: str) -> str:
    """`text` with every character that could move a cursor, hide or reorder text written as its escape."""
    return "".join(character if _harmless(character) else _escape(character) for character in text)


def _harmless(character: str) -> bool:
    return character in "\n\t " or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def progress_line(progress: Progress) -> str:
    """One line: samples done, failed, tokens per second, time left, and how long the oldest request has waited."""
    eta = progress.eta_seconds()
    parts = [
        f"{progress.done}/{progress.total} samples",
        f"{progress.failed} failed",
        f"{progress.tokens_per_second():.0f} tok/s",
        f"eta {duration(eta)}" if eta is not None else "eta -",
    ]
    oldest = progress.oldest_request_seconds()
    if oldest is not None:
        parts.append(f"oldest request {duration(oldest)}")
    return ", ".join(parts)


async def show_progress(progress: Progress) -> None:
    """Keep stderr informed until cancelled: a bar on a terminal, else a line every 10 s."""
    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(LINE_SECONDS)
            print(f"progress: {progress_line(progress)}", file=sys.stderr, flush=True)
    with _bar() as bar:
        task = bar.add_task("", total=progress.total, facts="")
        try:
            while True:
                bar.update(task, completed=progress.done, facts=progress_line(progress))
                await asyncio.sleep(BAR_SECONDS)
        finally:
            bar.update(task, completed=progress.done, facts=progress_line(progress))


def _bar() -> Any:  # Any: rich is imported only where there is a terminal
    from rich.console import Console
    from rich.progress import BarColumn, Progress as RichProgress, TextColumn

    return RichProgress(
        BarColumn(bar_width=20),
        TextColumn("{task.fields[facts]}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=1 / BAR_SECONDS,
        transient=True,
    )
