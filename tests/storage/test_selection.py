from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from managed_cli.errors import ConfigError
from managed_cli.storage.reader import Recording, open_recording
from managed_cli.storage.selection import parse_condition, rows_at, rows_of_sample, selected_rows
from tests.storage.rows import make_node, make_sample, write_output

SAMPLES = [
    [
        make_node("gsm8k-1", 0, sampled=[4] * 9, logprobs=[-1.0] * 9, finish_reason="length", full_text="I am Sorry"),
        make_node("gsm8k-1", 1, sampled=[], logprobs=[]),
    ],
    [make_node("gsm8k-12", 0, logprobs=[-3.0, -3.0], server="http://b", fork_reason="text_mismatch")],
    [make_node("a*b.c", 0, turns=[{"start": 3, "end": 4}, {"start": 4, "end": 5}])],
]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return open_recording(write_output(f"{tmp_path}/shards/", SAMPLES, rows_per_shard=2))


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("finish_reason=length", [0]),
        ("finish_reason != length", [1, 2, 3]),
        ("id=gsm8k-1", [0, 1]),
        ("id=gsm8k-*", [0, 1, 2]),
        ("id=gsm8k-?", [0, 1]),
        ("id=a*b.c", [3]),
        ("id=a*bxc", []),
        ("id~8K", [0, 1, 2]),
        ("text~sorry", [0]),
        ("length>2", [0]),
        ("length>=2", [0, 2, 3]),
        ("length<1e0", [1]),
        ("mean_logprob<-0.5", [0, 2]),
        ("mean_logprob=none", [1]),
        ("mean_logprob!=none", [0, 2, 3]),
        ("turns=2", [3]),
        ("server=http://b", [2]),
        ("fork_reason=none", [0, 1, 3]),
        ("choice=1", [1]),
    ],
)
def test_a_condition_chooses_the_rows_that_pass(recording: Recording, condition: str, rows: list[int]) -> None:
    assert selected_rows(recording, [parse_condition(condition)]).tolist() == rows


def test_a_row_passes_all_conditions(recording: Recording) -> None:
    conditions = [parse_condition("id=gsm8k-*"), parse_condition("length>=2")]
    assert selected_rows(recording, conditions).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("sort", "rows"),
    [
        ("length", [1, 2, 3, 0]),
        ("-length", [0, 2, 3, 1]),
        ("mean_logprob", [2, 0, 3, 1]),
        ("-mean_logprob", [3, 0, 2, 1]),
        ("id", [3, 0, 1, 2]),
        ("-turns", [3, 0, 1, 2]),
    ],
)
def test_rows_are_ordered_and_those_without_the_value_come_last(
    recording: Recording, sort: str, rows: list[int]
) -> None:
    assert selected_rows(recording, [], sort=sort).tolist() == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("length", "is not a condition"),
        ("size>3", "there is no field `size`"),
        ("length>many", "expected a number, got `many`"),
        ("length~3", "`~` does not compare numbers"),
        ("id>3", "`>` does not compare texts"),
    ],
)
def test_what_is_no_condition_is_told_with_a_hint(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_condition(text)
    assert caught.value.hint or "expected" in told


def test_an_unknown_field_to_sort_by_is_told(recording: Recording) -> None:
    with pytest.raises(ConfigError, match="no field `size`"):
        selected_rows(recording, [], sort="-size")


def test_rows_come_in_the_order_they_are_asked_for(tmp_path: Path) -> None:
    samples = [make_sample(index, choices=3) for index in range(1500)]
    recording = open_recording(write_output(tmp_path / "out.parquet", samples, rows_per_shard=5000))
    numbers = np.array([4499, 0, 2048, 2047, 7])
    found = [(row["sample_id"], row["choice_index"]) for row in rows_at(recording, numbers)]
    assert found == [("s-1499", 2), ("s-0", 0), ("s-682", 2), ("s-682", 1), ("s-2", 1)]


def test_a_sample_is_found_by_its_very_id(recording: Recording) -> None:
    assert rows_of_sample(recording, "a*b.c").tolist() == [3]
    assert rows_of_sample(recording, "gsm8k-1").tolist() == [0, 1]
    with pytest.raises(ConfigError, match="no sample `gsm8k-`"):
        rows_of_sample(recording, "gsm8k-")
