"""Lines of every dialect, damaged at random: each is a sample or a bad line that is told by its place, never a crash.

MANAGED_CLI_MUTATIONS=full tries twenty times as many; MANAGED_CLI_MUTATIONS_SEED chooses others.
"""

from __future__ import annotations

import collections
import json
import os
import random
import re
from pathlib import Path

import pytest

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import UTF8_BOM
from managed_cli.rollout.sample_run import task_metadata
from managed_cli.rollout.tasks import BadLine, InputOptions, Task, read_samples, validate_input
from managed_cli.storage.schema import json_text
from managed_cli.types import SamplingParams
from tests.mutations import at_most, damaged_bytes, mutated, replaced_everywhere

EXAMPLES = Path(__file__).parents[2] / "examples"

DOCUMENTS = [
    json.loads(line)
    for path in sorted([*EXAMPLES.glob("*.jsonl"), *EXAMPLES.glob("inputs/*.jsonl")])
    for line in path.read_text("utf-8").splitlines()
]

CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}

RARE_DOCUMENTS: list[dict[str, object]] = [
    {
        "responses_create_params": {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "assistant", "content": [{"type": "output_text", "text": "I add."}], "tool_calls": []},
                CALL,
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
            ]
        }
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "add"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "sampling": {"n": 2, "top_k": 5, "stop": ["\n"], "stop_token_ids": [7], "min_p": 0.1, "seed": 3},
    },
]
"""What the examples do not show."""

GOOD_LINES: list[dict[str, object]] = [
    {"uid": 0, "prompt": "hello", "question": "hello"},
    {"uid": 1, "messages": [{"role": "user", "content": "hello"}]},
    {"uid": 2, "conversations": [{"from": "human", "value": "hello"}]},
    {"uid": 3, "input_ids": [1, 2, 3]},
    {"uid": 4, "custom_id": "good", "body": {"prompt": "hello"}, "url": "/v1/completions", "method": "POST"},
    {"uid": 5, "responses_create_params": {"input": "hello"}},
]
"""In any format one of them can be used: an input of nothing but bad lines is refused even where they are skipped."""

FILES = 200 if os.environ.get("MANAGED_CLI_MUTATIONS") == "full" else 10
"""Damaged files; each has `LINES` lines or a few more, as damage can break a line in two."""

LINES = 500

SEED = int(os.environ.get("MANAGED_CLI_MUTATIONS_SEED", "11"))

SECONDS = 60.0
"""For one file in one way of reading it: it takes a fraction of a second."""

OPTIONS: list[dict[str, object]] = [
    {},
    {"sampling": SamplingParams(n=4)},
    {"prompt_field": "question"},
    {"keep_last_assistant": True},
    {"input_format": "messages"},
    {"input_format": "openai-batch"},
    {"input_format": "nemo-gym"},
    {"input_format": "sharegpt"},
    {"input_format": "token-ids"},
    {"id_field": "uid"},
]

LEAST = 0.1
"""Of the lines, both of those that are taken and of those that are not: else the damage shows nothing."""


def damaged_file(number: int) -> bytes:
    """`GOOD_LINES`, then lines of which most are damaged."""
    chance = random.Random(f"{SEED} {number}")
    lines = [json.dumps(document).encode() for document in GOOD_LINES]
    for index in range(LINES):
        document = chance.choice(RARE_DOCUMENTS if chance.random() < 0.1 else DOCUMENTS)
        # Each line has an id of its own, or else most are refused for that alone; some have a telling one.
        name = chance.choice([f"line {index}"] * 8 + ["x", 7, "id " * 5_000, f"\u202e\0{index}"])
        document = {key: name if key in ("id", "custom_id") else value for key, value in document.items()}
        line = json.dumps(document).encode() if chance.random() < 0.1 else mutated(document, chance)
        lines.append(line)
    data = b"\n".join(lines)
    if number % 5 == 1:
        data = UTF8_BOM + data
    elif number % 5 == 2:
        data += b"\n" + damaged_bytes(lines[-1], chance)  # no line feed at the end
    return data


def used_lines(data: bytes) -> list[int]:
    """Numbers of the lines that are not blank."""
    lines = data.removeprefix(UTF8_BOM).split(b"\n")
    return [number for number, line in enumerate(lines, 1) if line.strip()]


