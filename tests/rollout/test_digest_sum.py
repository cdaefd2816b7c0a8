"""The fingerprint of an input is the sum of its samples' digests, however many are added up at once."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.rollout.digest_sum import DIGESTS_AT_ONCE, DigestSum


def plain_sum(contents: list[bytes]) -> str:
    numbers = (int.from_bytes(hashlib.sha256(content).digest(), "big") for content in contents)
    return f"{sum(numbers) % 2**256:064x}"


def found(contents: list[bytes]) -> str:
    digests = DigestSum()
    for content in contents:
        digests.add(content)
    assert digests.hex() == digests.hex()
    return digests.hex()


@given(st.lists(st.binary()))
def test_it_is_the_sum_modulo_2_to_the_256(contents: list[bytes]) -> None:
    assert found(contents) == plain_sum(contents) == found(contents[::-1])


@pytest.mark.parametrize("count", [DIGESTS_AT_ONCE - 1, DIGESTS_AT_ONCE, 2 * DIGESTS_AT_ONCE + 1])
def test_so_it_is_of_more_than_are_added_at_once(count: int) -> None:
    contents = [str(number).encode() for number in range(count)]
    assert found(contents) == plain_sum(contents)
