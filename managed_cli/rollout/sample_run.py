"""One sample, from its task to its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from managed_cli.managed.server import ManagedServer
from managed_cli.managed.servers import Server
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.samples import Task
from managed_cli.tracking.masking import TrackedNode
from managed_cli.types import Message, SamplingParams

SEED_BITS = 31
"""Seeds fit into a signed 32-bit integer, which every server takes."""


def derived_seed(run_seed: int, sample_id: str, turn: int) -> int:
    """A seed of its own for each sample and turn, the same in every run with this run seed.

    Servers given one seed for all would sample the same tokens for repeated prompts.
    """
    digest = hashlib.sha256(f"{run_seed}\0{sample_id}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def task_sampling(task: Task, run: SamplingParams, turn: int, *, last_turn: bool) -> SamplingParams:
    """What to send for one turn of a task: its overrides, its own seed, and n choices on the last turn only."""
    sampling = task.sampling(run)
    if "seed" in task.overrides:
        assert sampling.seed is not None
        seed = sampling.seed + turn
    else:
        assert run.seed is not None, "the command line draws a run seed"
        seed = derived_seed(run.seed, task.sample_id, turn)
    return msgspec.structs.replace(sampling, seed=seed, n=sampling.n if last_turn else 1)


def task_metadata(task: Task) -> dict[str, Any]:  # Any: JSON values
    """What a row says of its input."""
    metadata: dict[str, Any] = {"sample_id": task.sample_id, "source": task.source}
    if task.fields:
        metadata["fields"] = dict(task.fields)
    return metadata


async def roll_out(task: Task, server: Server, config: RolloutConfig) -> list[TrackedNode]:
    """The rows of one sample: all its choices, and in tree mode every node.

    Raises:
        ServerError, InputError, AlignmentError: the sample fails; nothing of it is a row.
    """
    async with server.managed_server(
        track_tree=config.track_tree, history=config.history, metadata=task_metadata(task)
    ) as managed:
        if task.turns is not None:
            await _answer_turns(task, managed, config)
        else:
            nodes, _ = await managed.sample(
                prompt=task.prompt,
                prompt_ids=task.prompt_ids,
                messages=task.messages,
                tools=task.tools,
                sampling=task_sampling(task, config.sampling, 0, last_turn=True),
                max_total_tokens=config.max_total_tokens,
            )
            _say_what_was_sent(nodes, task, task.messages)
        return managed.take_rows()


def _say_what_was_sent(nodes: Sequence[TrackedNode], task: Task, messages: Sequence[Message] | None) -> None:
    """Put the chat that the template was given for the last sampled turn into the metadata of that turn's rows."""
    if messages is None:
        return
    sent: dict[str, Any] = {"messages": list(messages)}  # Any: JSON values
    if task.tools is not None:
        sent["tools"] = list(task.tools)
    for tracked in nodes:
        tracked.metadata.update(sent)


async def _answer_turns(task: Task, managed: ManagedServer, config: RolloutConfig) -> None:
    """Each user turn in order, the model's answers between them; choices only on the last."""
    assert task.turns is not None
    messages: list[Message] = [{"role": "system", "content": task.system}] if task.system is not None else []
    for turn, content in enumerate(task.turns):
        messages.append({"role": "user", "content": content})
        last_turn = turn == len(task.turns) - 1
        nodes, _ = await managed.sample(
            messages=messages,
            tools=task.tools,
            sampling=task_sampling(task, config.sampling, turn, last_turn=last_turn),
            max_total_tokens=config.max_total_tokens,
        )
        _say_what_was_sent(nodes, task, messages)
        messages.append({"role": "assistant", "content": nodes[0].last_span.text})
