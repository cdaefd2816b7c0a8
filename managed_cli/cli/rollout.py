"""`managed-cli rollout`: options in, exit code out."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from managed_cli.rollout.input_options import INPUT_FORMATS, ON_BAD_LINE

SEED_BITS = 31
"""A drawn run seed fits into a signed 32-bit integer."""


def _from_elsewhere(
    parameter: click.Parameter,
    ctx: click.Context,
    given: Mapping[str, Any],
    value: Any,
    source: ParameterSource,
) -> tuple[Any, ParameterSource]:  # Any: click's raw values
    """The raw value of a parameter and its source: as click found it, unless it is a default that is set elsewhere."""
    if ctx.resilient_parsing:
        return value, source
    from managed_cli.cli.rollout_settings import Elsewhere

    elsewhere = Elsewhere.of(ctx, given)
    setting = None if source is ParameterSource.COMMANDLINE and value != () else elsewhere.find_setting(parameter, ctx)
    return (value, source) if setting is None else (setting.value, setting.source)


class _Inputs(click.Argument):
    """INPUT..., which a settings file may name."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """As for every argument; of a command line without one, what the file says."""
        return _from_elsewhere(self, ctx, opts, *super().consume_value(ctx, opts))


class _Option(click.Option):
    """An option that stands under a heading of `--help`, and that the environment or a file may set."""

    def __init__(self, *declarations: Any, section: str = "Run", **settings: Any) -> None:  # Any: click's own
        super().__init__(*declarations, **settings)
        self.section = section

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """As for every option; of one that is not on the command line, what is said elsewhere."""
        return _from_elsewhere(self, ctx, opts, *super().consume_value(ctx, opts))


class _SectionedCommand(click.Command):
    """A command whose `--help` lists its options under headings: thirty in one row are not read."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One list for each heading, in the order of the options; what click adds (`--help`) comes last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        for option in options:
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(option, "section", "Run"), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


