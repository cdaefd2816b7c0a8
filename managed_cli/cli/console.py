"""What people see on stderr: messages, progress, and text of models made harmless."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import unicodedata
from typing import Any

from managed_cli.rollout.events import Progress

LINE_SECONDS = 10.0
"""Between progress lines where stderr is not a terminal."""

BAR_SECONDS = 0.25
"""Between updates of the bar on a terminal."""

BAR_WIDTH = 12
"""Cells of the bar: the numbers beside it say more, and all of it fits into 80."""


def say(text: str) -> None:
    """`text` as lines on stderr; a reader of stderr who has gone (`2>&1 | head`) does not end a run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` with every character that could move a cursor, hide or reorder text written as its escape."""
    return "".join(character if _harmless(character) else _escape(character) for character in text)


def _harmless(character: str) -> bool:
    return character in "\n\t " or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def counted(count: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0.4s, 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def progress_line(progress: Progress) -> str:
    """One line: samples done, failed, tokens per second, time left, and how long the oldest sample has waited.

    What says nothing yet is left out, so that a line fits beside a bar on a terminal of 80 columns.
    """
    parts = [f"{progress.done:,}/{progress.total:,} samples"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    eta, oldest = progress.eta_seconds(), progress.oldest_request_seconds()
    if eta is not None and progress.done < progress.total:
        parts.append(f"{duration(round(eta))} left")
    if progress.completion_tokens:
        parts.append(f"{progress.tokens_per_second():,.0f} tok/s")
    idle = progress.seconds_without_server()
    if idle is not None:
        parts.append(f"no server for {duration(idle)}")
    if oldest is not None and round(oldest) >= LINE_SECONDS:
        parts.append(f"oldest {duration(oldest)}")
    return ", ".join(parts)


async def show_progress(progress: Progress) -> None:
    """Keep stderr informed until cancelled: a bar on a terminal, else a line every 10 s."""
    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(LINE_SECONDS)
            say(f"progress: {progress_line(progress)}")
    with _bar() as bar:
        task = bar.add_task("", total=progress.total, facts="")
        while True:
            bar.update(task, completed=progress.done, facts=progress_line(progress))
            await asyncio.sleep(BAR_SECONDS)


def _bar() -> Any:  # Any: rich is imported only where there is a terminal
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        BarColumn(bar_width=BAR_WIDTH),
        TextColumn("{task.fields[facts]}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=1 / BAR_SECONDS,
        transient=True,  # the summary takes its place
    )
