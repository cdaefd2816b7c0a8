"""`managed-cli logprobs`: options in, exit code out."""

from __future__ import annotations

from typing import Any

import click

from managed_cli.rollout.input_options import INPUT_FORMATS, ON_BAD_LINE

_AT_LEAST_ONE = click.IntRange(min=1)

_UNUSED_SAMPLING = {
    "n": 1,
    "max_tokens": 1,
    "max_total_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "stop": (),
    "stop_token_id": (),
    "nonfinite": "fail",
    "history": "template",
    "track_tree": False,
}
"""Options of `rollout` that have no meaning where nothing is sampled."""


@click.command(
    "logprobs",
    short_help="Record top-k logprobs of prompts, for distillation.",
    epilog="Exit codes: 0 every prompt is recorded; 2 usage; 3 some failed; 4 server or tokenizer; 5 input; 6 output; "
    "130/143 interrupted.",
)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--rows", is_flag=True, help="INPUT is a recording: score all tokens of its rows.")
@click.option("--top-k", type=_AT_LEAST_ONE, default=20, show_default=True, metavar="K", help="Tokens per position.")
@click.option("--out", default="logprobs.parquet", show_default=True, metavar="PATH", help="A file, or DIR/ of shards.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier output.")
@click.option("--resume", is_flag=True, help="Continue an earlier output: only what is not yet recorded is scored.")
@click.option("--retry-failed", is_flag=True, help="With --resume: score again what failed before.")
@click.option(
    "--rows-per-shard", type=_AT_LEAST_ONE, default=512, show_default=True, metavar="ROWS", help="Rows of a shard."
)
@click.option(
    "--server-type",
    type=click.Choice(["vllm", "sglang", "trl", "llamacpp", "local", "openai"]),
    required=True,
    help="What scores: a server that gives prompt logprobs.",
)
@click.option("--base-url", multiple=True, metavar="URL", help="Address of the server; repeated: several of one model.")
@click.option("--model", metavar="NAME", help="Model to ask for (default: the one the server has).")
@click.option("--tokenizer", metavar="NAME", help="Directory or Hugging Face name (default: what the server names).")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--api-key-file", metavar="FILE", help="File that holds the server's API key.")
@click.option(
    "--wait-for-server", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait for it so long."
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Fail a sample whose reply takes longer.",
)
@click.option("--context-length", type=_AT_LEAST_ONE, metavar="TOKENS", help="Longest prompt, where it does not say.")
@click.option(
    "--concurrency", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Samples in flight (default: 64 per server)."
)
@click.option(
    "--input-format", type=click.Choice(INPUT_FORMATS), default="auto", show_default=True, help="Of all lines."
)
@click.option("--prompt-field", metavar="FIELD", help="Field of the prompt text (default: prompt).")
@click.option("--id-field", metavar="FIELD", default="id", show_default=True, help="Field of the sample id.")
@click.option("--system", metavar="TEXT", help="System message for chats that have none.")
@click.option("--keep-last-assistant", is_flag=True, help="ShareGPT: score the last answer too instead of dropping it.")
@click.option("--on-bad-line", type=click.Choice(ON_BAD_LINE), default="fail", show_default=True, help="As in rollout.")
@click.option("--limit", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Use only so many, from the start.")
@click.option("--part", metavar="I/N", help="Use only part I of N, by sample id.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="After the first signal, wait so long for requests in flight.",
)
@click.option("--max-failures", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Stop once so many samples have failed.")
@click.option("--max-consecutive-failures", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Likewise, in a row.")
@click.option("--quiet", is_flag=True, help="Only errors and warnings on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON document on stdout.")
def logprobs_command(**options: Any) -> int:  # Any: click hands every option over by name
    """Record the K likeliest tokens and their logprobs at every position of the prompts in INPUT.

    INPUT is what `rollout` takes: text prompts, chats, token ids, in JSON lines or Parquet. A chat that ends with an
    assistant message is scored with it. With --rows, INPUT is a recording, and its rows are scored as they are.

    A row has `sample_id`, `prompt_tokens` [P], `prompt_topk_token_ids` and `prompt_topk_logprobs` [P][K], best first,
    raw (before temperature and filters); position 0, which nothing precedes, has an empty list. A reply that lacks
    anything of it fails its sample. Rows of --rows keep `choice_index` and `node_id`.

    \b
    managed-cli logprobs prompts.jsonl --server-type vllm --top-k 20
    managed-cli logprobs out.parquet --rows --server-type vllm --base-url http://teacher:8000
    """
    top_k = options.pop("top_k")
    rows, quiet, as_json, inputs = (options.pop(name) for name in ("rows", "quiet", "as_json", "inputs"))
    if rows and len(inputs) != 1:
        raise click.UsageError("--rows takes one recording as INPUT")
    from managed_cli.cli.logprobs_run import execute
    from managed_cli.cli.rollout_options import rollout_config
    from managed_cli.scoring.scorers import refuse_server_without_prompt_logprobs

    refuse_server_without_prompt_logprobs(options["server_type"], hint="vllm, sglang and trl score prompts")
    config = rollout_config({**_UNUSED_SAMPLING, **options})
    return execute(inputs, config, top_k=top_k, rows=rows, quiet=quiet, as_json=as_json)
