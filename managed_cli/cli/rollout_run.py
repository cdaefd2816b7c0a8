"""A run from its config to its exit code, and what it tells people on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
from collections.abc import Iterator
from typing import Any

import click

from managed_cli import __version__
from managed_cli.cli.console import duration, printable, show_progress
from managed_cli.errors import ExitCode, ManagedCliError
from managed_cli.managed.servers import Server, server_for
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import Progress
from managed_cli.rollout.runner import Runner
from managed_cli.rollout.stop import Stop, listening_to_signals
from managed_cli.rollout.tasks import InputReport, InputSource, Task, input_source, read_tasks, validate_input
from managed_cli.storage.shards import ShardedOutput, open_output

DRY_RUN_PROMPTS = 3
"""How many prompts a dry run shows."""

DRY_RUN_TOKEN_IDS = 24
"""How many ids of each it shows before and after the gap."""


def execute(input_path: str, config: RolloutConfig, *, dry_run: bool, quiet: bool, as_json: bool) -> int:
    """The exit code of the whole run."""
    with input_source(input_path) as source:
        report = validate_input(source, config.input)
        if dry_run:
            return asyncio.run(_dry_run(source, config, report, as_json=as_json))
        # A look at the output before any server is started or asked; it is opened again with the run's facts.
        open_output(config.out, run_facts={}, rows_per_shard=1, overwrite=config.overwrite).close()
        return asyncio.run(_record(source, config, report, quiet=quiet, as_json=as_json))


async def _record(
    source: InputSource, config: RolloutConfig, report: InputReport, *, quiet: bool, as_json: bool
) -> int:
    stop = Stop()
    with listening_to_signals(stop):
        async with contextlib.AsyncExitStack() as stack:
            server = server_for(config.server)
            stack.push_async_callback(server.aclose)
            if not await _prepared(server, stop):
                return _exit_code(stop)
            server.backend.check_sampling(config.sampling)
            facts = run_facts(config, server, report, source)
            output = stack.enter_context(
                open_output(
                    config.out, run_facts=facts, rows_per_shard=config.rows_per_shard, overwrite=config.overwrite
                )
            )
            progress = Progress(total=report.samples)
            _say(quiet, _start_line(config, server, report, source))
            fault = await _run(Runner(config, read_tasks(source, config.input), server, output, progress, stop), quiet)
            return await _conclude(config, server, output, progress, stop, fault, as_json=as_json, quiet=quiet)


async def _prepared(server: Server, stop: Stop) -> bool:
    """Whether the server is ready; False when a signal came first."""
    preparing = asyncio.ensure_future(server.prepare())
    stopping = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait([preparing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            preparing.result()
            return True
        return False
    finally:
        stopping.cancel()
        preparing.cancel()
        with contextlib.suppress(asyncio.CancelledError, ManagedCliError):
            await preparing


async def _run(runner: Runner, quiet: bool) -> ManagedCliError | None:
    """The fault that ended the run early, or None."""
    showing = None if quiet else asyncio.ensure_future(show_progress(runner.progress))
    try:
        await runner.run()
    except ManagedCliError as error:
        return error
    finally:
        if showing is not None:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing
    return None


async def _conclude(
    config: RolloutConfig,
    server: Server,
    output: ShardedOutput,
    progress: Progress,
    stop: Stop,
    fault: ManagedCliError | None,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Finish the output where every sample is settled; tell how it ended; give the exit code."""
    settled = fault is None and progress.done == progress.total
    where = str(output.growing_path)
    if settled:
        where = str(await asyncio.to_thread(output.finish))
        code = ExitCode.SOME_FAILED if progress.failed else ExitCode.OK
    elif fault is not None:
        code = fault.exit_code
    else:
        code = ExitCode(_exit_code(stop))
    failures = str(output.failures_path) if progress.failed else None
    if as_json:
        click.echo(
            json.dumps(
                {
                    "state": "finished" if settled else "stopped" if fault else "interrupted",
                    "exit_code": int(code),
                    "out": where,
                    "failures": failures,
                    **progress.to_json(),
                    "model": server.info.model,
                    "server": server.info.base_url,
                    "seed": config.sampling.seed,
                }
            )
        )
    if fault is not None:
        click.echo(fault.report(), err=True)
    _say(quiet and settled, _last_lines(progress, where, failures, settled=settled, code=code))
    return int(code)


