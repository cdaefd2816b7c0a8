"""`managed-cli inputs`: how the lines of files are understood, and how long their prompts are. Nothing is sampled."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import click

from managed_cli.cli.console import LINE_SECONDS, say
from managed_cli.errors import InputError
from managed_cli.rollout.input_options import INPUT_FORMATS, ON_BAD_LINE, InputOptions

if TYPE_CHECKING:
    from managed_cli.rollout.input_files import InputFiles
    from managed_cli.rollout.survey import KindSummary, Lengths, Survey
    from managed_cli.types import Tokenizer

_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(
    "inputs",
    short_help="Show how prompts are understood, and how long they are.",
    epilog="Exit codes: 0 every line can be used, or bad ones are to be skipped; 2 usage; 4 no such tokenizer; "
    "5 a file cannot be read, or there are bad lines.",
)
@click.argument("arguments", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--input-format",
    type=click.Choice(INPUT_FORMATS),
    default="auto",
    show_default=True,
    help="What every line is; auto tells each by its fields.",
)
@click.option("--prompt-field", metavar="FIELD", help="Field of the prompt (default: prompt).")
@click.option("--id-field", metavar="FIELD", default="id", show_default=True, help="Field of the sample id.")
@click.option("--system", metavar="TEXT", help="System message for chats that have none.")
@click.option("--keep-last-assistant", is_flag=True, help="Continue the last answer of ShareGPT conversations.")
@click.option("--limit", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Use only so many, from the start.")
@click.option(
    "--on-bad-line",
    type=click.Choice(ON_BAD_LINE),
    default="fail",
    show_default=True,
    help="What a line that cannot be used does to a run, and here to the exit code.",
)
@click.option("--tokenizer", metavar="NAME", help="Directory or Hugging Face name; counts the tokens of each prompt.")
@click.option("--max-total-tokens", type=_AT_LEAST_ONE, metavar="TOKENS", help="Most prompt + completion tokens.")
@click.option("--context-length", type=_AT_LEAST_ONE, metavar="TOKENS", help="The same, as the model's context.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
def inputs_command(
    arguments: tuple[str, ...],
    tokenizer: str | None,
    max_total_tokens: int | None,
    context_length: int | None,
    as_json: bool,
    **options: Any,  # Any: the fields of `InputOptions`
) -> None:
    """Show how the lines of FILEs are understood, which cannot be used, and how many tokens the prompts have.

    FILE is JSON lines (also gz, zst) or Parquet, a glob in quotes, or - for stdin. Nothing is sampled or written.

    \b
    managed-cli inputs prompts.jsonl
    managed-cli inputs 'data/**/*.parquet' --input-format messages
    managed-cli inputs gsm8k.jsonl --prompt-field question --tokenizer Qwen/Qwen3-8B --context-length 4096
    """
    if max_total_tokens is not None and context_length is not None:
        raise click.UsageError(
            "--max-total-tokens and --context-length cannot be given together: here they are the same"
        )
    budget = context_length if max_total_tokens is None else max_total_tokens
    if budget is not None and tokenizer is None:
        raise click.UsageError("a number of tokens needs --tokenizer, which counts them")
    chosen = InputOptions(**options)
    from managed_cli.rollout.input_files import input_files
    from managed_cli.rollout.survey import Survey

    with input_files(arguments) as files:
        survey = Survey(_loaded(tokenizer), budget)
        _look_through(files, chosen, survey)
        if as_json:
            click.echo(json.dumps(_document(files, survey, tokenizer)))
        else:
            from managed_cli.cli import inputs_view, page

            inputs_view.show_survey(page.Page(), files, survey, tokenizer)
    if survey.bad_count and chosen.on_bad_line == "fail":
        raise InputError(f"{survey.bad_count} of {survey.samples} samples in {files.name} cannot be used")


def _loaded(name: str | None) -> Tokenizer | None:
    if name is None:
        return None
    from managed_cli.tokenizers import load_tokenizer

    return load_tokenizer(name)


def _look_through(files: InputFiles, options: InputOptions, survey: Survey) -> None:
    """Every sample is in `survey`; on the way, a line on stderr now and then."""
    from managed_cli.rollout.tasks import read_samples

    told = time.monotonic()
    for sample in read_samples(files, dataclasses.replace(options, on_bad_line="skip")):
        survey.add(sample)
        if time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            say(f"progress: {survey.samples:,} samples")
    if not survey.samples:
        raise InputError(f"{files.name} holds no samples, expected one JSON object per line")


def _document(files: InputFiles, survey: Survey, tokenizer: str | None) -> dict[str, Any]:  # Any: JSON values
    return {
        "files": [file.name for file in files.files],
        "samples": survey.samples,
        "kinds": {kind: _kind_json(summary) for kind, summary in survey.kinds.items()},
        "bad_lines": survey.bad_count,
        "first_bad_lines": [
            {
                "sample_id": bad.sample_id,
                "place": bad.place,
                "line": bad.line,
                "error": bad.error.message,
                "hint": bad.error.hint,
            }
            for bad in survey.bad_lines
        ],
        "tokens": None if survey.lengths is None else lengths_json(survey.lengths, tokenizer),
    }


def _kind_json(summary: KindSummary) -> dict[str, Any]:  # Any: JSON values
    return {
        "samples": summary.count,
        "first": summary.first,
        "example": summary.example,
        "fields": dict(summary.fields),
        "with_sampling": summary.with_sampling,
        "with_tools": summary.with_tools,
        "continued": summary.continued,
    }


def lengths_json(lengths: Lengths, tokenizer: str | None) -> dict[str, Any]:  # Any: JSON values
    """What was counted, for a script; `shortened` is null where there is no run."""
    some = lengths.samples > 0
    return {
        "tokenizer": tokenizer,
        "samples": lengths.samples,
        "first_turns": lengths.first_turns,
        "total": lengths.total,
        "min": lengths.quantile(0) if some else None,
        "median": lengths.quantile(0.5) if some else None,
        "p95": lengths.quantile(0.95) if some else None,
        "p99": lengths.quantile(0.99) if some else None,
        "max": lengths.quantile(1) if some else None,
        "histogram": [{"from": low, "to": high, "samples": count} for low, high, count in lengths.histogram()],
        "budget": lengths.budget,
        "over_budget": lengths.over_budget,
        "shortened": None if lengths.sampling is None else lengths.shortened,
        "first_over_budget": [dataclasses.asdict(prompt) for prompt in lengths.first_over_budget],
    }
