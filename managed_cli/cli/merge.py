"""`managed-cli merge`: the parts of a run as one output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from managed_cli.storage.merge import MergeReport


@click.command(
    "merge",
    short_help="Join the parts of a run.",
    epilog="Exit codes: 0 merged; 2 usage; 6 a part cannot be used, or OUT cannot be written.",
)
@click.argument("parts", metavar="PART...", nargs=-1, required=True)
@click.option("--out", required=True, metavar="OUT", help="A file, or DIR/ for a directory with a shard per file.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier output.")
@click.option("--allow-unfinished", is_flag=True, help="Also take parts that were interrupted, with what they have.")
@click.option("--json", "as_json", is_flag=True, help="Print what was merged as one JSON document on stdout.")
def merge_command(parts: tuple[str, ...], out: str, overwrite: bool, allow_unfinished: bool, as_json: bool) -> None:
    """Join PARTs, files or directories that one run recorded part by part, into OUT; the parts stay as they are.

    Parts of different runs are refused, and so is a sample that stands in two of them. Rows keep their order,
    counts and failures are added up.

    \b
    managed-cli merge part-*.parquet --out all.parquet
    managed-cli merge rows/ --out rows.parquet
    """
    from managed_cli.storage.merge import merge_parts

    report = merge_parts(parts, out, overwrite=overwrite, allow_unfinished=allow_unfinished)
    _tell(report)
    if as_json:
        click.echo(json.dumps(_document(report), allow_nan=False))


def _tell(report: MergeReport) -> None:
    from managed_cli.cli.page import counted, visible

    for part in report.parts:
        if part.recording.note:
            click.echo(visible(f"note: {part.recording.note}"), err=True)
    failed = f", {counted(report.failed_samples, 'failed sample')}" if report.failed_samples else ""
    click.echo(
        visible(
            f"merged {counted(len(report.parts), 'part')}: {counted(report.summary.rows, 'row')} of "
            f"{counted(report.summary.samples, 'sample')}{failed} in {report.out}; "
            f"look at them with: managed-cli inspect {report.out}"
        ),
        err=True,
    )


def _document(report: MergeReport) -> dict[str, Any]:  # Any: JSON values
    return {
        "out": str(report.out),
        "rows": report.summary.rows,
        "samples": report.summary.samples,
        "failed_samples": report.failed_samples,
        "parts": [
            {"path": str(part.recording.path), "rows": part.summary.rows, "samples": part.summary.samples}
            for part in report.parts
        ],
        "summary": {**report.summary.to_dict(), "mean_logprob": report.summary.mean_logprob()},
    }
