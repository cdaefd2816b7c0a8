from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.node import SequenceNode
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import record_batch
from managed_cli.storage.statistics import (
    LOGPROB_BINS_PER_NAT,
    OTHER_SERVERS,
    Statistics,
    length_bin_width,
    length_bins,
    logprob_bins,
)
from tests.storage.rows import make_node, make_sample, write_output


def counted(nodes: list[SequenceNode]) -> Statistics:
    statistics = Statistics()
    statistics.add_batch(record_batch(nodes))
    return statistics


def turn(start: int, end: int, finish_reason: str = "stop") -> dict[str, object]:
    return {"start": start, "end": end, "finish_reason": finish_reason, "text": "t"}


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_a_length_lies_in_its_bin_which_is_at_most_a_32nd_of_it_wide(lengths: list[int]) -> None:
    values = np.array(lengths, dtype=np.int64)
    edges, widths = length_bins(values), length_bin_width(values)
    assert (edges <= values).all()
    assert (values < edges + widths).all()
    assert (edges % widths == 0).all()
    assert ((widths == 1) | (widths * 32 <= values)).all()


def test_logprobs_are_named_by_the_lower_edge_of_their_bin() -> None:
    edges = logprob_bins(np.array([0.0, -0.001, -0.5, -1.25, -1e9], dtype=np.float32))
    assert edges.tolist() == [-1, -1, -32, -80, -16 * LOGPROB_BINS_PER_NAT]


def test_tokens_are_counted_by_probability_and_masked_ones_are_not() -> None:
    logs = [math.log(p) for p in (0.95, 0.6, 0.6, 0.2, 0.05, 0.005, 1e-9)] + [-math.inf]
    statistics = counted([make_node(sampled=range(1, 9), logprobs=logs)])
    assert statistics.token_probabilities == [1, 2, 1, 1, 1, 2]


def test_identical_choices_of_a_sample_are_repeats_and_those_of_another_sample_are_not() -> None:
    nodes = [make_node("a", 0), make_node("a", 1), make_node("a", 2, sampled=[4, 6]), make_node("b", 0)]
    statistics = counted(nodes)
    assert (statistics.repeated_rows, statistics.samples_with_repeats, statistics.samples_of_several) == (1, 1, 1)


def test_turns_are_counted_where_they_were_sampled() -> None:
    nodes = [
        make_node(sampled=[4, 5, 6], logprobs=[-1.0, -2.0, -4.0], turns=[turn(3, 4), turn(4, 6, "length")]),
        make_node("b", turns=[turn(3, 5)]),
    ]
    statistics = counted(nodes)
    first, second = statistics.by_turn[1], statistics.by_turn[2]
    assert (first.count, first.tokens, first.length_stops) == (2, 3, 0)
    assert (second.count, second.tokens, second.length_stops, second.mean_logprob()) == (1, 2, 1, pytest.approx(-3.0))
    assert statistics.turn_counts == {1: 1, 2: 1}


def test_a_turn_of_the_parents_row_is_not_counted_again_in_the_childs() -> None:
    root = make_node("a", 0, turns=[turn(3, 5)], node_id="0")
    child = make_node(
        "a", 0, sampled=[4, 5, 7], logprobs=[-1, -1, -1], turns=[turn(3, 5), turn(5, 6)], node_id="1", parent_id="0"
    )
    replaced = make_node(
        "b", 0, sampled=[4, 5, 7], logprobs=[-1, -1, -1], turns=[turn(3, 5), turn(5, 6)], node_id="1", parent_id="0"
    )
    statistics = counted([root, child, replaced])
    assert statistics.by_turn[1].count == 2
    assert statistics.by_turn[2].count == 2


def test_rows_are_counted_by_server_up_to_a_number_of_servers() -> None:
    statistics = counted([make_node(f"s{i}", server=f"http://host-{i}") for i in range(40)])
    assert len(statistics.by_server) == 33
    assert statistics.by_server[OTHER_SERVERS].count == 8
    assert statistics.by_server["http://host-0"].mean_logprob() == pytest.approx(-0.375)


def test_kept_infinities_are_in_no_sum() -> None:
    statistics = counted([make_node(logprobs=[-math.inf, -1.0])])
    share = statistics.by_server["http://127.0.0.1:8000"]
    assert (share.tokens, share.logprob_count, share.logprob_sum) == (2, 1, -1.0)
    assert statistics.mean_logprobs == {}


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 4), max_size=6), cut=st.integers(0, 6))
def test_merging_parts_gives_the_statistics_of_the_whole(sizes: list[int], cut: int) -> None:
    samples = [make_sample(index, choices=size, sampled_length=index + 1) for index, size in enumerate(sizes)]
    first = counted([node for sample in samples[:cut] for node in sample])
    rest = counted([node for sample in samples[cut:] for node in sample])
    whole = counted([node for sample in samples for node in sample])
    assert first.merged(rest).agrees_with(whole)
    assert whole.merged(whole).agrees_with(whole) == (not sizes)


def test_the_footer_gives_them_back() -> None:
    statistics = counted(make_sample(0, choices=3))
    again = Statistics.find(statistics.to_json())
    assert again is not None
    assert again.to_dict() == statistics.to_dict()


@pytest.mark.parametrize("text", [None, b"", b"[]", b"{}", b"\xff", Statistics().to_json().replace("0", "null", 1)])
def test_what_are_no_statistics_is_none(text: bytes | str | None) -> None:
    assert Statistics.find(text) is None


def test_shards_and_the_finished_file_keep_the_statistics_of_their_rows(tmp_path: Path) -> None:
    samples = [make_sample(index, choices=2, sampled_length=3 + index) for index in range(9)]
    expected = counted([node for sample in samples for node in sample])
    for name in ("out.parquet", "shards/"):
        recording = open_recording(write_output(f"{tmp_path}/{name}", samples))
        kept = recording.summary().statistics
        assert kept is not None
        assert kept.agrees_with(expected)