_server = functools.partial(click.option, cls=_Option, section="Server")
_sampling = functools.partial(click.option, cls=_Option, section="Sampling")
_input = functools.partial(click.option, cls=_Option, section="Input")
_output = functools.partial(click.option, cls=_Option, section="Output")
_run = functools.partial(click.option, cls=_Option, section="Run")
_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(
    "rollout",
    cls=_SectionedCommand,
    short_help="Sample completions and record them.",
    epilog="Settings can also stand in the environment (MANAGED_CLI_*, as in MANAGED_CLI_MAX_TOKENS=64) or in a file "
    "(max-tokens = 64). Precedence: flag, environment, file, default.",
)
@click.argument("inputs", cls=_Inputs, metavar="INPUT...", nargs=-1)
@_output(
    "--out", default="out.parquet", show_default=True, metavar="PATH", help="A file, or DIR/ for a directory of shards."
)
@_output("--overwrite", is_flag=True, help="Replace an earlier output.")
@_output("--resume", is_flag=True, help="Continue an earlier output: only what is not yet recorded is sampled.")
@_output("--retry-failed", is_flag=True, help="With --resume: sample again what failed before.")
@_output(
    "--rows-per-shard",
    type=_AT_LEAST_ONE,
    default=2048,
    show_default=True,
    metavar="ROWS",
    help="Rows are safe on disk in shards of so many; --out FILE ends as one file.",
)
@_server(
    "--server-type",
    type=click.Choice(["local", "vllm", "sglang", "trl", "llamacpp", "openai"]),
    default="local",
    show_default=True,
    help="What samples: the embedded engine (local), or a server of that kind; openai only as an opt-in dummy.",
)
@_server(
    "--base-url",
    multiple=True,
    metavar="URL",
    help="Address of the server (default: the usual one of its kind); repeated: several servers of one model.",
)
@_server("--model", metavar="NAME", help="Model to ask for (default: the one it has); for local, a GGUF file.")
@_server("--tokenizer", metavar="NAME", help="Directory or Hugging Face name (default: what the server names).")
@_server("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@_server("--api-key-file", metavar="FILE", help="File that holds the server's API key.")
@_server(
    "--wait-for-server",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for a server that is still loading, or that went away in mid-run.",
)
@_server(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Fail a sample whose reply takes longer (default: wait; a limit cuts long answers, which skews the data).",
)
@_server(
    "--context-length",
    type=_AT_LEAST_ONE,
    metavar="TOKENS",
    help="Most prompt + completion tokens, where the server does not say.",
)
@_server(
    "--concurrency",
    type=_AT_LEAST_ONE,
    metavar="SAMPLES",
    help="Samples in flight (default: 64 per server; local: 4).",
)
@_sampling(
    "-n",
    "n",
    type=_AT_LEAST_ONE,
    default=1,
    show_default=True,
    metavar="CHOICES",
    help="Choices per sample, each a row of its own.",
)
@_sampling(
    "--max-tokens",
    type=_AT_LEAST_ONE,
    default=512,
    show_default=True,
    metavar="TOKENS",
    help="Most sampled tokens per choice.",
)
@_sampling("--max-total-tokens", type=_AT_LEAST_ONE, metavar="TOKENS", help="Most prompt + completion tokens per row.")
@_sampling(
    "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, metavar="T", help="0 is greedy."
)
@_sampling("--top-p", type=float, default=1.0, show_default=True, metavar="P", help="Nucleus sampling; 1 keeps all.")
@_sampling("--top-k", type=int, default=-1, show_default=True, metavar="K", help="Keep the K likeliest; -1 keeps all.")
@_sampling(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    metavar="P",
    help="Drop tokens below this share of the likeliest.",
)
@_sampling("--repetition-penalty", type=float, default=1.0, show_default=True, metavar="X", help="1 changes nothing.")
@_sampling("--stop", multiple=True, metavar="TEXT", help="Stop string; may be repeated.")
@_sampling("--stop-token-id", type=int, multiple=True, metavar="ID", help="Stop token id; may be repeated.")
@_sampling(
    "--seed",
    type=click.IntRange(min=0),
    metavar="SEED",
    help="Run seed; each sample's own is derived from it (default: drawn, and shown).",
)
@_sampling(
    "--nonfinite",
    type=click.Choice(["fail", "keep"]),
    default="fail",
    show_default=True,
    help="What a sampled token with logprob -inf does to its sample.",
)
@_input(
    "--input-format",
    type=click.Choice(INPUT_FORMATS),
    default="auto",
    show_default=True,
    help="What the lines are; auto tells line by line.",
)
@_input("--prompt-field", metavar="FIELD", help="Field of the prompt text (default: prompt).")
@_input("--id-field", metavar="FIELD", default="id", show_default=True, help="Field of the sample id.")
@_input("--system", metavar="TEXT", help="System message for chats that have none.")
@_input("--keep-last-assistant", is_flag=True, help="ShareGPT: continue a last answer instead of dropping it.")
@_input(
    "--on-bad-line",
    type=click.Choice(ON_BAD_LINE),
    default="fail",
    show_default=True,
    help="A line that cannot be used ends the run before it begins, or is recorded as a failure.",
)
@_input("--limit", type=_AT_LEAST_ONE, metavar="SAMPLES", help="Use only so many, from the start.")
@_input(
    "--part",
    metavar="I/N",
    help="Use only part I of N, by sample id; N runs with the same --seed cover the input once (see `merge`).",
)
@_input(
    "--history",
    type=click.Choice(["template", "verbatim"]),
    default="template",
    show_default=True,
    help="Earlier turns as the chat template rewrites them, or the sampled tokens as they are.",
)
@_output("--track-tree", is_flag=True, help="Record every node of a conversation, not only its leaves.")
@_run("--config", metavar="FILE", help="TOML file with settings: options' names as keys, and inputs = [...].")
@_run("--print-config", is_flag=True, help="Print all settings and where each is from, as a --config file; no run.")
@_run("--dry-run", is_flag=True, help="Show the first prompts with their ids, and all lengths; sample nothing.")
@_run(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="After the first Ctrl-C (SIGINT) or SIGTERM, wait so long for requests in flight.",
)
@_run(
    "--max-failures",
    type=_AT_LEAST_ONE,
    metavar="SAMPLES",
    help="Stop, resumable, once so many samples have failed.",
)
@_run(
    "--max-consecutive-failures",
    type=_AT_LEAST_ONE,
    metavar="SAMPLES",
    help="Stop, resumable, once so many samples in a row have failed.",
)
@_run("--quiet", is_flag=True, help="Only errors and warnings on stderr.")
@_run("--json", "as_json", is_flag=True, help="Print the summary as one JSON document on stdout.")
@click.pass_context
def rollout_command(ctx: click.Context, /, **options: Any) -> int:  # Any: click hands every option over by name
    """Sample completions for the prompts in INPUT and record them, one row per choice.

    INPUT is JSON lines (also gz, zst; - is stdin) or Parquet; several files and quoted globs are read in order.
    Each line has `prompt` (text), `messages` (a chat) or `turns` (user messages that the model answers one by
    one); optionally `id`, `sampling` (overrides for that line) and further fields, which are kept in the row's
    metadata. `managed-cli inputs` shows how lines are understood, other dialects included.

    \b
    managed-cli rollout prompts.jsonl -n 4 --max-tokens 256
    managed-cli rollout gsm8k.jsonl --prompt-field question --server-type vllm --out gsm8k.parquet
    """
    # The heavy imports belong to a run, not to --help.
    from managed_cli.cli.rollout_settings import settle_key_place, toml_text, with_places
    from managed_cli.errors import ConfigError

    if not options["inputs"] and not options["print_config"]:
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
    settle_key_place(options, ctx)
    try:
        if not options["print_config"]:
            return _run_of(dict(options))
        _check(dict(options))
    except ConfigError as error:
        raise with_places(error, ctx) from error
    click.echo(toml_text(ctx, options))
    return 0


def _check(options: dict[str, Any]) -> None:  # Any: as above
    """Raise what a run with these options would, before it looks at inputs, outputs and servers."""
    from managed_cli.cli.rollout_options import check_without_a_server, rollout_config

    _draw_seed(options, earlier=0 if options["resume"] else None)  # any seed: the earlier output is not looked at
    check_without_a_server(rollout_config(options))


def _run_of(options: dict[str, Any]) -> int:  # Any: as above
    from managed_cli.cli.rollout_options import earlier_seed, rollout_config
    from managed_cli.cli.rollout_run import execute

    continues = options["resume"] and options["seed"] is None
    _draw_seed(options, earlier=earlier_seed(options["out"]) if continues else None)
    config = rollout_config(options)
    return execute(
        options["inputs"],
        config,
        dry_run=options["dry_run"],
        quiet=options["quiet"],
        as_json=options["as_json"],
    )


def _draw_seed(options: dict[str, Any], *, earlier: int | None) -> None:  # Any: as above
    """Set the run's seed where none was given: that of the run that is continued, or another.

    Raises:
        ConfigError: a part of a run, which must have the seed of the other parts.
    """
    from managed_cli.errors import ConfigError

    if options["seed"] is None:
        options["seed"] = earlier
    if options["seed"] is None and options["part"] is not None:
        raise ConfigError(
            "--part needs --seed, the same for every part", hint="parts with different seeds are different runs"
        )
    if options["seed"] is None:
        options["seed"] = secrets.randbits(SEED_BITS)
