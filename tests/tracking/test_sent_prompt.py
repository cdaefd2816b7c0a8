"""The ids of a prompt as they are sent: what is taken over from an earlier turn is what would be written anew."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.backends.numbers import ids_within
from managed_cli.sent_prompt import SentPrompt

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


def test_a_prompt_that_is_one_already_stays_as_it_is() -> None:
    sent = SentPrompt([1, 2])
    assert SentPrompt.of(sent) is sent
    assert SentPrompt.of([1, 2]) == sent
    assert sent != [1, 2]
