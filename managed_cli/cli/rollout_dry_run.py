"""`rollout --dry-run`: the first prompts as they would be sent, and how long all are; nothing is sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import click

from managed_cli.cli.console import LINE_SECONDS, counted, duration, printable, say
from managed_cli.cli.inputs import lengths_json
from managed_cli.errors import ExitCode
from managed_cli.managed.servers import Server, server_for
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.survey import Survey
from managed_cli.rollout.tasks import InputFiles, InputReport, Task, read_samples, read_tasks
from managed_cli.tracking.masking import PromptEncoding

SHOWN_PROMPTS = 3
"""How many prompts are shown: one of each kind of line, as a rule."""

SHOWN_TOKEN_IDS = 24
"""How many ids of a prompt are shown at its beginning, and again at its end."""

SAMPLES_AT_ONCE = 64
"""Prompts are counted in threads, so many in one go: a thread for each would cost more than the counting."""

OVER_NETWORK_SECONDS = 20.0
"""Where the server counts, a request or two for each prompt, it is asked for so long; what is left is not counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """The tokens of the prompts, as far as they were counted; `seconds` is how long that took."""

    survey: Survey
    seconds: float
    is_complete: bool


async def show_first_prompts(
    source: InputFiles, config: RolloutConfig, report: InputReport, *, quiet: bool, as_json: bool
) -> int:
    """The exit code, once the first prompts and the lengths of all stand on stdout."""
    server = server_for(config.server.model_copy(update={"probe_logprobs_mode": False}))
    try:
        await server.prepare()
        server.backend.check_sampling(config.sampling)
        if config.server.server_type == "openai":
            from managed_cli.cli.rollout_run import warn_of_placeholders  # which imports this module

            warn_of_placeholders()
        tasks = itertools.islice(read_tasks(source, config.input), SHOWN_PROMPTS)
        prompts = [(task, await _first_prompt(task, server, config)) for task in tasks]
        if not as_json:
            click.echo(_prompts_in_words(prompts))  # before all are counted, which may take a while
        lengths = None if config.server.server_type == "openai" else await count_all(source, config, server, quiet)
    finally:
        await server.aclose()
    if as_json:
        click.echo(json.dumps(_document(report, prompts, lengths)))
    else:
        if lengths is not None:
            _show_lengths(lengths, report)
        click.echo(f"\n{_last_line(report, prompts)}")
    return int(ExitCode.OK)


async def count_all(source: InputFiles, config: RolloutConfig, server: Server, quiet: bool) -> Lengths:
    """The lengths of all prompts, against the context and `--max-total-tokens`; memory is the same for any number."""
    known = (server.info.context_length, config.server.context_length, config.max_total_tokens)
    budget = min((limit for limit in known if limit is not None), default=None)
    survey, samples = Survey(server.tokenizer, budget, config.sampling), read_samples(source, config.input)
    over_network = server.tokenizer.over_network

    def add_some() -> bool:
        some = list(itertools.islice(samples, 1 if over_network else SAMPLES_AT_ONCE))
        for sample in some:
            survey.add(sample)
        return bool(some)

    started = told = time.monotonic()
    is_complete = False
    while not (over_network and time.monotonic() - started >= OVER_NETWORK_SECONDS):
        if not await asyncio.to_thread(add_some):
            is_complete = True
            break
        if not quiet and time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            say(f"progress: {survey.samples:,} samples")
    return Lengths(survey, time.monotonic() - started, is_complete)


async def _first_prompt(task: Task, server: Server, config: RolloutConfig) -> PromptEncoding:
    """What would be sent first: a conversation's later turns depend on what is sampled."""
    async with server.managed_server(history=config.history) as managed:
        return await managed.plan(
            prompt=task.prompt, prompt_ids=task.prompt_ids, messages=task.first_messages, tools=task.tools
        )


def _document(
    report: InputReport, prompts: Sequence[tuple[Task, PromptEncoding]], lengths: Lengths | None
) -> dict[str, Any]:  # Any: JSON values
    return {
        "samples": report.samples,
        "tokens": None if lengths is None else _lengths_json(lengths),
        "prompts": [
            {
                "sample_id": task.sample_id,
                "source": task.source,
                "text": prompt.text,
                "token_ids": prompt.token_ids,
                "length": len(prompt.row),
            }
            for task, prompt in prompts
        ],
    }


def _lengths_json(lengths: Lengths) -> dict[str, Any]:  # Any: JSON values
    survey = lengths.survey
    assert survey.lengths is not None, "a tokenizer was given"
    return {
        **lengths_json(survey.lengths, survey.tokenizer_name),
        "complete": lengths.is_complete,
        "cannot_be_used": survey.bad_count,
    }


def _show_lengths(lengths: Lengths, report: InputReport) -> None:
    from managed_cli.cli import inputs_view, page

    sheet, survey = page.Page(), lengths.survey
    assert survey.lengths is not None, "a tokenizer was given"
    inputs_view.show_lengths(sheet, survey.lengths, survey.tokenizer_name or "")
    if survey.bad_count:
        inputs_view.show_bad_lines(sheet, survey)
    if not lengths.is_complete:
        sheet.line()
        sheet.line(
            f"only the first {survey.samples:,} of {counted(report.samples, 'sample')} were counted, in "
            f"{duration(lengths.seconds)}: the server counts them; --tokenizer NAME counts here, and all of them"
        )


def _prompts_in_words(prompts: Sequence[tuple[Task, PromptEncoding]]) -> str:
    return "\n\n".join(
        f"sample {printable(task.sample_id)} ({printable(task.source)}): {counted(len(prompt.row), 'token')}\n"
        f"{printable(prompt.text)}\n{_ids_in_words(prompt.token_ids)}"
        for task, prompt in prompts
    )


def _last_line(report: InputReport, prompts: Sequence[tuple[Task, PromptEncoding]]) -> str:
    more = report.samples - len(prompts)
    rest = f" and {more:,} more would be" if more else " would be"
    return f"dry run: nothing was sampled; the {counted(len(prompts), 'sample')} above{rest} sent"


def _ids_in_words(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * SHOWN_TOKEN_IDS:
        return str(list(ids))
    head = ", ".join(map(str, ids[:SHOWN_TOKEN_IDS]))
    tail = ", ".join(map(str, ids[-SHOWN_TOKEN_IDS:]))
    return f"[{head}, … {len(ids) - 2 * SHOWN_TOKEN_IDS:,} more …, {tail}]"