def assert_usable(task: Task) -> None:
    """What the run does with a sample before it is sent, and when its rows are written, goes through."""
    contents = [task.prompt, task.prompt_ids, task.messages, task.turns]
    assert sum(content is not None for content in contents) == 1
    assert all(contents[contents.index(content)] for content in contents if content is not None)
    assert task.sampling(SamplingParams(n=4)).n >= 1
    assert json.loads(json_text(task_metadata(task)))["sample_id"] == task.sample_id
    for text in (task.sample_id, task.prompt or "", *(task.turns or ()), json_text(task.messages)):
        text.encode("utf-8")


@pytest.mark.parametrize("number", range(FILES))
def test_every_damaged_line_is_a_sample_or_a_bad_line(tmp_path: Path, number: int) -> None:
    data = damaged_file(number)
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(data)
    chosen = OPTIONS[number // 2 % len(OPTIONS)] if number % 2 else {}
    skip = InputOptions(on_bad_line="skip", **chosen)  # type: ignore[arg-type]  # options by name
    with at_most(SECONDS):
        samples = list(read_samples(path, skip))
    assert [sample.line for sample in samples] == used_lines(data)
    assert len({sample.sample_id for sample in samples}) == len(samples)
    bad = [sample for sample in samples if isinstance(sample, BadLine)]
    print(f"file {number}, seed {SEED}: {len(samples)} lines, of which {len(bad)} cannot be used")
    for sample in samples:
        if isinstance(sample, Task):
            assert_usable(sample)
        else:
            assert str(sample).startswith(f"{path}:{sample.line}: ")
            assert str(sample).isprintable()
    with at_most(SECONDS):
        report = validate_input(path, skip)
    assert (report.samples, report.bad_lines) == (len(samples), len(bad))
    kinds = collections.Counter(sample.kind for sample in samples if isinstance(sample, Task))
    assert report.kinds == kinds
    if not chosen:
        assert LEAST * len(samples) < len(bad) < (1 - LEAST) * len(samples), (len(bad), len(samples))
    assert_refused_by_name(path, chosen, bad, len(samples))


@pytest.mark.parametrize("chosen", [{}, {"sampling": SamplingParams(n=4)}, {"keep_last_assistant": True}])
def test_a_value_of_any_kind_at_any_place_is_a_sample_or_a_bad_line(tmp_path: Path, chosen: dict[str, object]) -> None:
    shapes = {json.dumps(shape_of(document)): dict(document) for document in (*DOCUMENTS, *RARE_DOCUMENTS)}
    for document in shapes.values():
        document.pop("id", None)  # it would be that of many lines
    lines = [line for document in shapes.values() for line in replaced_everywhere(document)]
    path = tmp_path / "replaced.jsonl"
    path.write_bytes(b"\n".join(lines))
    with at_most(SECONDS):
        samples = list(read_samples(path, InputOptions(on_bad_line="skip", **chosen)))  # type: ignore[arg-type]  # as above
    assert [sample.line for sample in samples] == list(range(1, len(lines) + 1))
    tasks = [sample for sample in samples if isinstance(sample, Task)]
    print(f"{len(lines)} lines, of which {len(lines) - len(tasks)} cannot be used")
    assert LEAST * len(lines) < len(tasks) < (1 - LEAST) * len(lines)
    for task in tasks:
        assert_usable(task)


def shape_of(value: object) -> object:
    """What is alike in lines of one kind: their keys and types."""
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape_of(inner) for inner in value[:2]]
    return type(value).__name__


def assert_refused_by_name(path: Path, chosen: dict[str, object], bad: list[BadLine], count: int) -> None:
    """Without `skip`, the first ten bad lines are named with file and number, and all are counted."""
    fail = InputOptions(**chosen)  # type: ignore[arg-type]  # as above
    with at_most(SECONDS), pytest.raises(InputError) as caught:
        validate_input(path, fail)
    error = caught.value
    assert error.message == f"{len(bad)} of {count} samples in {path} cannot be used; no request was sent"
    places = [re.match(rf"{re.escape(str(path))}:(\d+): ", line) for line in error.details[:10]]
    assert [int(place[1]) for place in places if place] == [sample.line for sample in bad[:10]]
    with at_most(SECONDS), pytest.raises(InputError) as first:
        collections.deque(read_samples(path, fail), maxlen=0)
    assert first.value.details[0] == str(bad[0])
