"""Every format gives back the ids, masks and logprobs that were recorded; this file needs none of the projects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from managed_cli.export.export import export_recording
from managed_cli.export.formats import formats
from managed_cli.types import IGNORED_TOKEN_ID
from tests.export import rewards
from tests.export.recordings import expected, samples
from tests.storage.rows import write_output

Line = dict[str, Any]
NAMES = list(formats())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_output(
        tmp_path_factory.mktemp("recording") / "out.parquet",
        sorted(samples(), key=lambda s: s[0].metadata["sample_id"]),
    )


def exported(recording: Path, name: str, directory: Path, **how: Any) -> list[Line]:
    out = directory / f"{name}.jsonl"
    export_recording(str(recording), str(out), formats()[name], overwrite=True, **how)
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def split(prompt: list[int], completion: list[int], mask: list[Any], logprobs: list[float]) -> Line:
    assert len(completion) == len(mask) == len(logprobs)
    assert mask[0], "a completion begins at the first sampled position"
    assert all(value == 0.0 for value, is_sampled in zip(logprobs, mask, strict=True) if not is_sampled)
    return {
        "ids": prompt + completion,
        "sampled": [False] * len(prompt) + [bool(value) for value in mask],
        "logprobs": [value for value, is_sampled in zip(logprobs, mask, strict=True) if is_sampled],
    }


def whole(ids: list[int], labels: list[int], logprobs: list[float]) -> Line:
    assert len(ids) == len(labels) == len(logprobs)
    assert all(label in (IGNORED_TOKEN_ID, token) for label, token in zip(labels, ids, strict=True))
    sampled = [label != IGNORED_TOKEN_ID for label in labels]
    assert all((value == 1.0) != is_sampled for value, is_sampled in zip(logprobs, sampled, strict=True))
    return {
        "ids": ids,
        "sampled": sampled,
        "logprobs": [value for value, is_sampled in zip(logprobs, sampled, strict=True) if is_sampled],
    }


def from_atropos(line: Line) -> list[Line]:
    arrays = zip(line["tokens"], line["masks"], line["inference_logprobs"], line["scores"], strict=True)
    return [{**whole(ids, labels, logprobs), "reward": score} for ids, labels, logprobs, score in arrays]


def from_trl(line: Line) -> list[Line]:
    arrays = (line["prompt_ids"], line["completion_ids"], line["env_mask"], line["logprobs"])
    return [{**split(*arrays), "reward": line["reward"]}]


def from_verl(line: Line) -> list[Line]:
    arrays = (line["prompt_ids"], line["response_ids"], line["response_mask"], line["response_logprobs"])
    return [{**split(*arrays), "reward": line["reward_score"]}]


def from_prime_rl(line: Line) -> list[Line]:
    """The split shape and the flat one, which must say the same."""
    assert not any(line["prompt_mask"])
    assert line["prompt_ids"] + line["completion_ids"] == line["token_ids"]
    assert line["prompt_mask"] + line["completion_mask"] == line["mask"]
    assert line["logprobs"] == [0.0] * len(line["prompt_ids"]) + line["completion_logprobs"]
    assert line["temperatures"] == [line["temperature"]] * len(line["token_ids"])
    assert line["completion_temperatures"] == [line["temperature"]] * len(line["completion_ids"])
    arrays = (line["prompt_ids"], line["completion_ids"], line["completion_mask"], line["completion_logprobs"])
    return [{**split(*arrays), "reward": line["reward"]}]


def from_slime(line: Line) -> list[Line]:
    begins = len(line["tokens"]) - line["response_length"]
    prompt, response = line["tokens"][:begins], line["tokens"][begins:]
    return [{**split(prompt, response, line["loss_mask"], line["rollout_log_probs"]), "reward": line["reward"]}]


def from_hf(line: Line) -> list[Line]:
    assert line["completion_mask"] == [int(label != IGNORED_TOKEN_ID) for label in line["labels"]]
    return [{**whole(line["input_ids"], line["labels"], line["logprobs"]), "reward": line["reward"]}]


READERS: dict[str, Callable[[Line], list[Line]]] = {
    "atropos": from_atropos,
    "trl": from_trl,
    "verl": from_verl,
    "prime-rl": from_prime_rl,
    "slime": from_slime,
    "hf": from_hf,
}


@pytest.mark.parametrize("name", NAMES)
def test_ids_masks_logprobs_and_rewards_come_back_as_they_were_recorded(
    name: str, recording: Path, tmp_path: Path
) -> None:
    lines = exported(recording, name, tmp_path, reward="tests.export.rewards:by_choice")
    found = [row for line in lines for row in READERS[name](line)]
    assert found == expected(recording, rewards.by_choice)
    assert len(found) == 6


@pytest.mark.parametrize("name", [name for name in NAMES if name != "atropos"])
def test_without_a_reward_function_nothing_is_scored(name: str, recording: Path, tmp_path: Path) -> None:
    lines = exported(recording, name, tmp_path)
    assert [row for line in lines for row in READERS[name](line)] == expected(recording)


@pytest.mark.parametrize("name", NAMES)
def test_a_line_has_exactly_the_columns_that_are_described(name: str, recording: Path, tmp_path: Path) -> None:
    for line in exported(recording, name, tmp_path, reward="tests.export.rewards:by_choice"):
        assert list(line) == [field.name for field in formats()[name].fields]


@pytest.mark.parametrize("name", NAMES)
def test_lengths_in_the_description_are_those_of_the_arrays(name: str, recording: Path, tmp_path: Path) -> None:
    """`[T]`, `[P]`, `[C]` and `[n][T]` in a type are shapes, and `null` the only other value."""
    checked = 0
    for line in exported(recording, name, tmp_path, reward="tests.export.rewards:by_choice"):
        total = len(line.get("tokens") or line.get("input_ids") or line.get("token_ids") or ())
        prompt = len(line.get("prompt_ids", ()))
        completion = len(line.get("completion_ids") or line.get("response_ids") or ()) or line.get("response_length")
        sizes = {"T": total or prompt + (completion or 0), "P": prompt, "C": completion}
        for field in formats()[name].fields:
            shape = field.type[field.type.index(" [") + 2 : -1] if " [" in field.type else ""
            if shape in sizes:
                assert len(line[field.name]) == sizes[shape], field.name
                checked += 1
            elif shape == "n][T":
                assert [len(row) for row in line[field.name]] == [len(row) for row in line["tokens"]]
                checked += 1
    assert checked


def test_every_position_of_prime_rl_has_the_temperature_that_was_sent(recording: Path, tmp_path: Path) -> None:
    assert {line["temperature"] for line in exported(recording, "prime-rl", tmp_path)} == {0.5}


def test_chats_are_exported_as_messages_and_other_prompts_have_none(recording: Path, tmp_path: Path) -> None:
    """Of the three samples, one is a chat, whose second turn was sampled twice."""
    asked = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<0.0>"},
        {"role": "user", "content": "Two?"},
    ]
    chats = [[*asked, {"role": "assistant", "content": f"<{choice}.1>"}] for choice in (0, 1)]
    lines = exported(recording, "hf", tmp_path)
    assert [line["messages"] for line in lines] == [None] * 4 + chats
    groups = exported(recording, "atropos", tmp_path, reward="tests.export.rewards:by_choice")
    assert [group["messages"] for group in groups] == [None, None, chats]


def test_an_atropos_line_is_one_sample_with_all_its_choices(recording: Path, tmp_path: Path) -> None:
    lines = exported(recording, "atropos", tmp_path, reward="tests.export.rewards:by_choice")
    assert [(line["sample_id"], line["choice_indexes"]) for line in lines] == [
        ("one", [0, 1]),
        ("short", [0, 1]),
        ("two", [0, 1]),
    ]
    assert all(line["generation_params"]["temperature"] == 0.5 for line in lines)
    for line in lines:
        for advantages, labels, score in zip(line["advantages"], line["masks"], line["scores"], strict=True):
            assert advantages == [0.0 if label == IGNORED_TOKEN_ID else score - 0.625 for label in labels]


@pytest.mark.parametrize(
    "shape",
    [
        {"token_ids": list[int], "mask": list[bool], "logprobs": list[float], "temperatures": list[float],
         "env_name": str, "reward": float, "advantages": list[float]},
        {"prompt_ids": list[int], "prompt_mask": list[bool], "completion_ids": list[int],
         "completion_mask": list[bool], "completion_logprobs": list[float], "completion_temperatures": list[float],
         "env_name": str, "advantage": float, "reward": float},
    ],
    ids=["flat", "split"],
)  # fmt: skip
def test_prime_rl_fields_pass_its_wire_format_strictly(shape: dict[str, Any], recording: Path, tmp_path: Path) -> None:
    """prime-rl is on no package index: its structs are made anew by field name and type, arrays as on its wire."""
    Sample = msgspec.defstruct("Sample", list(shape.items()), array_like=True)  # noqa: N806 (a class)
    for line in exported(recording, "prime-rl", tmp_path, reward="tests.export.rewards:by_choice"):
        made = Sample(**{key: line[key] for key in Sample.__struct_fields__ if key in line})
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Sample, strict=True) == made


SLIME_FIELDS = {
    "group_index", "index", "prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask",
    "weight_versions", "rollout_log_probs", "status", "metadata",
}  # fmt: skip
"""Of `slime.utils.types.Sample`; what a line leaves out has a default there."""


def test_slime_fields_are_those_of_its_sample_and_its_own_assertions_hold(recording: Path, tmp_path: Path) -> None:
    """slime is on no package index: what its `Sample` and its conversion to training data demand is tested."""
    lines = exported(recording, "slime", tmp_path)
    for number, line in enumerate(lines):
        assert set(line) <= SLIME_FIELDS
        assert len(line["loss_mask"]) == line["response_length"] == len(line["rollout_log_probs"])
        assert line["index"] == number
    assert [line["group_index"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert [line["status"] for line in lines] == ["completed", "truncated"] * 3
    assert lines[5]["response"] == "<1.0><1.1>"


def test_datasets_loads_rows_with_typed_columns(recording: Path, tmp_path: Path) -> None:
    import datasets

    exported(recording, "hf", tmp_path, reward="tests.export.rewards:by_choice")
    file = str(tmp_path / "hf.jsonl")
    loaded = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    assert [whole(row["input_ids"], row["labels"], row["logprobs"])["ids"] for row in loaded] == [
        row["ids"] for row in expected(recording)
    ]
    assert [message["content"] for message in loaded[5]["messages"]] == ["One?", "<0.0>", "Two?", "<1.1>"]
    assert loaded.features["logprobs"].feature.dtype == "float64"
    assert loaded.features["input_ids"].feature.dtype == "int64"
