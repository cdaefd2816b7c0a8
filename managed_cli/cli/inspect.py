"""`managed-cli inspect`: what was recorded, for a person and for a script. Nothing is written."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from managed_cli.errors import OutputError

if TYPE_CHECKING:
    from managed_cli.storage.check import CheckReport
    from managed_cli.storage.reader import Recording


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
@click.option("--head", type=click.IntRange(min=1), metavar="N", help="The first N rows, two lines each.")
@click.option("--check", is_flag=True, help="Read everything and test every rule again; exit 6 if one is broken.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
def inspect_command(path: str, row: int | None, tokens: bool, head: int | None, check: bool, as_json: bool) -> None:
    """Show what was recorded at PATH: a file, a directory of shards, or an output still growing.

    Without an option: the counts and the run, from the footers alone.

    \b
    managed-cli inspect out.parquet
    managed-cli inspect out.parquet --head 5
    managed-cli inspect out.parquet --row 12
    managed-cli inspect out.parquet --check
    managed-cli inspect out.parquet --json | jq .summary.finish_reasons

    In JSON, a logprob that no JSON number can hold stands as the string "-inf" or "nan".
    """
    _refuse_mixture(row=row, tokens=tokens, head=head, check=check)
    from managed_cli.storage.reader import open_recording

    recording = open_recording(path)
    if check:
        _check(recording, as_json=as_json)
    elif row is not None:
        _show_row(recording, row, every_token=tokens, as_json=as_json)
    elif head is not None:
        _show_head(recording, head, as_json=as_json)
    else:
        _show_summary(recording, as_json=as_json)


def _refuse_mixture(*, row: int | None, tokens: bool, head: int | None, check: bool) -> None:
    named = [
        name for name, given in (("--row", row is not None), ("--head", head is not None), ("--check", check)) if given
    ]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} cannot be given together: each is a view of its own")
    if tokens and row is None:
        raise click.UsageError("--tokens belongs to --row")


def _show_summary(recording: Recording, *, as_json: bool) -> None:
    if not as_json:
        from managed_cli.cli import page, recording_view

        recording_view.show_summary(page.Page(), recording)
        return
    summary = recording.summary()
    failures = recording.failures_path
    _print_json(
        {
            **_identity(recording),
            "files": [str(file.path) for file in recording.files],
            "bytes": recording.bytes_on_disk,
            "summary": {**summary.to_dict(), "mean_logprob": summary.mean_logprob()},
            "failed_samples": recording.failed_samples(),
            "failures_path": str(failures) if failures else None,
            "run": recording.run_facts,
        }
    )


def _show_row(recording: Recording, number: int, *, every_token: bool, as_json: bool) -> None:
    found = recording.row(number)
    if as_json:
        _print_json({**_identity(recording), "row": _numbered(recording, number, found)})
        return
    from managed_cli.cli import page, recording_view, tokens_view

    sheet = page.Page()
    recording_view.show_title(sheet, recording, row=number % recording.rows)
    sheet.line()
    tokens_view.show_row(sheet, found, recording.run_facts, every_token=every_token)


def _show_head(recording: Recording, count: int, *, as_json: bool) -> None:
    found = recording.head(count)
    if as_json:
        rows = [_numbered(recording, number, row) for number, row in enumerate(found)]
        _print_json({**_identity(recording), "head": rows})
        return
    from managed_cli.cli import page, recording_view

    recording_view.show_head(page.Page(), recording, found)


def _check(recording: Recording, *, as_json: bool) -> None:
    from managed_cli.storage.check import check_recording

    report = check_recording(recording)
    if as_json:
        _print_json({**_identity(recording), **_report_json(report)})
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


def _print_json(document: dict[str, Any]) -> None:  # Any: JSON values
    """One line of ASCII: no byte of a model's text reaches the terminal as it is."""
    click.echo(json.dumps(_finite(document), allow_nan=False).replace("\x7f", "\\u007f"))


def _finite(value: Any) -> Any:  # Any: JSON values, and floats that JSON has no number for
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value
