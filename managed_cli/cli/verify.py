"""`managed-cli verify`: recorded logprobs against a second opinion. Nothing is written but what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from managed_cli.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from managed_cli.scoring.rows import RowChoice
    from managed_cli.scoring.scorers import Scorer
    from managed_cli.scoring.verify import RowReport, VerifyReport
    from managed_cli.storage.reader import Recording

TRANSFORMERS = "transformers"

_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(
    "verify",
    short_help="Score recorded rows again and compare.",
    epilog="Exit codes: 0 every compared logprob lies within the tolerance and no row has a fault; 2 usage, or "
    "nothing could be compared; 4 server or tokenizer; 6 a logprob lies beyond the tolerance, a row has a fault, or "
    "PATH cannot be read.",
)
@click.argument("path", metavar="PATH")
@click.option(
    "--server-type",
    type=click.Choice(["vllm", "sglang", "trl", TRANSFORMERS, "llamacpp", "local", "openai"]),
    required=True,
    help="Who scores: a server that gives prompt logprobs, or the weights in this process (transformers).",
)
@click.option("--base-url", metavar="URL", help="Address of the server (default: the usual one of its kind).")
@click.option(
    "--model",
    metavar="NAME",
    help="Model to ask for (default: the one the server has); for transformers, a directory or Hugging Face name "
    "(default: where the recording's tokenizer is from).",
)
@click.option("--tokenizer", metavar="NAME", help="Directory or Hugging Face name (default: the model's).")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--api-key-file", metavar="FILE", help="File that holds the server's API key.")
@click.option(
    "--wait-for-server",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for a server that is still loading.",
)
@click.option("--context-length", type=_AT_LEAST_ONE, metavar="TOKENS", help="Longest row, where the server is silent.")
@click.option(
    "--concurrency", type=_AT_LEAST_ONE, default=16, show_default=True, metavar="ROWS", help="Rows in flight."
)
@click.option("--device", metavar="NAME", help="For transformers: cpu, cuda, … (default: a GPU where there is one).")
@click.option(
    "--tokens-per-batch", type=_AT_LEAST_ONE, metavar="TOKENS", help="For transformers: padded tokens at a time."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=5e-4,
    show_default=True,
    metavar="NATS",
    help="Largest difference of a logprob. Float32 servers lie within 1e-4; bfloat16 ones differ by about 1e-1.",
)
@click.option("--sample", type=_AT_LEAST_ONE, metavar="ROWS", help="Only so many rows, drawn at random.")
@click.option("--seed", type=int, default=0, show_default=True, help="With --sample: which rows are drawn.")
@click.option("--limit", type=_AT_LEAST_ONE, metavar="ROWS", help="Only so many rows, from the start.")
@click.option(
    "--worst", type=click.IntRange(min=0), default=5, show_default=True, metavar="N", help="Show so many worst tokens."
)
@click.option("--rows-to", metavar="FILE", help="Also write one JSON line for every row to FILE.")
@click.option("--quiet", is_flag=True, help="Only errors and warnings on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
def verify_command(path: str, **options: Any) -> None:  # Any: click hands every option over by name
    """Score the rows recorded at PATH again, compare every sampled logprob, and say what is wrong where they differ.

    A server compares logprobs taken before temperature and filters (raw); transformers, a float32 forward pass in
    this process, also those taken after them. Rows of any kind that were sampled at temperature 1 without filters
    are raw. Besides, ids, masks, text and turns of every row are held against each other. What differs by more
    than --tolerance is named where its pattern tells: shifted, filled up, of another row, in another unit, a
    changed token, …

    \b
    managed-cli verify out.parquet --server-type vllm
    managed-cli verify out.parquet --server-type transformers --model Qwen/Qwen3-8B --sample 200
    managed-cli verify out.parquet --server-type vllm --json | jq .max_difference
    """
    if options["sample"] is not None and options["limit"] is not None:
        raise click.UsageError("--sample and --limit cannot be given together: each chooses rows in its own way")
    from managed_cli.scoring.rows import RowChoice
    from managed_cli.scoring.scorers import refuse_server_without_prompt_logprobs
    from managed_cli.storage.reader import open_recording

    refuse_server_without_prompt_logprobs(options["server_type"])
    recording = open_recording(path)
    choice = RowChoice(limit=options["limit"], sample=options["sample"], seed=options["seed"])
    scorer_name, report = asyncio.run(_verified(recording, choice, options))
    if options["as_json"]:
        from managed_cli.cli.json_document import print_json
        from managed_cli.cli.verify_view import document

        print_json(document(recording, scorer_name, report))
    else:
        from managed_cli.cli import page, verify_view

        verify_view.show(page.Page(), recording, scorer_name, report)
    _conclude(recording, report)


def _conclude(recording: Recording, report: VerifyReport) -> None:
    """Raise what the exit code is to say."""
    found = [f"{kind} in {finding.rows:,}" for kind, finding in report.faults.items()]
    if report.beyond_rows:
        found.append(f"logprobs beyond {report.tolerance:g} in {report.beyond_rows:,}")
    if found:
        raise OutputError(f"`{recording.path}`: of {report.rows:,} rows, {'; '.join(found)}", hint=_hint(report))
    if not report.compared_rows:
        reasons = [f"{count:,}: {reason}" for reason, count in report.not_compared.items()]
        raise ConfigError(
            f"none of the {report.rows:,} rows of `{recording.path}` could be compared",
            details=reasons,
            hint="`--server-type transformers` compares logprobs that were taken after temperature and filters too",
        )


def _hint(report: VerifyReport) -> str | None:
    """What may be the matter with the comparison, rather than with the rows."""
    rows = {kind: finding.rows for kind, finding in report.diagnoses.items()}
    if rows.get("rounding", 0) > report.beyond_rows / 2:
        return "servers in bfloat16 or float16 differ by about 0.1 nats: --tolerance 0.5, and look at the ratios"
    if rows.get("other_context", 0) > report.compared_rows / 2:
        return "nearly every row differs from its first token on: are these the weights that sampled them?"
    if (
        sum(report.faults[kind].rows for kind in ("masked_text", "sampled_text") if kind in report.faults)
        == report.rows
    ):
        return "no row has the text of its ids: is --tokenizer the one that they were recorded with?"
    return None


async def _verified(
    recording: Recording, choice: RowChoice, options: dict[str, Any]
) -> tuple[str, VerifyReport]:  # Any: as above
    from managed_cli.cli.console import say
    from managed_cli.scoring.verify import Verifier

    total = len(choice.numbers(recording.rows))
    async with _scorer(recording, options) as scorer:
        if not options["quiet"]:
            say(f"scoring {total:,} of {recording.rows:,} rows with {scorer.name}")
        with _row_writer(options["rows_to"]) as tell_row:
            verifier = Verifier(
                scorer,
                tolerance=options["tolerance"],
                worst=options["worst"],
                tell_row=tell_row,
                tell_done=_progress_teller(total, quiet=options["quiet"]),
            )
            return scorer.name, await verifier.run(recording, choice)


@contextlib.asynccontextmanager
async def _scorer(recording: Recording, options: dict[str, Any]) -> AsyncIterator[Scorer]:  # Any: as above
    """What scores, ready; a server's connections are closed at the end."""
    if options["server_type"] == TRANSFORMERS:
        yield await asyncio.to_thread(_loaded_model, recording, options)
        return
    from managed_cli.cli.console import say
    from managed_cli.cli.rollout_options import api_key
    from managed_cli.managed.config import APIServerConfig
    from managed_cli.managed.servers import server_for
    from managed_cli.scoring.scorers import ServerScorer

    config = APIServerConfig(
        server_type=options["server_type"],
        base_url=options["base_url"],
        model_name=options["model"],
        tokenizer_name=options["tokenizer"],
        api_key=api_key(options["api_key_env"], options["api_key_file"]),
        wait_for_server=options["wait_for_server"],
        context_length=options["context_length"],
        probe_logprobs_mode=False,  # prompt logprobs are raw, whatever is done to sampled ones
    )
    async with server_for(config) as server:
        recorded = recording.run_facts.get("model")
        if recorded is not None and recorded != server.info.model and not options["quiet"]:
            say(f"note: recorded with the model {recorded}, scored with {server.info.model}")
        yield ServerScorer(server, concurrency=options["concurrency"])


