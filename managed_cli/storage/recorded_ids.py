"""Which samples stand on disk: a set that takes 20 bytes an id or less, whatever the length of the id."""

from __future__ import annotations

import array
import bisect
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from managed_cli.errors import OutputError

if TYPE_CHECKING:  # readers of files, which only annotate with it, do without
    import numpy.typing as npt

_BITS = 2**64 - 1
_DIGEST = struct.Struct(">qq").pack

OTHER_HALF = "\0"
"""What an id is hashed with for the second half of its digest."""


IDS_AT_ONCE = 65_536
"""How many are in memory together while they are digested."""


def sample_digest(sample_id: str) -> bytes:
    """What stands for `sample_id` in a set of this process: two of Python's 64-bit hashes (SipHash), 16 bytes.

    That two ids of a million are taken for one has a chance of 1 in 10^27, so membership counts as exact.
    """
    return _DIGEST(hash(sample_id), hash(sample_id + OTHER_HALF))


def sample_digests(sample_ids: Iterable[str]) -> npt.NDArray[np.uint64]:
    """The digests of `sample_ids`, each once and sorted, as two halves: [ids, 2]."""
    ids, parts = iter(sample_ids), [np.empty((0, 2), dtype=np.uint64)]
    while some := list(itertools.islice(ids, IDS_AT_ONCE)):
        parts.append(_halves(some))
    halves = np.concatenate(parts)
    halves = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    is_new = np.ones(len(halves), dtype=bool)
    is_new[1:] = (halves[1:] != halves[:-1]).any(axis=1)
    return halves[is_new]


def _halves(sample_ids: Sequence[str]) -> npt.NDArray[np.uint64]:
    """The digest of each: [ids, 2]."""
    first = array.array("q", map(hash, sample_ids))
    second = array.array("q", map(hash, [sample_id + OTHER_HALF for sample_id in sample_ids]))
    return np.column_stack([np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)]).view(np.uint64)


class RecordedIds:
    """An unchanging set of sample ids; `in` costs some microseconds.

    Two sorted columns of 64 bits, as `bisect` searches them: the first half of each digest, and the second.

    Args:
        digests: sorted, as `sample_digests` gives them.
    """

    def __init__(self, digests: npt.NDArray[np.uint64] | None = None) -> None:
        halves = np.empty((0, 2), dtype=np.uint64) if digests is None else digests
        self._first, self._second = (array.array("Q", halves[:, column].tobytes()) for column in (0, 1))
        # As many bits lead a search to its end as leave one or two ids to look at.
        leading_bits = max(len(halves).bit_length() - 1, 1)
        self._shift = 64 - leading_bits
        borders = np.arange(1, 2**leading_bits, dtype=np.uint64) << np.uint64(self._shift)
        inner = np.searchsorted(halves[:, 0], borders).astype(np.uint32)
        self._begins = array.array("I", [0]) + array.array("I", inner.tobytes()) + array.array("I", [len(halves)])

    @classmethod
    def of(cls, sample_ids: Iterable[str]) -> Self:
        """The set of `sample_ids`."""
        return cls(sample_digests(sample_ids))

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, sample_id: object) -> bool:
        if not self._first or not isinstance(sample_id, str):
            return False
        return self.has(hash(sample_id) & _BITS, hash(sample_id + OTHER_HALF) & _BITS)

    def which(self, sample_ids: Sequence[str]) -> list[bool]:
        """For each of `sample_ids` whether it is in the set: of hundreds together, each takes half the time."""
        if not self._first or not sample_ids:
            return [False] * len(sample_ids)
        wanted, firsts = _halves(sample_ids), np.frombuffer(self._first, dtype=np.uint64)
        places = np.minimum(np.searchsorted(firsts, wanted[:, 0]), len(firsts) - 1)
        alike = firsts[places] == wanted[:, 0]
        found = alike & (np.frombuffer(self._second, dtype=np.uint64)[places] == wanted[:, 1])
        for index in np.flatnonzero(alike & ~found):  # the first one that begins alike is another
            found[index] = self.has(int(wanted[index, 0]), int(wanted[index, 1]))
        told: list[bool] = found.tolist()
        return told

    def has(self, first: int, second: int) -> bool:
        """Whether the id whose digest has these halves is in the set."""
        leading = first >> self._shift
        place = bisect.bisect_left(self._first, first, self._begins[leading], self._begins[leading + 1])
        while place < len(self._first) and self._first[place] == first:
            if self._second[place] == second:
                return True
            place += 1
        return False


def sample_ids_of(files: Iterable[Path]) -> Iterator[str]:
    """The sample ids of `files`, read from that column alone, one row group in memory at a time.

    An id comes once per row group, in the order of its first row.

    Raises:
        OutputError: a file is damaged.
    """
    for file in files:
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                for group in range(parquet.num_row_groups):
                    column = parquet.read_row_group(group, columns=["sample_id"]).column("sample_id")
                    yield from pc.unique(column).to_pylist()
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise OutputError(
                f"the sample ids in `{file}` cannot be read: {error}",
                details=("nothing on disk was changed",),
                hint=f"`managed-cli inspect --check {file}` tells what is damaged",
            ) from error
