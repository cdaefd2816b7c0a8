"""Prompt and completion as one row, on arbitrary ids and logprobs."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import AlignmentError
from managed_cli.node import SequenceNode
from managed_cli.tracking.masking import (
    PromptEncoding,
    TrackedNode,
    completed_row,
    completion_span,
    extended_prompt,
    root_prompt,
)
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB, Generation

IDS = st.lists(st.integers(0, 200_000), max_size=20)
SAMPLED = st.lists(st.tuples(st.integers(0, 200_000), st.floats(-100.0, 0.0)), max_size=20)
TURNS = st.lists(st.tuples(IDS, SAMPLED), min_size=1, max_size=5)


def generation(pairs: list[tuple[int, float]], **facts: object) -> Generation:
    ids, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    return Generation(token_ids=ids, logprobs=logprobs, text="", finish_reason="stop", **facts)  # type: ignore[arg-type]  # further fields


def tracked(prompt: PromptEncoding, completion: Generation) -> TrackedNode:
    spans = (*prompt.spans, completion_span(prompt, completion, ""))
    return TrackedNode("0.0", completed_row(prompt, completion), "", {}, spans, prompt.text, "", "", sent=prompt.sent)


@given(TURNS)
def test_after_any_number_of_turns_exactly_what_was_sampled_is_unmasked(
    turns: list[tuple[list[int], list[tuple[int, float]]]],
) -> None:
    node: TrackedNode | None = None
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    for suffix, sampled in turns:
        prompt = root_prompt("", suffix) if node is None else extended_prompt("", node, suffix, spelled=None)
        node = tracked(prompt, generation(sampled))
        tokens += [*suffix, *(token for token, _ in sampled)]
        masks += [*[IGNORED_TOKEN_ID] * len(suffix), *(token for token, _ in sampled)]
        logprobs += [*[MASKED_LOGPROB] * len(suffix), *(logprob for _, logprob in sampled)]
    assert node is not None
    assert (node.node.tokens, node.node.masked_tokens, node.node.logprobs) == (tokens, masks, logprobs)
    assert [(span.end - span.start) for span in node.spans] == [len(sampled) for _, sampled in turns]


@given(IDS, SAMPLED, st.integers(1, 5), st.booleans())
def test_logprobs_of_another_length_are_refused(
    prompt: list[int], sampled: list[tuple[int, float]], by: int, longer: bool
) -> None:
    whole = generation(sampled)
    wrong = [*whole.logprobs, *[-1.0] * by] if longer else list(whole.logprobs)[:-by]
    if len(wrong) == len(whole.logprobs):
        return
    bad = Generation(token_ids=whole.token_ids, logprobs=wrong, text="", finish_reason="stop")
    with pytest.raises(AlignmentError, match=f"{len(wrong)} logprobs for {len(whole.token_ids)} tokens"):
        completed_row(root_prompt("", prompt), bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_a_logprob_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(AlignmentError):
        completed_row(root_prompt("", [1]), generation([(2, value)]))


def test_a_node_of_checked_values_is_the_node_that_pydantic_makes() -> None:
    quick = SequenceNode.of_checked(
        full_text="ab", tokens=[1, 2], masked_tokens=[-100, 2], logprobs=[1.0, -0.5], metadata={"sample_id": "a"}
    )
    values = dict(quick.__dict__)
    for made in (quick, pickle.loads(pickle.dumps(quick)), copy.deepcopy(quick), quick.model_copy()):
        for usual in (SequenceNode(**values), SequenceNode.model_construct(**values)):
            assert made == usual
            assert made.model_dump_json() == usual.model_dump_json()
            assert made.model_fields_set == usual.model_fields_set
            assert repr(made) == repr(usual)


def test_a_logprob_of_zero_is_one() -> None:
    node = tracked(root_prompt("", [1]), generation([(2, 0.0)])).node
    assert node.logprobs == [MASKED_LOGPROB, 0.0]


def test_what_is_usual_is_left_out_of_a_turn_s_metadata() -> None:
    prompt = root_prompt("", [1, 2])
    usual = completion_span(prompt, generation([(3, -1.0)]), "x").to_json()
    assert usual == {"start": 2, "end": 3, "finish_reason": "stop", "stop_reason": None, "text": "x"}
    unusual = generation([(3, -1.0)], rescored=(0,), finish_reason_inferred=True, weight_version="7")
    extra = completion_span(prompt, unusual, "x").to_json()
    assert {**usual, "rescored": [2], "finish_reason_inferred": True, "weight_version": "7"} == extra


def test_a_prompt_that_is_extended_shares_no_list_with_its_parent() -> None:
    parent = tracked(root_prompt("", [1]), generation([(2, -1.0)]))
    prompt = extended_prompt("", parent, [3], spelled=None)
    prompt.token_ids.append(9)
    prompt.masked_tokens.append(9)
    prompt.logprobs.append(9.0)
    assert (parent.node.tokens, parent.node.masked_tokens, parent.node.logprobs) == ([1, 2], [-100, 2], [1.0, -1.0])
