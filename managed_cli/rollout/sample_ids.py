"""Identity of samples: the id a line gives, or one derived from what is sent. Never its position."""

from __future__ import annotations

import array
import bisect
import hashlib
import re

import msgspec
import numpy as np

DERIVED_DIGITS = 16
"""Hex digits of a derived id: 64 bits, so two contents of a million meet with a chance of 1 in 37 million."""

_DERIVED = re.compile(rf"([0-9a-f]{{{DERIVED_DIGITS}}})-(0|[1-9][0-9]*)")
_ENCODER = msgspec.json.Encoder(order="sorted")


def canonical_json(content: object) -> bytes:
    """`content` as compact JSON, keys sorted, UTF-8: equal contents give equal bytes."""
    return _ENCODER.encode(content)


BUCKETS = 4096
"""Of a `HashSet`: with a million hashes, each holds some 250."""

_BITS = 2**64 - 1


class HashSet:
    """A set of 64-bit hashes that takes 9 bytes for each: Python's own takes 80, and stops now and then to grow.

    Each bucket is sorted, and small enough that making room inside it takes no time.
    """

    def __init__(self) -> None:
        self._buckets = [array.array("Q") for _ in range(BUCKETS)]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __contains__(self, key: int) -> bool:
        key &= _BITS
        bucket = self._buckets[key % BUCKETS]
        place = bisect.bisect_left(bucket, key)
        return place < len(bucket) and bucket[place] == key

    def add(self, key: int) -> bool:
        """Whether `key`, taken modulo 2^64, was not there before; it is from now on."""
        key &= _BITS
        bucket = self._buckets[key % BUCKETS]
        place = bisect.bisect_left(bucket, key)
        if place < len(bucket) and bucket[place] == key:
            return False
        bucket.insert(place, key)
        return True


class SampleIds:
    """The ids given out so far: about 9 bytes a sample, whatever the length of its id.

    Given ids are kept as 64-bit hashes, so an id can be called taken that is free (a chance of 1 in 37 million at a
    million samples), but never the other way round. Whoever refuses one looks for the first line that has it.
    """

    def __init__(self) -> None:
        self._given = HashSet()
        self._derived = HashSet()
        self._repeats: dict[int, int] = {}
        self._has_derived = False

    def derive(self, content: bytes) -> str:
        """`{digest}-{occurrence}`: 16 hex digits of SHA-256, and how many equal contents came before."""
        digest = hashlib.sha256(content).hexdigest()[:DERIVED_DIGITS]
        key = int(digest, 16)
        self._has_derived = True
        if self._derived.add(key):
            return f"{digest}-0"
        occurrence = self._repeats.get(key, 0) + 1
        self._repeats[key] = occurrence
        return f"{digest}-{occurrence}"

    def is_taken_as_given(self, derived_id: str) -> bool:
        """Whether a line gave itself this very id, which was derived for another."""
        return hash(derived_id) in self._given

    def give(self, sample_id: str) -> bool:
        """Whether no sample before has this id; it is taken from now on."""
        if self._has_derived and self._is_derived(sample_id):
            return False
        return self._given.add(hash(sample_id))

    def _is_derived(self, sample_id: str) -> bool:
        match = _DERIVED.fullmatch(sample_id)
        if match is None:
            return False
        key, occurrence = int(match[1], 16), int(match[2])
        return key in self._derived and occurrence <= self._repeats.get(key, 0)


class LateIds(SampleIds):
    """As `SampleIds`, in a sixth of the time: every id counts as free, and whether any two meet is told at the end.

    Where none do, `SampleIds` would have given the same answers; where some seem to, it has to be asked. A given id
    takes 8 bytes, a derived one 17.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hashes = array.array("q")

    def derive(self, content: bytes) -> str:
        """As there."""
        derived_id = super().derive(content)
        self._hashes.append(hash(derived_id))
        return derived_id

    def is_taken_as_given(self, derived_id: str) -> bool:  # noqa: ARG002 (as above)
        """Not known yet."""
        return False

    def give(self, sample_id: str) -> bool:
        """Not known yet whether an earlier sample has this id."""
        self._hashes.append(hash(sample_id))
        return True

    def all_differ(self) -> bool:
        """Whether each id was given out once; no other is to come."""
        hashes = np.frombuffer(self._hashes, dtype=np.int64)
        hashes.sort()
        return not bool((hashes[1:] == hashes[:-1]).any())
