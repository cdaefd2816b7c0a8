"""The command line: commands load when they are called; every fault becomes one message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click

from managed_cli import __version__
from managed_cli.errors import DOCTOR_HINT, ExitCode, Interrupted, ManagedCliError, ServerContractError

COMMANDS = {
    "rollout": (
        "managed_cli.cli.rollout",
        "rollout_command",
        "Sample completions and record them, one row per choice.",
    ),
    "inputs": ("managed_cli.cli.inputs", "inputs_command", "Show how prompts are understood, and how long they are."),
    "inspect": ("managed_cli.cli.inspect", "inspect_command", "Show and check what was recorded."),
    "verify": ("managed_cli.cli.verify", "verify_command", "Score recorded rows again and compare."),
    "logprobs": ("managed_cli.cli.logprobs", "logprobs_command", "Record top-k logprobs of prompts, for distillation."),
    "merge": ("managed_cli.cli.merge", "merge_command", "Join the parts of a run."),
    "export": ("managed_cli.cli.export", "export_command", "Write what was recorded in a trainer's format."),
    "schema": ("managed_cli.cli.schema", "schema_command", "Describe the columns of a recording."),
    "doctor": ("managed_cli.cli.doctor", "doctor_command", "Probe a server and a tokenizer before a run."),
}
"""Name → (module, attribute, one line for `--help`). The module is imported only when its command runs."""


class LazyGroup(click.Group):
    """A click group whose commands are imported on use, so that `--help` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Commands in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        """The command, imported now; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """Write the list from `COMMANDS`, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each command has its own --help. Exit codes: 0 all recorded, 2 usage, 3 some samples failed, "
    "4 server, 5 input, 6 output, 130/143 interrupted.",
)
@click.version_option(__version__, "--version", message="managed-cli %(version)s")
def app() -> None:
    """Record rollouts of language models as Parquet rows that a trainer can trust.

    \b
    managed-cli rollout prompts.jsonl --max-tokens 128      (embedded engine)
    managed-cli rollout prompts.jsonl --server-type vllm    (a vLLM server at 127.0.0.1:8000)
    managed-cli inspect out.parquet
    """


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    # Arrow's own allocator keeps what it once needed: 30 to 80 MB in a run. It is chosen when Arrow is imported.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of `managed-cli ARGUMENTS`; every fault is told on stderr."""
    try:
        result = app.main(args=arguments, prog_name="managed-cli", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted before anything was begun", err=True)
        return int(ExitCode.SIGINT)
    except Interrupted as stop:  # a signal while nobody listened: no fault, and the exit code tells the rest
        click.echo(stop.message, err=True)
        return int(stop.exit_code)
    except ManagedCliError as error:
        if isinstance(error, ServerContractError) and error.hint is None:
            error.hint = DOCTOR_HINT
        click.echo(error.report(), err=True)
        return int(error.exit_code)
    except NotImplementedError as error:
        click.echo(f"error: {error}", err=True)
        return int(ExitCode.USAGE)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not a fault, but nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception:  # noqa: BLE001 (the last boundary: a bug of ours is told as one)
        traceback.print_exc()
        click.echo("error: this is a bug in managed-cli, not in your input; the lines above say where", err=True)
        return int(ExitCode.BUG)
    return result if isinstance(result, int) else int(ExitCode.OK)