def _loaded_model(recording: Recording, options: dict[str, Any]) -> Scorer:  # Any: as above
    from managed_cli.scoring.forward import ForwardScorer, require_torch
    from managed_cli.tokenizers import load_tokenizer

    for name in ("base_url", "api_key_env", "api_key_file"):
        if options[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for servers; transformers scores in this process")
    require_torch()
    model = options["model"] or recording.run_facts.get("tokenizer")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"`{recording.path}` does not say which weights sampled it",
            hint="name them with --model: a directory, or a Hugging Face name",
        )
    tokenizer = load_tokenizer(options["tokenizer"] or model)
    return ForwardScorer.load(model, tokenizer, device=options["device"], tokens_per_batch=options["tokens_per_batch"])


def _progress_teller(total: int, *, quiet: bool) -> Callable[[int], None]:
    """Says how far it is, every 10 s."""
    from managed_cli.cli.console import LINE_SECONDS, say

    finished, told = 0, time.monotonic()

    def tell(more: int) -> None:
        nonlocal finished, told
        finished += more
        if not quiet and time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            say(f"progress: {finished:,}/{total:,} rows")

    return tell


@contextlib.contextmanager
def _row_writer(path: str | None) -> Iterator[Callable[[RowReport], None]]:
    """Writes every row that it is given as a line of `path`; with None, nothing."""
    if path is None:
        yield lambda _: None
        return
    from managed_cli.cli.json_document import finite
    from managed_cli.cli.verify_view import row_document

    try:
        with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 (`-` and devices are meant as they are)

            def write(row: RowReport) -> None:
                file.write(json.dumps(finite(row_document(row)), allow_nan=False) + "\n")

            yield write
    except OSError as error:
        raise OutputError(f"cannot write to `{path}`: {(error.strerror or str(error)).lower()}") from error
