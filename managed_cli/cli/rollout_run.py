"""A run from its config to its exit code, and what it tells people on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from managed_cli import __version__
from managed_cli.backends._http import normalised_base_url
from managed_cli.cli.console import say, show_progress
from managed_cli.cli.rollout_dry_run import show_first_prompts
from managed_cli.cli.rollout_report import Outcome, interrupted_early, last_lines, start_lines, waiting_line
from managed_cli.errors import ExitCode, Interrupted, ManagedCliError
from managed_cli.managed.servers import Server
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import Progress
from managed_cli.rollout.pool import ServerPool
from managed_cli.rollout.runner import Runner
from managed_cli.rollout.sample_run import roll_out
from managed_cli.rollout.stop import Stop, ended_by_sigterm, listening_to_signals
from managed_cli.rollout.tasks import (
    BadLine,
    InputFiles,
    InputReport,
    SettledLine,
    Task,
    input_files,
    read_owed_samples,
    validate_input,
)
from managed_cli.storage.shards import ShardedOutput, open_output


def execute(inputs: Sequence[str], config: RolloutConfig, *, dry_run: bool, quiet: bool, as_json: bool) -> int:
    """The exit code of the whole run."""
    with ended_by_sigterm(), input_files(inputs) as source:
        if dry_run:
            report = validate_input(source, config.input)
            return asyncio.run(show_first_prompts(source, config, report, quiet=quiet, as_json=as_json))
        # Before any server is started or asked: what cannot be written to need not be sampled for.
        with open_output(
            config.out,
            run_facts={},
            rows_per_shard=config.rows_per_shard,
            overwrite=config.overwrite,
            resume=config.resume,
            retry_failed=config.retry_failed,
        ) as output:
            output.refuse_other_settings(config.settings())
            report = validate_input(source, config.input, output.standings if output.has_earlier else None)
            return asyncio.run(_record(source, config, report, output, quiet=quiet, as_json=as_json))


async def _record(
    source: InputFiles,
    config: RolloutConfig,
    report: InputReport,
    output: ShardedOutput,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    stop = Stop()
    with listening_to_signals(stop):
        async with contextlib.AsyncExitStack() as stack:
            pool = ServerPool(config.servers, tell=say)
            stack.push_async_callback(pool.aclose)
            try:
                await stop.unless_asked(pool.prepare())
            except Interrupted as interrupted:
                say(interrupted_early(config))
                return int(interrupted.exit_code)
            server = pool.reference
            server.backend.check_sampling(config.sampling)
            if config.server.server_type == "openai":
                warn_of_placeholders()
            facts = run_facts(config, server, report, source)
            output.describe_run(facts, fingerprint=fingerprint(config, server))
            if not quiet:
                say(start_lines(config, server, report, source, output))
            progress = Progress(total=report.samples, seconds_without_server=lambda: pool.waiting_seconds)
            progress.count_earlier(recorded=report.recorded_earlier, failed=report.failed_earlier)
            runner = Runner(config, _owed(source, config, report, output), pool, output, progress, stop, do=roll_out)
            outcome = await run_to_its_outcome(runner, pool, output, stop, quiet=quiet)
            _tell(outcome, facts, progress, quiet=quiet, as_json=as_json)
            return int(outcome.code)


def _owed(
    source: InputFiles, config: RolloutConfig, report: InputReport, output: ShardedOutput
) -> Iterator[Task | BadLine | SettledLine]:
    """The samples that are to be looked at; none where earlier sessions have settled them all."""
    if report.owes_nothing:
        return iter(())
    return read_owed_samples(source, config.input, output.standings if output.has_earlier else None)


def server_names(config: RolloutConfig, server: Server) -> list[str]:
    """Where the run's servers are, as its facts name them."""
    if len(config.servers) == 1:
        return [server.info.base_url]
    return [normalised_base_url(each.backend_config().base_url) for each in config.servers]


def warn_of_placeholders() -> None:
    """Say once, on every run, that these rows cannot be trained on; the warning of each context is then too much."""
    from managed_cli.managed.dummy import DummyTokensWarning

    warnings.simplefilter("ignore", DummyTokensWarning)
    say("warning: an OpenAI endpoint gives no token ids: rows hold placeholder tokens and cannot be trained on")


async def run_to_its_outcome(
    runner: Runner, pool: ServerPool, output: ShardedOutput, stop: Stop, *, quiet: bool
) -> Outcome:
    """How the run ended, once it has; what is unusual about its tokenizer is said before it begins."""
    note = tokenizer_note(pool.reference)
    if note is not None:
        say(f"note: {pool.reference.tokenizer.name}: {note}")
    fault = await _run_to_its_end(runner, stop, quiet=quiet)
    runner.progress.count_outages(pool.outages())
    return await _concluded(output, runner.progress, stop, fault)


