"""`managed-cli inspect`: what was recorded, for a person and for a script. Only `--html` writes a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from managed_cli.cli.json_document import print_json
from managed_cli.errors import OutputError

if TYPE_CHECKING:
    from managed_cli.cli.page import Page
    from managed_cli.storage.check import CheckReport
    from managed_cli.storage.reader import Recording
    from managed_cli.storage.selection import RowNumbers

LISTED_ROWS = 20
"""Rows that `--sort` lists, and pairs that `--diff` shows, unless `--head` says how many."""

Rows = dict[int, dict[str, Any]]  # Any: columns' values
"""Number → row, in the order to show them."""


@click.command(
    "inspect",
    short_help="Show and check what was recorded.",
    epilog="Exit codes: 0 shown, or checked and every rule holds; 2 usage, a row that is not there; "
    "6 PATH cannot be read, or --check found a broken rule.",
)
@click.argument("path", metavar="PATH")
@click.option(
    "--row", type=int, metavar="N", help="One row token by token; rows count from 0, from the end if negative."
)
@click.option("--tokens", is_flag=True, help="With --row: list every token, also the middle of long runs.")
@click.option("--sample", metavar="ID", help="All rows of a sample: its choices side by side, or their tree.")
@click.option("--head", type=click.IntRange(min=1), metavar="N", help="The first N rows, two lines each.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="CONDITION",
    help="Only rows that pass, as in 'length>512' or 'id=gsm8k-4*'; see below. Repeated: rows that pass all.",
)
@click.option(
    "--sort",
    metavar="FIELD",
    help=f"List rows by FIELD, descending with -FIELD: --sort -length. {LISTED_ROWS} of them.",
)
@click.option("--diff", "other", metavar="PATH", help="Compare with another recording of the same prompts, row by row.")
@click.option("--check", is_flag=True, help="Read everything and test every rule again; exit 6 if one is broken.")
@click.option("--html", metavar="FILE", help="Write a report as one page for a browser; replaces FILE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
@click.option("--no-pager", is_flag=True, help="Never page on a terminal; PAGER=cat says the same.")
def inspect_command(
    path: str,
    row: int | None,
    tokens: bool,
    sample: str | None,
    head: int | None,
    filters: tuple[str, ...],
    sort: str | None,
    other: str | None,
    check: bool,
    html: str | None,
    as_json: bool,
    no_pager: bool,
) -> None:
    """Show what was recorded at PATH: a file, a directory of shards, or an output still growing.

    Without an option: counts, histograms and the run, from the footers alone.

    \b
    managed-cli inspect out.parquet
    managed-cli inspect out.parquet --filter finish_reason=length --filter 'length>512'
    managed-cli inspect out.parquet --sort mean_logprob --head 5
    managed-cli inspect out.parquet --row 12
    managed-cli inspect out.parquet --sample gsm8k-41
    managed-cli inspect before.parquet --diff after.parquet
    managed-cli inspect out.parquet --html report.html
    managed-cli inspect out.parquet --check
    managed-cli inspect out.parquet --json | jq .summary.finish_reasons

    \b
    A CONDITION is FIELD OPERATOR VALUE, quoted for the shell:
      numbers   length, prompt_length, mean_logprob, choice, turns    = != < <= > >=
      texts     id, node, parent, finish_reason, server, fork_reason, text
                = != where * stands for anything and ? for one character;
                ~ contains, upper or lower case
      none      of a value that is not there: 'fork_reason!=none'

    --filter alone shows the figures of the rows that pass; it goes with --head, --sort, --html and --json.

    In JSON, a logprob that no JSON number can hold stands as the string "-inf" or "nan".
    """
    views = {"--row": row, "--sample": sample, "--diff": other, "--check": check or None, "--html": html}
    _refuse_mixture(views, head=head, tokens=tokens, filters=filters, sort=sort)
    if html is not None and as_json:
        raise click.UsageError("--html and --json cannot be given together: each is a form of its own")
    from managed_cli.storage.reader import open_recording

    numbers = None
    recording = open_recording(path)
    if filters or sort is not None:
        numbers = _selected(recording, filters, sort)
    if check:
        _check(recording, as_json=as_json)
    elif row is not None:
        _show_row(recording, row, every_token=tokens, as_json=as_json, paged=not no_pager)
    elif sample is not None:
        _show_sample(recording, sample, as_json=as_json, paged=not no_pager)
    elif other is not None:
        _show_differences(recording, open_recording(other), head or LISTED_ROWS, as_json=as_json, paged=not no_pager)
    elif html is not None:
        _write_report(recording, html, numbers, filters=filters, sort=sort)
    elif head is not None or sort is not None:
        _show_list(recording, head or LISTED_ROWS, numbers, as_json=as_json, paged=not no_pager)
    else:
        _show_summary(recording, numbers, filters=filters, as_json=as_json)


def _refuse_mixture(
    views: Mapping[str, object], *, head: int | None, tokens: bool, filters: tuple[str, ...], sort: str | None
) -> None:
    named = [name for name, value in views.items() if value is not None]
    if head is not None and named != ["--diff"]:
        named.append("--head")
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} cannot be given together: each is a view of its own")
    chosen = "--filter" if filters else "--sort" if sort is not None else None
    if chosen and named and named[0] not in ("--head", "--html"):
        raise click.UsageError(f"{chosen} does not go with {named[0]}")
    if tokens and views["--row"] is None:
        raise click.UsageError("--tokens belongs to --row")


def _selected(recording: Recording, filters: tuple[str, ...], sort: str | None) -> RowNumbers:
    from managed_cli.storage.selection import parse_condition, selected_rows

    return selected_rows(recording, [parse_condition(text) for text in filters], sort=sort)


def _show_summary(recording: Recording, numbers: RowNumbers | None, *, filters: tuple[str, ...], as_json: bool) -> None:
    from managed_cli.cli.figures import find_figures

    figures = find_figures(recording, numbers)
    if not as_json:
        from managed_cli.cli import page, recording_view

        recording_view.show_summary(page.Page(), recording, figures, filters=filters)
        return
    summary = figures.summary
    failures = recording.failures_path
    print_json(
        {
            **_identity(recording),
            "files": [str(file.path) for file in recording.files],
            "bytes": recording.bytes_on_disk,
            **({"filter": list(filters), "matching_rows": figures.rows} if figures.selected else {}),
            "summary": {**summary.to_dict(), "mean_logprob": summary.mean_logprob()},
            "figures": figures.to_dict(),
            "failed_samples": recording.failed_samples(),
            "failures_path": str(failures) if failures else None,
            "run": recording.run_facts,
        }
    )


def _show_row(recording: Recording, number: int, *, every_token: bool, as_json: bool, paged: bool) -> None:
    found = recording.row(number)
    if as_json:
        print_json({**_identity(recording), "row": _numbered(recording, number, found)})
        return
    from managed_cli.cli import page, recording_view, tokens_view

    sheet = page.Page()
    with sheet.paged(wanted=paged):
        recording_view.show_title(sheet, recording, row=number % recording.rows)
        sheet.line()
        tokens_view.show_row(sheet, found, recording.run_facts, every_token=every_token)


def _show_list(recording: Recording, count: int, numbers: RowNumbers | None, *, as_json: bool, paged: bool) -> None:
    if numbers is None:
        matching, found = recording.rows, dict(enumerate(recording.head(count)))
    else:
        matching, found = len(numbers), _rows(recording, numbers[:count])
    if as_json:
        rows = [_numbered(recording, number, row) for number, row in found.items()]
        print_json({**_identity(recording), "matching_rows": matching, "head": rows})
        return
    from managed_cli.cli import page, recording_view

    sheet = page.Page()
    with sheet.paged(wanted=paged):
        recording_view.show_rows(sheet, recording, found, matching=matching)


def _rows(recording: Recording, numbers: RowNumbers) -> Rows:
    from managed_cli.storage.selection import rows_at

    return dict(zip(numbers.tolist(), rows_at(recording, numbers), strict=True))


def _show_sample(recording: Recording, sample_id: str, *, as_json: bool, paged: bool) -> None:
    from managed_cli.storage.selection import rows_of_sample

    found = _rows(recording, rows_of_sample(recording, sample_id))
    if as_json:
        rows = [_numbered(recording, number, row) for number, row in found.items()]
        print_json({**_identity(recording), "sample": rows})
        return
    from managed_cli.cli import page, sample_view

    sheet = page.Page()
    with sheet.paged(wanted=paged):
        sample_view.show_sample(sheet, recording, found)


def _show_differences(one: Recording, other: Recording, count: int, *, as_json: bool, paged: bool) -> None:
    import numpy as np

    from managed_cli.cli import differences_view, page
    from managed_cli.cli.differences import compare

    comparison = compare(one, other)
    pairs = comparison.different[:count]
    ours = _rows(one, np.array([pair.one.row for pair in pairs], dtype=np.int64))
    theirs = _rows(other, np.array([pair.other.row for pair in pairs], dtype=np.int64))
    shown = [(pair, ours[pair.one.row], theirs[pair.other.row]) for pair in pairs]
    if as_json:
        document = differences_view.comparison_json(comparison, shown)
        print_json({"a": _identity(one), "b": _identity(other), **document})
        return
    sheet: Page = page.Page()
    with sheet.paged(wanted=paged):
        differences_view.show_comparison(sheet, (one, other), comparison, shown)


def _write_report(
    recording: Recording, target: str, numbers: RowNumbers | None, *, filters: tuple[str, ...], sort: str | None
) -> None:
    from managed_cli.cli.report.write import write_report

    written = write_report(recording, target, numbers, filters=filters, sort=sort)
    click.echo(written.in_words(), err=True)


def _check(recording: Recording, *, as_json: bool) -> None:
    from managed_cli.storage.check import check_recording

    report = check_recording(recording)
    if as_json:
        print_json({**_identity(recording), **_report_json(report)})
    else:
        from managed_cli.cli import page, recording_view

        recording_view.show_check(page.Page(), recording, report)
    if not report.ok:
        kinds = ", ".join(f"{breach.kind} {breach.count:,}" for breach in report.breaches.values())
        raise OutputError(f"`{recording.path}` breaks the rules of a recording: {kinds}")


def _report_json(report: CheckReport) -> dict[str, Any]:  # Any: JSON values
    breaches = [
        {
            "kind": breach.kind,
            "count": breach.count,
            "meaning": breach.meaning,
            "places": [
                {"file": str(place.file), "row": place.row, "row_in_file": place.row_in_file} for place in breach.places
            ],
        }
        for breach in report.breaches.values()
    ]
    return {"ok": report.ok, "checked_rows": report.rows, "checked_tokens": report.tokens, "breaches": breaches}


def _identity(recording: Recording) -> dict[str, Any]:  # Any: JSON values
    return {
        "path": str(recording.path),
        "state": str(recording.state),
        "note": recording.note,
        "writer": recording.writer,
        "rows": recording.rows,
    }


def _numbered(recording: Recording, number: int, row: dict[str, Any]) -> dict[str, Any]:  # Any: columns' values
    """The row with its number, and its metadata as the object it is; as text where it is none."""
    from managed_cli.cli.tokens_view import metadata_of

    return {"row": number % recording.rows, **row, "metadata": metadata_of(row) or row["metadata"]}
