"""What a command writes on stdout for a person: text that cannot harm the terminal, facts in two columns.

On a terminal, lines are fitted to its width and coloured unless `NO_COLOR` is set; elsewhere they are plain and
as long as they are, so that `grep` finds them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

SAMPLED_BEGINS, SAMPLED_ENDS = "⟦", "⟧"
"""Where sampled text begins and ends, readable without colour; escaped where they stand in the text itself."""

LABEL_WIDTH, WIDEST_LABEL = 16, 24
"""Cells of the first column of facts: at least, and at most where a label is longer."""

PIPED_EXCERPT_WIDTH = 160
"""Cells of an excerpt where no terminal bounds it."""

_HARMFUL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control, format (bidi overrides, tags), surrogate and separator characters."""

_JOINERS = frozenset("\u200c\u200d")
"""Format characters that emoji and Indic or Persian words need, and that only join their neighbours."""


def visible(text: str, *, keep_newlines: bool = False) -> str:
    """`text` with every character that a terminal would obey, or that hides or reorders others, as an escape.

    Escapes are Python's: `\\x1b`, `\\u202e`. All else is left as it is, so the result is for reading, not parsing.
    """
    return "".join(character if _is_harmless(character, keep_newlines) else _escape(character) for character in text)


def _is_harmless(character: str, keep_newlines: bool) -> bool:
    if character == "\n":
        return keep_newlines
    if character in (SAMPLED_BEGINS, SAMPLED_ENDS):
        return False
    return character in _JOINERS or unicodedata.category(character) not in _HARMFUL_CATEGORIES


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def quoted(text: str) -> str:
    """`text` in double quotes, exact: a backslash or quote of the text itself is escaped too."""
    return '"' + visible(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def excerpt(text: str, width: int) -> str:
    """`text` on one line of at most `width` cells, `…` where it was cut."""
    # No character is narrower than 0 cells, but none that is read is; what lies far beyond the width is not escaped.
    line = visible(text[: 4 * width].replace("\n", "↵"))
    if cell_len(line) <= width and len(text) <= 4 * width:
        return line
    return (chop_cells(line, max(1, width - 1)) or [""])[0] + "…"


class _Terminal(Console):
    """A console that leaves a reader who has gone to the command line's own boundary."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into an exit of its own."""
        raise BrokenPipeError


class Page:
    """Writes on stdout.

    Attributes:
        width: cells of the terminal; None where stdout is none.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without `…` must not end the command
            sys.stdout.reconfigure(errors="backslashreplace")
        is_terminal = sys.stdout.isatty()
        coloured = (is_terminal or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
        self._console = _Terminal(
            file=sys.stdout,
            color_system="auto" if coloured else None,
            force_terminal=True if coloured else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self.width = self._console.width if is_terminal else None

    @property
    def coloured(self) -> bool:
        """Whether styles are seen."""
        return self._console.color_system is not None

    @property
    def excerpt_width(self) -> int:
        """Cells that a one-line excerpt may take."""
        return self.width or PIPED_EXCERPT_WIDTH

    @contextlib.contextmanager
    def paged(self, *, wanted: bool = True) -> Iterator[None]:
        """What is written inside goes through `$PAGER`, or `less`, where a person sits at the terminal.

        A pager shows what fits on the screen at once; `PAGER=cat` means none.
        """
        command = shlex.split(os.environ.get("PAGER") or "less")
        is_interactive = self.width is not None and sys.stdin.isatty() and os.environ.get("TERM") != "dumb"
        if not (wanted and is_interactive and command) or command[0] == "cat" or not shutil.which(command[0]):
            yield
            return
        # F: end at once where all fits; R: colours, and no other escape; X: leave what was read on the screen.
        variables = {**os.environ, "LESS": os.environ.get("LESS") or "FRX"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=variables) as pager:
            assert pager.stdin is not None
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
            self._console.file = pager.stdin
            try:
                yield
            except BrokenPipeError:  # the reader has seen enough
                pass
            finally:
                with contextlib.suppress(BrokenPipeError):
                    pager.stdin.close()
                pager.wait()
                self._console.file = sys.stdout
                signal.signal(signal.SIGINT, before)

    def can_show(self, characters: str) -> bool:
        """Whether stdout's encoding has them."""
        try:
            characters.encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    def line(self, text: str | Text = "", *, style: str = "") -> None:
        """One line, or a block of them; `text` is not interpreted."""
        self._console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=True)

    def heading(self, text: str) -> None:
        """A line that names what follows, after an empty one."""
        self.line()
        self.line(text, style="bold")

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Label and value a line; on a terminal, long values go on under themselves."""
        labels = [visible(label) for label, _ in facts]
        first_column = min(WIDEST_LABEL, max(LABEL_WIDTH, *(len(label) + 2 for label in labels), 0))
        for label, (_, value) in zip(labels, facts, strict=True):
            shown = visible(value)
            room = max(20, (self.width or 0) - first_column)
            lines = textwrap.wrap(shown, room, break_on_hyphens=False) if self.width else [shown]
            text = Text(f"{label + ' ':<{first_column}}", style="dim").append((lines or [""])[0], style="not dim")
            for line in lines[1:]:
                text.append("\n" + " " * first_column + line, style="not dim")
            self.line(text)


def fitted(text: str, width: int) -> str:
    """`text`, harmless already, in exactly `width` cells: cut at its end, or filled up with blanks."""
    if cell_len(text) > width:
        text = (chop_cells(text, max(1, width - 1)) or [""])[0] + "…"
    return text + " " * (width - cell_len(text))


def wrapped(text: str, width: int) -> list[str]:
    """`text` as lines of at most `width` cells, broken at blanks where that is possible; harmless."""
    lines: list[str] = []
    for line in visible(text, keep_newlines=True).split("\n"):
        current = ""
        for word in re.findall(r"\s*\S+|\s+$", line):
            if cell_len(current + word) <= width:
                current += word
                continue
            if current:
                lines.append(current)
                word = word.lstrip()
            *full, current = chop_cells(word, width) or [""]
            lines += full
        lines.append(current)
    return lines


def counted(count: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