async def _run_to_its_end(runner: Runner, stop: Stop, *, quiet: bool) -> ManagedCliError | None:
    """The fault that ended the run early, or None."""
    fault = None
    async with asyncio.TaskGroup() as tasks:
        telling = [] if quiet else [show_progress(runner.progress), _tell_of_stop(runner, stop)]
        tellers = [tasks.create_task(work) for work in telling]
        try:
            await runner.run()
        except ManagedCliError as error:
            fault = error
        finally:
            for teller in tellers:
                teller.cancel()
    return fault


async def _tell_of_stop(runner: Runner, stop: Stop) -> None:
    await stop.asked.wait()
    if runner.progress.in_flight and stop.exit_code is not None:
        say(waiting_line(runner.progress, runner.config.grace_seconds))


async def _concluded(output: ShardedOutput, progress: Progress, stop: Stop, fault: ManagedCliError | None) -> Outcome:
    """How the run ended; where every sample is settled, the output is finished."""
    where = f"{output.growing_path}/"
    if fault is None and progress.done == progress.total:
        try:
            where = str(await asyncio.to_thread(output.finish))
        except ManagedCliError as error:
            fault = error
    if fault is not None:
        state, code = "stopped", fault.exit_code
    elif progress.done == progress.total:
        state, code = "finished", ExitCode.SOME_FAILED if progress.failed else ExitCode.OK
    else:
        assert stop.exit_code is not None, "a run without a fault and without a signal settles every sample"
        state, code = "interrupted", stop.exit_code
    return Outcome(
        state=state,
        code=code,
        fault=fault,
        where=where,
        failures=str(output.failures_path) if output.failed_samples else None,
        rows_on_disk=output.rows_on_disk,
        samples_on_disk=output.summary.samples,
    )


def _tell(
    outcome: Outcome,
    facts: dict[str, Any],  # Any: JSON values
    progress: Progress,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    if outcome.fault is not None:
        say(outcome.fault.report())
    if not quiet or outcome.code is not ExitCode.OK:
        say(last_lines(outcome, progress))
    if as_json:
        summary = {
            **outcome.to_json(),
            **progress.to_json(),
            "model": facts["model"],
            "server": facts["server"],
            "seed": facts["sampling"]["seed"],
        }
        click.echo(json.dumps(summary))


def fingerprint(config: RolloutConfig, server: Server) -> dict[str, Any]:  # Any: JSON values
    """What must be the same for a run to be continued: every setting that changes data, and nothing of the input."""
    return {
        **config.settings(),
        "server_type": server.backend.server_type,
        "model": server.info.model,
        **tokenizer_facts(server),
        "logprobs_mode": str(server.info.logprobs_mode),
    }


def tokenizer_facts(server: Server) -> dict[str, str | None]:
    """Whose ids these are, and a hash of the chat template; nothing where there are no ids (the OpenAI dummy)."""
    if server.config.server_type == "openai":
        return {"tokenizer": None, "chat_template_sha256": None}
    return {"tokenizer": server.tokenizer.name, "chat_template_sha256": server.tokenizer.chat_template_hash()}


def tokenizer_note(server: Server) -> str | None:
    """What was unusual about loading the tokenizer, in words; None where nothing was."""
    if server.config.server_type == "openai":
        return None
    note = getattr(server.tokenizer, "note", None)
    return None if note is None else str(note)


def run_facts(
    config: RolloutConfig, server: Server, report: InputReport, source: InputFiles
) -> dict[str, Any]:  # Any: JSON values
    """What a file says of the run that made it; no secrets, and nothing that differs from one try to the next."""
    info = server.info
    return {
        "managed_cli": __version__,
        "python": platform.python_version(),
        "input": source.name,
        "samples": report.samples,
        "limit": config.input.limit,
        "input_fingerprint": report.fingerprint,
        "server_type": server.backend.server_type,
        "server": ", ".join(server_names(config, server)),
        "server_version": info.version,
        "model": info.model,
        "weights": info.tokenizer_name if server.backend.server_type == "local" else None,
        "context_length": info.context_length,
        "weight_version": info.weight_version,
        "logprobs_mode": str(info.logprobs_mode),
        "logprobs_mode_source": info.logprobs_mode_source,
        **tokenizer_facts(server),
        "tokenizer_note": tokenizer_note(server),
        **config.facts(),
    }
