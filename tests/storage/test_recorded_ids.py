from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.storage import recorded_ids
from managed_cli.storage.recorded_ids import RecordedIds, sample_digest, sample_digests

any_text = st.text(st.characters())


@given(recorded=st.lists(any_text), others=st.lists(any_text))
def test_membership_is_that_of_a_set(recorded: list[str], others: list[str]) -> None:
    ids = RecordedIds.of(recorded)
    assert len(ids) == len(set(recorded))
    known = [sample_id in set(recorded) for sample_id in recorded + others]
    assert [sample_id in ids for sample_id in recorded + others] == known
    assert ids.which(recorded + others) == known


def test_the_empty_set_holds_nothing() -> None:
    assert "" not in RecordedIds()
    assert RecordedIds().which(["", "a"]) == [False, False]
    assert len(RecordedIds()) == 0


def test_digests_that_share_their_first_half_are_told_apart() -> None:
    ids = RecordedIds(np.array([[7, 1], [7, 3]], dtype=np.uint64))
    assert ids.has(7, 1)
    assert ids.has(7, 3)
    assert not ids.has(7, 2)
    assert not ids.has(8, 1)


def test_ids_that_share_their_first_half_are_told_apart_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {"a": [7, 1], "b": [7, 3], "c": [7, 2], "d": [8, 1], "e": [6, 3]}
    monkeypatch.setattr(recorded_ids, "_halves", lambda ids: np.array([halves[name] for name in ids], dtype=np.uint64))
    ids = RecordedIds.of("ab")
    assert ids.which("abcde") == [True, True, False, False, False]


@given(st.lists(any_text))
def test_many_digests_are_those_of_each(sample_ids: list[str]) -> None:
    halves = sample_digests(iter(sample_ids))
    assert [row.astype(">u8").tobytes() for row in halves] == sorted(set(map(sample_digest, sample_ids)))


def test_it_takes_20_bytes_a_sample_however_long_the_ids_are() -> None:
    count = 20_000
    tracemalloc.start()
    ids = RecordedIds.of(f"{'a long path of a data set/' * 8}{index}" for index in range(count))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) == count
    assert held < 21 * count + 10_000
