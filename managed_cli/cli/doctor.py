"""`managed-cli doctor`: what a server and a tokenizer do, before a run depends on it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from managed_cli.errors import ExitCode

if TYPE_CHECKING:
    from managed_cli.doctor.findings import Checkup
    from managed_cli.managed.config import APIServerConfig


@click.command(
    "doctor",
    short_help="Probe a server and a tokenizer before a run.",
    epilog="Exit codes: 0 recording is safe; 2 usage; 4 it is not, or the tokenizer cannot be loaded.",
)
@click.option(
    "--server-type",
    type=click.Choice(["local", "vllm", "sglang", "trl", "llamacpp", "openai"]),
    help="What samples: the embedded engine (local), or a server of that kind.",
)
@click.option("--base-url", metavar="URL", help="Address of the server (default: the usual one of its kind).")
@click.option("--model", metavar="NAME", help="Model to ask for (default: the one it has); for local, a GGUF file.")
@click.option(
    "--tokenizer",
    metavar="NAME",
    help="Directory or Hugging Face name (default: what the server names); alone: only it.",
)
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--api-key-file", metavar="FILE", help="File that holds the server's API key.")
@click.option(
    "--wait-for-server",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for a server that is still loading.",
)
@click.option(
    "--context-length",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Most prompt + completion tokens, where the server does not say.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
def doctor_command(as_json: bool, **options: Any) -> int:  # Any: click hands every option over by name
    """Ask a server and its tokenizer what a recording rests on, and say what is right and what is not.

    Is it reachable, are its ids ours, does it take ids as they are and send those that it sampled, end token included,
    each with its own logprob, raw or processed; does it honour seeds and stop strings; does the chat template keep
    earlier turns. Nothing is recorded; up to a thousand tokens are sampled.

    \b
    managed-cli doctor --server-type vllm
    managed-cli doctor --server-type sglang --base-url http://gpu7:30000 --json
    managed-cli doctor --tokenizer Qwen/Qwen3-8B
    """
    if options["server_type"] is None:
        if options["tokenizer"] is None:
            raise click.UsageError("Missing option '--server-type' (or --tokenizer, which is looked at alone).")
        given = [name for name in ("base_url", "model", "api_key_env", "api_key_file") if options[name] is not None]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} belongs to --server-type")
        from managed_cli.doctor.checkup import examine_tokenizer_alone

        checkup = examine_tokenizer_alone(options["tokenizer"])
    else:
        from managed_cli.doctor.checkup import examine_server

        config = _config(options)
        if sys.stderr.isatty():  # the report comes as a whole, and only then
            click.echo(f"probing {options['server_type']}: seconds on a GPU, a minute on a CPU", err=True)
        checkup = asyncio.run(examine_server(config))
    if as_json:
        click.echo(json.dumps(_document(checkup, options)))
    else:
        _show(checkup)
    return int(ExitCode.OK if checkup.is_safe else ExitCode.SERVER)


def _config(options: dict[str, Any]) -> APIServerConfig:  # Any: as above
    from managed_cli.backends._http import normalised_base_url
    from managed_cli.cli.rollout_options import api_key
    from managed_cli.errors import ConfigError
    from managed_cli.managed.config import APIServerConfig

    if options["server_type"] == "local" and options["base_url"] is not None:
        raise ConfigError("--base-url names a server, but the embedded engine has no address")
    if options["base_url"] is not None:
        normalised_base_url(options["base_url"])
    return APIServerConfig(
        server_type=options["server_type"],
        base_url=options["base_url"],
        model_name=options["model"],
        tokenizer_name=options["tokenizer"],
        api_key=api_key(options["api_key_env"], options["api_key_file"]),
        wait_for_server=options["wait_for_server"],
        context_length=options["context_length"],
    )


def _document(checkup: Checkup, options: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
    return {
        "subject": checkup.subject,
        "server_type": options["server_type"],
        "safe": checkup.is_safe,
        "findings": [
            {"check": finding.check, "level": str(finding.level), "said": finding.said, "advice": finding.advice}
            for finding in checkup.findings
        ],
    }


def _show(checkup: Checkup) -> None:
    from managed_cli.cli.findings_view import show_checkup
    from managed_cli.cli.page import Page

    show_checkup(Page(), checkup)
