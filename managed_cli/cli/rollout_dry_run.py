"""`rollout --dry-run`: the first prompts as they would be sent; nothing is sampled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import click

from managed_cli.cli.console import counted, printable
from managed_cli.errors import ExitCode
from managed_cli.managed.servers import Server, server_for
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.tasks import InputFiles, InputReport, Task, read_tasks
from managed_cli.tracking.masking import PromptEncoding

SHOWN_PROMPTS = 3
"""How many prompts are shown: one of each kind of line, as a rule."""

SHOWN_TOKEN_IDS = 24
"""How many ids of a prompt are shown at its beginning, and again at its end."""


async def show_first_prompts(source: InputFiles, config: RolloutConfig, report: InputReport, *, as_json: bool) -> int:
    """The exit code, once the first prompts stand on stdout."""
    server = server_for(config.server.model_copy(update={"probe_logprobs_mode": False}))
    try:
        await server.prepare()
        server.backend.check_sampling(config.sampling)
        tasks = itertools.islice(read_tasks(source, config.input), SHOWN_PROMPTS)
        prompts = [(task, await _first_prompt(task, server, config)) for task in tasks]
    finally:
        await server.aclose()
    if as_json:
        click.echo(json.dumps(_document(report, prompts)))
    else:
        click.echo(_text(report, prompts))
    return int(ExitCode.OK)


async def _first_prompt(task: Task, server: Server, config: RolloutConfig) -> PromptEncoding:
    """What would be sent first: a conversation's later turns depend on what is sampled."""
    async with server.managed_server(history=config.history) as managed:
        return await managed.plan(
            prompt=task.prompt, prompt_ids=task.prompt_ids, messages=task.first_messages, tools=task.tools
        )


def _document(report: InputReport, prompts: Sequence[tuple[Task, PromptEncoding]]) -> dict[str, Any]:  # Any: JSON
    return {
        "samples": report.samples,
        "prompts": [
            {
                "sample_id": task.sample_id,
                "source": task.source,
                "text": prompt.text,
                "token_ids": list(prompt.token_ids),
                "length": len(prompt.token_ids),
            }
            for task, prompt in prompts
        ],
    }


def _text(report: InputReport, prompts: Sequence[tuple[Task, PromptEncoding]]) -> str:
    blocks = [
        f"sample {printable(task.sample_id)} ({printable(task.source)}): {counted(len(prompt.token_ids), 'token')}\n"
        f"{printable(prompt.text)}\n{_ids_in_words(prompt.token_ids)}"
        for task, prompt in prompts
    ]
    more = report.samples - len(prompts)
    rest = f" and {more:,} more would be" if more else " would be"
    blocks.append(f"dry run: nothing was sampled; the {counted(len(prompts), 'sample')} above{rest} sent")
    return "\n\n".join(blocks)


def _ids_in_words(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * SHOWN_TOKEN_IDS:
        return str(list(ids))
    head = ", ".join(map(str, ids[:SHOWN_TOKEN_IDS]))
    tail = ", ".join(map(str, ids[-SHOWN_TOKEN_IDS:]))
    return f"[{head}, … {len(ids) - 2 * SHOWN_TOKEN_IDS:,} more …, {tail}]"
