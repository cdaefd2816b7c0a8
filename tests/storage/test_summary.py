from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import OutputError
from managed_cli.node import SequenceNode
from managed_cli.storage.summary import Summary
from tests.storage.rows import make_node, make_sample


def counted(nodes: list[SequenceNode]) -> Summary:
    summary = Summary()
    summary.add(nodes)
    return summary


def test_counts_rows_samples_and_tokens() -> None:
    nodes = make_sample(0, choices=3) + make_sample(1, choices=2, sampled_length=7)
    summary = counted(nodes)
    assert (summary.rows, summary.samples) == (5, 2)
    assert (summary.prompt_tokens, summary.completion_tokens) == (15, 29)
    assert sum(summary.finish_reasons.values()) == 5


def test_the_mean_is_over_tokens_and_not_over_rows() -> None:
    short = make_node("a", sampled=[1], logprobs=[-3.0])
    long = make_node("b", sampled=[1, 2, 3], logprobs=[-1.0, -1.0, -1.0])
    assert counted([short, long]).mean_logprob() == pytest.approx(-1.5)


def test_no_sampled_position_has_no_mean() -> None:
    assert counted([make_node(sampled=[], logprobs=[])]).mean_logprob() is None
    assert Summary().mean_logprob() is None


def test_a_kept_infinity_is_counted_and_does_not_spoil_the_mean() -> None:
    summary = counted([make_node("a", logprobs=[-math.inf, -1.0]), make_node("b", logprobs=[-1.0, -2.0])])
    assert summary.nonfinite_rows == 1
    assert summary.mean_logprob() == pytest.approx(-1.5)


def test_forks_and_placeholders_are_read_from_the_metadata_and_not_from_words_in_it() -> None:
    summary = counted(
        [
            make_node("a", fork_reason="history_rewritten"),
            make_node("b", dummy_tokens=True),
            make_node("c", dummy_tokens=False, input={"fork_reason": "a field of the user's own"}),
            make_node("d", fork_reason=None),
        ]
    )
    assert summary.fork_reasons == {"history_rewritten": 1}
    assert summary.dummy_rows == 1


@given(sizes=st.lists(st.integers(1, 4), max_size=6), cut=st.integers(0, 6))
def test_merging_parts_gives_the_counts_of_the_whole(sizes: list[int], cut: int) -> None:
    samples = [make_sample(index, choices=size) for index, size in enumerate(sizes)]
    first = counted([node for sample in samples[:cut] for node in sample])
    rest = counted([node for sample in samples[cut:] for node in sample])
    assert first.merged(rest).agrees_with(counted([node for sample in samples for node in sample]))


def test_adding_choice_by_choice_counts_a_sample_once() -> None:
    summary = Summary()
    for node in make_sample(0, choices=3):
        summary.add([node])
    assert summary.samples == 1


def test_its_json_gives_it_back() -> None:
    summary = counted(make_sample(0, choices=3))
    assert Summary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"rows":"1"}', Summary().to_json().replace('"rows":0', '"rows":null').encode()]
)
def test_what_is_no_summary_is_an_output_error(text: bytes) -> None:
    with pytest.raises(OutputError, match="footer"):
        Summary.from_json(text)
