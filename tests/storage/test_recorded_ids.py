from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from managed_cli.storage.recorded_ids import RecordedIds

any_text = st.text(st.characters())


@given(recorded=st.lists(any_text), others=st.lists(any_text))
def test_membership_is_that_of_a_set(recorded: list[str], others: list[str]) -> None:
    ids = RecordedIds.of(recorded)
    assert len(ids) == len(set(recorded))
    assert all((sample_id in ids) == (sample_id in set(recorded)) for sample_id in recorded + others)


def test_the_empty_set_holds_nothing() -> None:
    assert "" not in RecordedIds()
    assert len(RecordedIds()) == 0


def test_digests_that_share_their_first_half_are_told_apart() -> None:
    first, second, third = (b"\x00" * 8 + bytes([last]) * 8 for last in (1, 2, 3))
    ids = RecordedIds(numbers([first, third]))
    assert ids.has_digest(first)
    assert ids.has_digest(third)
    assert not ids.has_digest(second)


def numbers(digests: list[bytes]):  # type: ignore[no-untyped-def]  # an array of numpy
    import numpy as np

    return np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 2).astype(np.uint64)


def test_it_takes_20_bytes_a_sample_however_long_the_ids_are() -> None:
    count = 20_000
    tracemalloc.start()
    ids = RecordedIds.of(f"{'a long path of a data set/' * 8}{index}" for index in range(count))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) == count
    assert held < 21 * count + 10_000
