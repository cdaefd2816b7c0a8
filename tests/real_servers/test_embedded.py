"""The engine inside the process, on float32 weights, against a forward pass over the same weights in torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import pytest

from . import checks

pytestmark = pytest.mark.real_server("local")

MAX_TOKENS = 32
# Measured over 3300 tokens: at most 3.3e-4, mean 1.2e-4. Attention in half precision would show: 3.5e-2.
MOST_NATS, MEAN_NATS = 5e-3, 1e-3

# OpenMP threads spin while they wait; on cores that others use too, each of them then waits for all.
SLEEP_WHEN_IDLE = {"OMP_WAIT_POLICY": "passive"}

EMOJI = "😀🎉🦜🐍🧪"
EMOJI_CHAT = {"messages": [{"role": "user", "content": f"Repeat exactly: {EMOJI}"}]}

# What a seed repeats exactly: sequences decoded together round differently in other company.
ONE_AT_A_TIME = (checks.EXAMPLES / "prompts.jsonl", "--limit", 2, "-n", 4, "--max-tokens", 24, "--concurrency", 1)

Recorded = tuple[Path, list[checks.Row]]


@pytest.fixture(scope="module")
def model(environment: Path) -> Path:
    return environment / "models" / "smollm2-135m-f32.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def record(model, folder):
    """Input and options → path and rows; the same call runs once, unless `again` tells it from the first."""
    runs = itertools.count()

    @functools.cache
    def run(*arguments: object, again: int = 0) -> Recorded:
        out = folder / f"{next(runs)}.parquet"
        checks.managed_cli(
            "rollout", *arguments, "--server-type", "local", "--model", model, "--out", out, variables=SLEEP_WHEN_IDLE
        )
        return out, checks.read_rows(out)

    return run


@pytest.fixture(scope="module")
def chats(folder) -> Path:
    """One chat whose answers hold characters that take several tokens."""
    path = folder / "emoji.jsonl"
    path.write_text(json.dumps(EMOJI_CHAT, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def dataset(name: str) -> checks.Dataset:
    """A few prompts of a long file: enough for every kind of row, few enough for two cores."""
    found = checks.datasets()[name]
    return found if found.most is None else dataclasses.replace(found, most=8)


def choices(name: str) -> int:
    """All example chats are run, so fewer times each."""
    return 4 if dataset(name).most else 2


def arguments(name: str) -> tuple[object, ...]:
    return (*dataset(name).arguments, "-n", choices(name), "--temperature", 1, "--max-tokens", MAX_TOKENS)


every_dataset = pytest.mark.parametrize("name", list(checks.datasets()))


@every_dataset
def test_every_input_has_a_row_for_each_choice(record, name):
    _, rows = record(*arguments(name))
    checks.assert_every_input_has_its_choices(rows, dataset(name), choices(name))


@every_dataset
def test_every_logprob_is_that_of_an_independent_forward_pass(record, name, environment, tmp_path):
    path, rows = record(*arguments(name))
    report = checks.forward_report(path, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows), most=MOST_NATS, mean=MEAN_NATS)


@every_dataset
def test_inspect_finds_no_fault(record, name):
    path, _ = record(*arguments(name))
    checks.managed_cli("inspect", path, "--check")


def test_logprobs_of_tokens_inside_a_character_are_true(record, chats, environment, tmp_path):
    path, rows = record(chats, "-n", 8, "--temperature", 0.7, "--max-tokens", 40, "--seed", 1)
    asked_again = [row for row in rows if _rescored(row)]
    assert asked_again, "no answer has a character of several tokens: the prompt no longer does what it is for"
    report = checks.forward_report(path, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows), most=MOST_NATS, mean=MEAN_NATS)


def test_logprobs_up_to_a_stop_string_are_true(record, environment, tmp_path):
    prompts = checks.EXAMPLES / "prompts.jsonl"
    path, rows = record(prompts, "--limit", 6, "-n", 2, "--max-tokens", 60, "--stop", ".", "--stop", "\n", "--seed", 3)
    assert any(row["finish_reason"] == "stop" for row in rows)
    report = checks.forward_report(path, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows), most=MOST_NATS, mean=MEAN_NATS)


def test_completions_that_fill_the_context_are_data(record, environment, tmp_path):
    context = 256  # llama.cpp's smallest
    prompts = checks.EXAMPLES / "prompts.jsonl"
    path, rows = record(prompts, "--limit", 4, "-n", 4, "--max-tokens", 512, "--context-length", context, "--seed", 5)
    full = [row for row in rows if len(row["tokens"]) == context]
    assert full, "no answer is as long as the context: it is no longer small enough"
    assert {row["finish_reason"] for row in full} == {"length"}
    report = checks.forward_report(path, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows), most=MOST_NATS, mean=MEAN_NATS)


def test_a_seed_repeats_a_run_and_its_choices_differ(record):
    first, second = (_by_identity(record(*ONE_AT_A_TIME, "--seed", 7, again=run)[1]) for run in (1, 2))
    assert first == second
    for sample in {sample for sample, _ in first}:
        assert len({tokens for (owner, _), tokens in first.items() if owner == sample}) > 1


def test_another_seed_samples_something_else(record):
    first, second = (_by_identity(record(*ONE_AT_A_TIME, "--seed", seed)[1]) for seed in (7, 8))
    assert first.keys() == second.keys()
    assert first != second


def _by_identity(rows: list[checks.Row]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(row["sample_id"], row["choice_index"]): tuple(row["tokens"]) for row in rows}


def _rescored(row: checks.Row) -> bool:
    return '"rescored":[' in row["metadata"] and '"rescored":[]' not in row["metadata"]
