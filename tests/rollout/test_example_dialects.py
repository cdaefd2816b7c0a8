"""The files in `examples/inputs/`: one for each dialect that others write."""

from __future__ import annotations

from pathlib import Path

import pytest

from managed_cli.rollout.tasks import InputFiles, InputOptions, InputSource, read_tasks, validate_input
from managed_cli.types import SamplingParams

INPUTS = Path(__file__).parents[2] / "examples" / "inputs"

KINDS = {
    "messages-in-prompt.jsonl": "messages",
    "nemo-gym.jsonl": "nemo-gym",
    "openai-batch.jsonl": "openai-batch",
    "questions.jsonl": "prompt",
    "sharegpt.jsonl": "sharegpt",
    "token-ids.jsonl": "token-ids",
}


def options(name: str) -> InputOptions:
    field = "question" if name == "questions.jsonl" else None
    return InputOptions(prompt_field=field, sampling=SamplingParams(n=4))


def test_every_example_is_listed_here() -> None:
    assert sorted(path.name for path in INPUTS.iterdir()) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_example_is_of_one_dialect(name: str) -> None:
    report = validate_input(INPUTS / name, options(name))
    assert report.kinds == {KINDS[name]: report.samples}
    assert report.samples >= 2


@pytest.mark.parametrize("name", KINDS)
def test_a_fixed_format_reads_it_the_same(name: str) -> None:
    fixed = InputOptions(input_format=KINDS[name], prompt_field=options(name).prompt_field)  # type: ignore[arg-type]
    assert list(read_tasks(INPUTS / name, fixed)) == list(read_tasks(INPUTS / name, options(name)))


def test_all_of_them_together_are_one_input() -> None:
    names = [name for name in KINDS if name != "questions.jsonl"]
    files = InputFiles(tuple(InputSource.of(INPUTS / name) for name in names), tuple(names))
    report = validate_input(files, InputOptions())
    assert set(report.kinds) == {kind for name, kind in KINDS.items() if name in names}
    assert {task.source.partition(":")[0] for task in read_tasks(files, InputOptions())} == set(names)