def _last_lines(progress: Progress, where: str, failures: str | None, *, settled: bool, code: ExitCode) -> str:
    rows = f"{progress.rows} rows of {progress.recorded} samples"
    lines = []
    if settled:
        lines.append(
            f"recorded {rows} in {where}: {progress.completion_tokens} completion tokens in "
            f"{duration(progress.seconds)} ({progress.tokens_per_second():.0f} tok/s)"
        )
    if failures:
        classes = ", ".join(f"{count} {name}" for name, count in sorted(progress.failure_classes.items()))
        lines.append(f"{progress.failed} of {progress.total} samples failed ({classes}); see {failures}")
    if progress.fork_reasons:
        forks = ", ".join(f"{count} {name}" for name, count in sorted(progress.fork_reasons.items()))
        lines.append(f"conversations that could not be kept in one row: {forks}")
    if settled:
        return "\n".join(lines)
    word = "interrupted" if code in (ExitCode.SIGINT, ExitCode.SIGTERM) else "stopped"
    if progress.rows:
        lines.append(
            f"{word}: {progress.done} of {progress.total} samples are settled, {rows} are in {where}/; "
            f"look at them with: managed-cli inspect {where}"
        )
    else:
        lines.append(f"{word}: nothing was recorded")
    return "\n".join(lines)


def _exit_code(stop: Stop) -> int:
    return int(stop.exit_code if stop.exit_code is not None else ExitCode.BUG)


def _start_line(config: RolloutConfig, server: Server, report: InputReport, source: InputSource) -> str:
    info = server.info
    return (
        f"{report.samples} samples of {source.name} with {info.model} on {server.backend.server_type}"
        f"{'' if config.server.server_type == 'local' else ' at ' + info.base_url}: "
        f"{report.choices(config.sampling.n)} rows to record in {config.out}"
    )


def _say(quiet: bool, text: str) -> None:
    if not quiet and text:
        click.echo(text, err=True)


def run_facts(
    config: RolloutConfig, server: Server, report: InputReport, source: InputSource
) -> dict[str, Any]:  # Any: JSON values
    """What a file says of the run that made it; no secrets, and nothing that differs from one try to the next."""
    info = server.info
    return {
        "managed_cli": __version__,
        "python": platform.python_version(),
        "input": source.name,
        "samples": report.samples,
        "input_fingerprint": report.fingerprint,
        "server_type": server.backend.server_type,
        "server": "in process" if config.server.server_type == "local" else info.base_url,
        "server_version": info.version,
        "model": info.model,
        "context_length": info.context_length,
        "weight_version": info.weight_version,
        "logprobs_mode": str(info.logprobs_mode),
        "logprobs_mode_source": info.logprobs_mode_source,
        "tokenizer": server.tokenizer.name,
        "chat_template_sha256": server.tokenizer.chat_template_hash(),
        **config.facts(),
    }


async def _dry_run(source: InputSource, config: RolloutConfig, report: InputReport, *, as_json: bool) -> int:
    """Show the first prompts as they would be sent; no sampling request is."""
    server = server_for(config.server)
    try:
        await server.prepare()
        server.backend.check_sampling(config.sampling)
        shown = []
        for task in _first_tasks(source, config):
            async with server.managed_server(history=config.history) as managed:
                encoding = await managed.plan(prompt=task.prompt, messages=_first_messages(task), tools=task.tools)
            shown.append((task, encoding.text, encoding.token_ids))
    finally:
        await server.aclose()
    if as_json:
        prompts = [
            {"sample_id": task.sample_id, "source": task.source, "text": text, "token_ids": ids, "length": len(ids)}
            for task, text, ids in shown
        ]
        click.echo(json.dumps({"samples": report.samples, "prompts": prompts}, ensure_ascii=False))
        return int(ExitCode.OK)
    for task, text, ids in shown:
        click.echo(f"sample {task.sample_id} ({task.source}): {len(ids)} tokens\n{printable(text)}\n{_ids_line(ids)}\n")
    click.echo(f"{report.samples} samples would be sent; this was a dry run and none was")
    return int(ExitCode.OK)


def _first_tasks(source: InputSource, config: RolloutConfig) -> Iterator[Task]:
    for _, task in zip(range(DRY_RUN_PROMPTS), read_tasks(source, config.input), strict=False):
        yield task


def _first_messages(task: Task) -> list[Any] | None:  # Any: messages as templates take them
    if task.turns is None:
        return None if task.messages is None else list(task.messages)
    system = [{"role": "system", "content": task.system}] if task.system is not None else []
    return [*system, {"role": "user", "content": task.turns[0]}]


def _ids_line(ids: list[int]) -> str:
    if len(ids) <= 2 * DRY_RUN_TOKEN_IDS:
        return str(ids)
    head = ", ".join(map(str, ids[:DRY_RUN_TOKEN_IDS]))
    tail = ", ".join(map(str, ids[-DRY_RUN_TOKEN_IDS:]))
    return f"[{head}, … {len(ids) - 2 * DRY_RUN_TOKEN_IDS} more …, {tail}]"
