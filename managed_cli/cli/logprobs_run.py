"""A run of `logprobs` from its config to its exit code: that of `rollout`, with prompts scored instead of continued."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import click

from managed_cli import __version__
from managed_cli.cli.console import counted, duration, say
from managed_cli.cli.rollout_report import Outcome, failed_lines, interrupted_early, last_line
from managed_cli.cli.rollout_run import run_to_its_outcome, server_names, tokenizer_facts
from managed_cli.errors import ConfigError, ExitCode, Interrupted, ServerRefused
from managed_cli.managed.servers import Server
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import CountedRow, Progress
from managed_cli.rollout.pool import ServerPool
from managed_cli.rollout.runner import Runner
from managed_cli.rollout.stop import Stop, listening_to_signals
from managed_cli.rollout.tasks import InputFiles, input_files, read_samples, validate_input
from managed_cli.scoring.prompt_scores import PROMPT_LOGPROBS, recorded_samples, score_prompt, score_recorded
from managed_cli.storage.reader import Recording, open_recording
from managed_cli.storage.shards import ShardedOutput, open_output

PROBE_TEXT = "One, two, three"
"""Any short text does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is scored: the samples of input files, or those of a recording.

    Attributes:
        samples: how many there are.
        fingerprint: of the input files; None for a recording.
    """

    name: str
    samples: int
    given: InputFiles | Recording
    fingerprint: str | None = None

    def read(self, config: RolloutConfig) -> Iterator[Any]:  # Any: tasks and bad lines, or recorded samples
        """The samples, as they are needed."""
        if isinstance(self.given, Recording):
            return recorded_samples(self.given, config.input)
        return read_samples(self.given, config.input)


def execute(inputs: Sequence[str], config: RolloutConfig, *, top_k: int, rows: bool, quiet: bool, as_json: bool) -> int:
    """The exit code of the whole run."""
    with contextlib.ExitStack() as stack:
        if rows:
            recording = open_recording(inputs[0])
            samples = sum(1 for _ in recorded_samples(recording, config.input))
            source = Source(name=inputs[0], samples=samples, given=recording)
        else:
            files = stack.enter_context(input_files(inputs))
            report = validate_input(files, config.input)
            source = Source(name=files.name, samples=report.samples, given=files, fingerprint=report.fingerprint)
        if not source.samples and config.input.part is None:
            raise ConfigError(f"`{source.name}` holds no rows to score")
        output = stack.enter_context(
            open_output(
                config.out,
                run_facts={},
                rows_per_shard=config.rows_per_shard,
                overwrite=config.overwrite,
                resume=config.resume,
                retry_failed=config.retry_failed,
                row_format=PROMPT_LOGPROBS,
            )
        )
        settings = _settings(config, top_k=top_k, rows=rows)
        output.refuse_other_settings(settings)
        return asyncio.run(_record(source, config, output, settings, quiet=quiet, as_json=as_json))


def _settings(config: RolloutConfig, *, top_k: int, rows: bool) -> dict[str, Any]:  # Any: JSON values
    """What decides what is recorded, and must be the same when a run is resumed."""
    facts = config.facts()
    kept = ("system", "input_format", "keep_last_assistant", "part")
    return {"recorded": "prompt logprobs", "top_k": top_k, "rows": rows, **{name: facts[name] for name in kept}}


async def _record(
    source: Source,
    config: RolloutConfig,
    output: ShardedOutput,
    settings: dict[str, Any],  # Any: JSON values
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
                server = pool.reference
                # One request that shows whether the server gives so many alternatives at all.
                probe = server.tokenizer.encode_prompt(PROBE_TEXT)
                await stop.unless_asked(server.backend.prompt_logprobs(probe, settings["top_k"]))
            except ServerRefused as refused:
                refused.hint = refused.hint or (
                    "a smaller --top-k, or a server that gives more (vLLM: --max-logprobs); "
                    "`managed-cli doctor` finds the largest"
                )
                raise
            except Interrupted as interrupted:
                say(interrupted_early(config))
                return int(interrupted.exit_code)
            identity = {
                "server_type": server.backend.server_type,
                "model": server.info.model,
                **tokenizer_facts(server),
            }
            facts = {**_facts(source, config, server), **identity, **settings}
            output.describe_run(facts, fingerprint={**settings, **identity})
            if not quiet:
                say(_start_lines(source, config, server, output, settings["top_k"]))
            progress = Progress(total=source.samples, seconds_without_server=lambda: pool.waiting_seconds)
            do = _scoring(source, settings["top_k"])
            runner = Runner(config, source.read(config), pool, output, progress, stop, do=do)
            outcome = await run_to_its_outcome(runner, pool, output, stop, quiet=quiet)
            _tell(outcome, facts, progress, quiet=quiet, as_json=as_json)
            return int(outcome.code)


def _scoring(source: Source, top_k: int) -> Any:  # Any: takes tasks or recorded samples, as `source` gives them
    async def score(sample: Any, server: Server, _: RolloutConfig) -> Sequence[CountedRow]:  # Any: as above
        if isinstance(source.given, Recording):
            return await score_recorded(sample, server, top_k=top_k)
        return await score_prompt(sample, server, top_k=top_k)

    return score


def _facts(source: Source, config: RolloutConfig, server: Server) -> dict[str, Any]:  # Any: JSON values
    """What a file says of the run that made it, beside its settings; no secrets."""
    return {
        "managed_cli": __version__,
        "python": platform.python_version(),
        "input": source.name,
        "samples": source.samples,
        "limit": config.input.limit,
        "input_fingerprint": source.fingerprint,
        "server": ", ".join(server_names(config, server)),
        "server_version": server.info.version,
        "context_length": server.info.context_length,
        "weight_version": server.info.weight_version,
        "logprobs_mode": "raw",
    }


def _start_lines(source: Source, config: RolloutConfig, server: Server, output: ShardedOutput, top_k: int) -> str:
    info = server.info
    earlier = f"\nresuming: {counted(len(output.recorded), 'sample')} recorded before" if config.resume else ""
    return (
        f"{source.name}: {counted(source.samples, 'sample')} to score with {counted(top_k, 'alternative')} a position, "
        f"in {config.out}{earlier}\n"
        f"{info.server_type} at {info.base_url}: {info.model}, up to {config.samples_in_flight():,} samples at once"
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
        lines = failed_lines(outcome, progress)
        if progress.rows:
            lines.append(f"{counted(progress.prompt_tokens, 'token')} scored in {duration(progress.seconds)}")
        say("\n".join([*lines, last_line(outcome, progress, inspectable=False)]))
    if as_json:
        summary = {
            **outcome.to_json(),
            "samples": progress.total,
            "recorded": progress.recorded,
            "failed": progress.failed,
            "settled_earlier": progress.earlier,
            "rows": progress.rows,
            "tokens": progress.prompt_tokens,
            "failure_classes": dict(sorted(progress.failure_classes.items())),
            "seconds": round(progress.seconds, 3),
            "model": facts["model"],
            "server": facts["server"],
            "top_k": facts["top_k"],
        }
        click.echo(json.dumps(summary))
