"""`managed-cli rollout`: options in, exit code out."""

from __future__ import annotations

import secrets
from typing import Any

import click

SEED_BITS = 31
"""A drawn run seed fits into a signed 32-bit integer."""


@click.command("rollout", short_help="Sample completions and record them.")
@click.argument("input_path", metavar="INPUT")
@click.option("--out", default="out.parquet", show_default=True, help="Output file, or directory of shards: DIR/.")
@click.option(
    "--server-type",
    type=click.Choice(["local", "vllm", "sglang", "trl", "llamacpp"]),
    default="local",
    show_default=True,
    help="What samples: the embedded engine, or a server of that kind.",
)
@click.option("--base-url", metavar="URL", help="Address of the server; by default the usual one of its kind.")
@click.option("--model", metavar="NAME", help="Model to ask for (default: the one it has); for local, a GGUF file.")
@click.option("--tokenizer", metavar="NAME", help="Directory or Hugging Face name; by default the server's.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option(
    "--wait-for-server",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait for one still loading.",
)
@click.option("--context-length", type=click.IntRange(min=1), metavar="TOKENS", help="Context, where it is not said.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Samples in flight (default: 64; local: 8).")
@click.option("-n", "n", type=click.IntRange(min=1), default=1, show_default=True, help="Choices per sample.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Most sampled tokens.")
@click.option("--max-total-tokens", type=click.IntRange(min=1), help="Most prompt + completion tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling; 1 keeps all.")
@click.option("--top-k", type=int, default=-1, show_default=True, help="Keep the k likeliest; -1 keeps all.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the best.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 changes nothing.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop string; may be repeated.")
@click.option("--stop-token-id", type=int, multiple=True, metavar="ID", help="Stop token id; may be repeated.")
@click.option("--seed", type=click.IntRange(min=0), help="Run seed; each sample's is derived from it (default: drawn).")
@click.option("--system", metavar="TEXT", help="System message for chats that have none.")
@click.option("--prompt-field", metavar="FIELD", help="Field of the prompt text (default: prompt).")
@click.option("--id-field", metavar="FIELD", default="id", show_default=True, help="Field of the sample id.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first samples.")
@click.option(
    "--history",
    type=click.Choice(["template", "verbatim"]),
    default="template",
    show_default=True,
    help="Earlier turns as the chat template rewrites them, or the sampled tokens as they are.",
)
@click.option("--track-tree", is_flag=True, help="Record every node of a conversation, not only its leaves.")
@click.option(
    "--nonfinite",
    type=click.Choice(["fail", "keep"]),
    default="fail",
    show_default=True,
    help="What a sampled token with logprob -inf does to its sample.",
)
@click.option("--rows-per-shard", type=click.IntRange(min=1), default=2048, show_default=True, help="Rows per shard.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="After SIGINT or SIGTERM, wait this long for requests in flight.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier output.")
@click.option("--dry-run", is_flag=True, help="Show the first prompts with their token ids; send nothing.")
@click.option("--quiet", is_flag=True, help="No progress; only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON document on stdout.")
def rollout_command(**options: Any) -> int:  # Any: click hands every option over by name
    """Sample completions for the prompts in INPUT and record them, one row per choice.

    INPUT is JSON lines (also gz, zst; - is stdin). Each line has `prompt` (text), `messages` (a chat)
    or `turns` (user messages that the model answers one by one); optionally `id`, `sampling` (overrides for
    that line) and further fields, which are kept in the row's metadata.

    \b
    managed-cli rollout prompts.jsonl -n 4 --max-tokens 256
    managed-cli rollout gsm8k.jsonl --prompt-field question --server-type vllm --out gsm8k.parquet
    """
    # The heavy imports belong to a run, not to --help.
    from managed_cli.cli.rollout_options import rollout_config
    from managed_cli.cli.rollout_run import execute

    if options["seed"] is None:
        options["seed"] = secrets.randbits(SEED_BITS)
    config = rollout_config(options)
    return execute(
        options["input_path"],
        config,
        dry_run=options["dry_run"],
        quiet=options["quiet"],
        as_json=options["as_json"],
    )
