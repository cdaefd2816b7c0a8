"""One self-contained page about a recording: its figures, and its rows as far as a browser takes them with ease."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from managed_cli import __version__
from managed_cli.cli.figures import Figures, find_figures
from managed_cli.cli.page import counted
from managed_cli.cli.recording_view import counts_in_words, last_text, size_in_words, state_in_words
from managed_cli.cli.report.encoding import ROWS_PER_BLOCK, encoded_block, encoded_list
from managed_cli.cli.report.plots import escaped, facts_html, plots_html, shares_html
from managed_cli.cli.tokens_view import in_words
from managed_cli.errors import OutputError
from managed_cli.storage.reader import Recording
from managed_cli.storage.selection import iter_chosen_batches, rows_at

if TYPE_CHECKING:
    from managed_cli.storage.selection import RowNumbers

SCRIPTS = ("unpack.js", "row.js", "list.js")
"""In this order, as one script."""

MOST_ROWS = 5000
MOST_TOKENS = 4_000_000
MOST_BYTES = 28_000_000
"""Of the rows in a page: what a browser opens in a moment and a mail still carries."""


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenReport:
    """What was written.

    Attributes:
        shown: rows that can be read in the page, of all that were meant.
    """

    path: Path
    bytes_written: int
    shown: int
    rows: int

    def in_words(self) -> str:
        """One line for a person."""
        rows = (
            counted(self.rows, "row") if self.shown == self.rows else f"{self.shown:,} of {counted(self.rows, 'row')}"
        )
        return f"wrote {self.path}: {rows}, {size_in_words(self.bytes_written)}; open it in a browser"


def write_report(
    recording: Recording,
    target: str,
    numbers: RowNumbers | None,
    *,
    filters: Sequence[str] = (),
    sort: str | None = None,
) -> WrittenReport:
    """The page is at `target`, as a whole; a file that stood there is replaced, a part of the recording never.

    Args:
        numbers: the rows meant, in their order; None for all.

    Raises:
        OutputError: it cannot be written, or `target` is a file of the recording.
    """
    path = Path(target)
    if path.exists() and any(path.samefile(file.path) for file in recording.files):
        raise OutputError(f"`{target}` is the recording itself", hint="choose another name: `--html report.html`")
    figures = find_figures(recording, numbers if filters else None)
    meant = np.arange(recording.rows, dtype=np.int64) if numbers is None else numbers
    share = 1.0
    while True:
        most_rows, most_tokens = int(MOST_ROWS * share), int(MOST_TOKENS * share)
        chosen = meant[:most_rows] if sort is not None else _whole_samples(recording, meant, most_rows, most_tokens)
        rows = rows_at(recording, chosen)
        blocks = [
            encoded_block(rows[first : first + ROWS_PER_BLOCK], recording.run_facts)
            for first in range(0, len(rows), ROWS_PER_BLOCK)
        ]
        size = sum(len(piece) for block in blocks for piece in block)
        if size <= MOST_BYTES or len(chosen) <= 1:
            break
        share *= min(0.9, MOST_BYTES / size)
    page = _page(recording, figures, meant, chosen, rows, blocks, filters=filters, sort=sort)
    _write_whole(path, page.encode("utf-8", "backslashreplace"))
    return WrittenReport(path, path.stat().st_size, len(chosen), len(meant))


def _whole_samples(recording: Recording, meant: RowNumbers, most_rows: int, most_tokens: int) -> RowNumbers:
    """Rows within both limits: all of some samples, evenly spaced over those that are meant."""
    if not len(meant):
        return meant
    batches = iter_chosen_batches(recording, meant, ["sample_id", "prompt_length", "completion_length"])
    table = pa.Table.from_batches(list(batches))
    ids = table.column("sample_id").combine_chunks()
    lengths = pc.add(table.column("prompt_length"), table.column("completion_length"))
    tokens = np.cumsum(pc.fill_null(lengths, 0).to_numpy())
    if len(meant) <= most_rows and tokens[-1] <= most_tokens:
        return meant
    begins = np.flatnonzero(pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)) + 1
    begins = np.concatenate(([0], begins))
    ends = np.concatenate((begins[1:], [len(meant)]))
    share = min(1.0, most_rows / len(meant), most_tokens / tokens[-1])
    while True:
        count = max(1, int(len(begins) * share))
        picks = np.unique(np.linspace(0, len(begins) - 1, count).round().astype(np.int64))
        rows = np.concatenate([np.arange(begins[pick], ends[pick]) for pick in picks])
        sizes = np.diff(tokens, prepend=0)[rows].sum()
        if (len(rows) <= most_rows and sizes <= most_tokens) or count == 1:
            picked: RowNumbers = meant[rows[: max(1, most_rows)]]
            return picked
        share *= 0.9


def _page(
    recording: Recording,
    figures: Figures,
    meant: RowNumbers,
    chosen: RowNumbers,
    rows: Sequence[dict[str, Any]],  # Any: the columns' values
    blocks: Sequence[tuple[str, str]],
    *,
    filters: Sequence[str],
    sort: str | None,
) -> str:
    """The page as text. Long: one place where every hole of the template is filled."""
    style, script = _part("style.css"), "".join(_part(name) for name in SCRIPTS)
    statistics = figures.statistics
    facts = counts_in_words(recording, figures)
    run = [(key.replace("_", " "), in_words(value)) for key, value in recording.run_facts.items()]
    excerpts = [last_text(row) for row in rows]
    notes = [note for note in (state_in_words(recording), recording.note) if note]
    if filters:
        notes.append(f"only rows where {' and '.join(filters)}: {len(meant):,} of {counted(recording.rows, 'row')}")
    if len(chosen) < len(meant):
        how = f"the first by {sort}" if sort is not None else "whole samples, evenly spaced"
        notes.append(
            f"the list below holds {len(chosen):,} of {counted(len(meant), 'row')} ({how}), so that this page "
            "stays light; the figures are of all rows unless they say otherwise"
        )
    return Template(_part("page.html")).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        version=escaped(__version__),
        title=escaped(recording.path),
        subtitle=escaped(
            f"{counted(recording.rows, 'row')} in {counted(len(recording.files), 'file')}, "
            f"{size_in_words(recording.bytes_on_disk)}"
        ),
        notes="".join(f"<p>{escaped(note)}</p>" for note in notes),
        facts=facts_html(facts),
        run=facts_html(run),
        plots=plots_html(figures),
        shares=shares_html(
            "turn", "completions", [(f"{turn}", share) for turn, share in sorted(statistics.by_turn.items())]
        )
        + shares_html("server", "rows", sorted(statistics.by_server.items())),
        rows=encoded_list(chosen.tolist(), rows, excerpts),
        rows_per_block=str(ROWS_PER_BLOCK),
        blocks="\n".join(
            f'<script type="text/plain" class="block">{texts}</script>'
            f'<script type="text/plain" class="arrays">{arrays}</script>'
            for texts, arrays in blocks
        ),
    )


def _part(name: str) -> str:
    return resources.files("managed_cli.cli.report").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write_whole(path: Path, data: bytes) -> None:
    """`data` is at `path`, or what stood there still is."""
    try:
        descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(temp).chmod(0o666 & ~mask)
            Path(temp).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temp).unlink()
            raise
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise OutputError(f"cannot write `{path}`: {reason}", details=("what stood there is unchanged",)) from error
