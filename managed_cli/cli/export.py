"""`managed-cli export`: what was recorded, as a trainer reads it."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from managed_cli.export.export import ExportReport
    from managed_cli.export.formats import Format
    from managed_cli.export.reward import AdvantageKind

FORMAT_NAMES = ("atropos", "trl", "verl", "prime-rl", "slime", "hf")


@click.command(
    "export",
    short_help="Write what was recorded in a trainer's format.",
    epilog="Exit codes: 0 exported; 2 usage, or the reward function cannot be used or failed (the row is named); "
    "6 PATH cannot be read, breaks a rule or holds nothing to export, or OUT cannot be written. "
    "Whatever fails, OUT is what it was.",
)
@click.argument("path", metavar="[PATH]", required=False)
@click.option("--to", "to", type=click.Choice(FORMAT_NAMES), required=True, help="What OUT is written for.")
@click.option("--out", metavar="OUT", help="The file to write: JSON lines.")
@click.option(
    "--describe", is_flag=True, help="Explain the format column by column, and how to load it; write nothing."
)
@click.option(
    "--reward",
    metavar="MODULE:FUNCTION",
    help="Score each row with a function of yours: dict of the row → number, or None to leave it out; may be async.",
)
@click.option(
    "--advantage",
    type=click.Choice(["mean", "std", "none"]),
    default="mean",
    show_default=True,
    help="With --reward: reward less the mean of the sample's rows; std also divides by their standard deviation.",
)
@click.option(
    "--nodes",
    type=click.Choice(["leaves", "all"]),
    default="leaves",
    show_default=True,
    help="Of a tree (--track-tree): rows that no other row goes on from, or all, which repeat each other's tokens.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.")
@click.option("--allow-unfinished", is_flag=True, help="Also export a run that is not finished, with what it has.")
@click.option("--json", "as_json", is_flag=True, help="Print what was exported (or --describe) as one JSON document.")
def export_command(
    path: str | None,
    to: str,
    out: str | None,
    describe: bool,
    reward: str | None,
    advantage: AdvantageKind,
    nodes: str,
    overwrite: bool,
    allow_unfinished: bool,
    as_json: bool,
) -> None:
    """Write the recording at PATH as JSON lines that a trainer reads: ids, masks and logprobs as they were recorded.

    \b
    atropos   scored groups, one sample a line (needs --reward)
    trl       what a rollout_func of GRPOTrainer returns
    verl      AgentLoopOutput
    prime-rl  TrainingSample
    slime     Sample
    hf        tokenised rows for Hugging Face datasets and SFTTrainer

    Every row is written, or dropped for a reason that is told: a sampled -inf, nothing sampled, a node that another
    row goes on from, no reward. Placeholder rows of the OpenAI dummy are refused.

    \b
    managed-cli export out.parquet --to trl --out train.jsonl
    managed-cli export out.parquet --to atropos --reward rewards:score --out groups.jsonl
    managed-cli export --to verl --describe
    """
    from managed_cli.export.formats import format_named

    if describe:
        if path is not None or out is not None:
            raise click.UsageError("--describe takes neither PATH nor --out: it explains the format")
        _describe(format_named(to), as_json=as_json)
        return
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.")
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    from managed_cli.export.export import export_recording

    report = export_recording(
        path,
        out,
        format_named(to),
        reward=reward,
        advantage=advantage,
        every_node=nodes == "all",
        overwrite=overwrite,
        allow_unfinished=allow_unfinished,
    )
    _tell(report)
    if as_json:
        click.echo(json.dumps(_document(report)))


def _tell(report: ExportReport) -> None:
    from managed_cli.cli.page import counted, visible
    from managed_cli.export.rollouts import DROP_MEANINGS

    lines = [f"note: {report.note}"] if report.note else []
    for reason, count in report.dropped.items():
        lines.append(f"dropped {counted(count, 'row')}: {DROP_MEANINGS[reason]}")
    lines.append(
        f"exported {report.written:,} of {counted(report.rows, 'row')}, of {counted(report.samples, 'sample')}, to "
        f"{report.out}; how to load it: managed-cli export --to {report.format} --describe"
    )
    for line in lines:
        click.echo(visible(line), err=True)


def _document(report: ExportReport) -> dict[str, Any]:  # Any: JSON values
    return {
        "path": str(report.recording),
        "out": str(report.out),
        "format": report.format,
        "rows": report.rows,
        "written": report.written,
        "dropped": {str(reason): count for reason, count in report.dropped.items()},
        "samples": report.samples,
        "lines": report.lines,
    }


def _describe(format: Format, *, as_json: bool) -> None:
    if as_json:
        fields = [{"name": f.name, "type": f.type, "meaning": f.meaning} for f in format.fields]
        click.echo(
            json.dumps(
                {
                    "format": format.name,
                    "project": format.project,
                    "source": format.source,
                    "line": format.unit,
                    "needs_reward": format.needs_reward,
                    "fields": fields,
                    "conventions": list(format.conventions),
                    "loading": "\n".join(format.loading),
                }
            )
        )
        return
    from managed_cli.cli.page import Page

    page = Page()
    page.line(format.project, style="bold")
    page.facts([("a line is", f"one {format.unit}"), ("read in", format.source)])
    page.heading("columns (P prompt, C completion, T = P + C positions, n rows)")
    page.facts([(field.name, f"{field.type}: {field.meaning}") for field in format.fields])
    page.heading("conventions")
    for sentence in format.conventions:
        page.line(textwrap.fill(f"- {sentence}", page.width or len(sentence) + 2, subsequent_indent="  "))
    page.heading("loading it")
    for line in format.loading:
        page.line(f"    {line}")
