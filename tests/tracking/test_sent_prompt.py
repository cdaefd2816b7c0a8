"""The ids of a prompt as they are sent: what is taken over from an earlier turn is what would be written anew."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.backends.numbers import ids_within
from managed_cli.sent_prompt import AS_SENT, SentPrompt

IDS = st.lists(st.integers(0, 200_000), max_size=12)
HIGHEST = 200_000


@given(st.lists(IDS, min_size=1, max_size=5))
def test_after_any_number_of_turns_it_is_the_json_of_all_ids(turns: list[list[int]]) -> None:
    sent, ids = SentPrompt([]), list[int]()
    for turn in turns:
        ids = [*ids, *turn]
        sent = sent.followed_by(turn)
        assert len(sent) == len(ids)
        assert bytes(sent.raw) == msgspec.json.encode(ids)
        assert list(sent) == ids
        assert sent == SentPrompt(ids)
        assert ids_within(sent, HIGHEST)
        assert sent.checked == len(ids)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_an_id_outside_the_vocabulary_is_found_wherever_it_is(wrong: int) -> None:
    first = SentPrompt([1, 2, 3])
    assert ids_within(first, 49)
    assert not ids_within(first.followed_by([wrong]), 49)
    assert not ids_within(SentPrompt([wrong, 2]), 49)
    assert not ids_within([1, wrong], 49)


def test_what_is_known_of_one_vocabulary_says_nothing_of_another() -> None:
    first = SentPrompt([1, 60, 3])
    assert ids_within(first, math.inf)
    later = first.followed_by([4])
    assert not ids_within(later, 49)
    assert ids_within(later, 60)


KEY_IN_WORDS = 'He said "prompt_token_ids":[1,2,3] and \\'


@given(
    st.lists(st.integers(10_000, 200_000), min_size=800, max_size=900),
    st.lists(st.sampled_from(["as sent", "changed", "longer", "absent"]), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_reply_is_the_same_without_the_echoes_of_what_was_sent(
    ids: list[int], echoes: list[str], in_words: bool
) -> None:
    echoed = {"as sent": ids, "changed": [*ids[:-1], 7], "longer": [*ids, 7]}
    sent = SentPrompt(ids[:400]).followed_by(ids[400:])
    text = f"{KEY_IN_WORDS}{ids}".replace(" ", "") if in_words else KEY_IN_WORDS
    choices = [
        {"text": text, **({} if echo == "absent" else {"prompt_token_ids": echoed[echo]}), "end": "]"}
        for echo in echoes
    ]
    body = msgspec.json.encode({"choices": choices})
    cut = sent.cut_from(body)
    stands_for = msgspec.json.decode(AS_SENT)
    for choice, echo in zip(choices, echoes, strict=True):
        if echo == "as sent" and cut is not body:
            choice["prompt_token_ids"] = stands_for
    assert msgspec.json.decode(cut) == {"choices": choices}
    assert (cut is not body) == ("as sent" in echoes and 2 * len(msgspec.json.encode(ids)) >= len(body))


def test_a_short_echo_stays_where_it_is() -> None:
    body = b'{"prompt_token_ids":[1,2]}'
    assert SentPrompt([1, 2]).cut_from(body) is body


def test_a_prompt_that_is_one_already_stays_as_it_is() -> None:
    sent = SentPrompt([1, 2])
    assert SentPrompt.of(sent) is sent
    assert SentPrompt.of([1, 2]) == sent
    assert sent != [1, 2]
