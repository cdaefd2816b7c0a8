"""The files in `examples/` are what the README lets people run: they are read, and they are varied."""

from __future__ import annotations

from pathlib import Path

import pytest

from managed_cli.rollout.chats import content_text
from managed_cli.rollout.tasks import InputOptions, Task, read_tasks, validate_input
from managed_cli.types import SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"

MAX_CHARACTERS = 1800
"""Of a sample: at the worst 1 token a character, it leaves room for a completion of 200 in a context of 2048."""


def examples(name: str) -> list[Task]:
    return list(read_tasks(EXAMPLES / name, InputOptions()))


def sent_text(task: Task) -> str:
    chat = "".join(content_text(message) for message in task.messages or ())
    return (task.prompt or "") + chat + "".join(task.turns or ()) + (task.system or "")


@pytest.mark.parametrize(("name", "least"), [("prompts.jsonl", 40), ("chat.jsonl", 20), ("turns.jsonl", 6)])
def test_examples_pass_in_a_run_of_any_n(name: str, least: int) -> None:
    assert validate_input(EXAMPLES / name, InputOptions(sampling=SamplingParams(n=8))).samples >= least


@pytest.mark.parametrize("name", ["prompts.jsonl", "chat.jsonl", "turns.jsonl"])
def test_examples_fit_a_small_context(name: str) -> None:
    assert max(len(sent_text(task)) for task in examples(name)) <= MAX_CHARACTERS


def test_examples_show_what_a_line_can_hold() -> None:
    tasks = [task for name in ("prompts.jsonl", "chat.jsonl", "turns.jsonl") for task in examples(name)]
    assert any(task.continue_final for task in tasks)
    assert any(task.tools for task in tasks)
    assert any(task.system for task in tasks)
    assert any(task.overrides for task in tasks)
    assert any("<|im_end|>" in sent_text(task) for task in tasks)
    assert any(task.sample_id.endswith("-1") for task in tasks), "a repeated prompt without an id"
    assert any(task.prompt and task.prompt.endswith("   ") for task in tasks)
