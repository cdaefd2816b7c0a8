"""The ids of a prompt as they are sent: a conversation sends all of its history at every turn.

Writing the history as JSON and looking whether each of its ids is one took a sixth of a turn's time; what was written
and looked at for an earlier turn is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

NO_ECHO = msgspec.Raw(b"null")
"""What stands for an echo that a reply does not have."""


class SentPrompt(Sequence[int]):
    """P ids in the form of a request. The ids must not change any more.

    Attributes:
        raw: the ids as JSON; goes into a payload, and is what most servers echo to the byte.
        checked: how many of the first ids are known to lie from 0 to `highest`.
    """

    __slots__ = ("_added", "_ids", "_length", "checked", "highest", "raw")

    def __init__(self, ids: Sequence[int]) -> None:
        self.raw = msgspec.Raw(msgspec.json.encode(ids))
        self.checked = 0
        self.highest = -1.0
        self._ids: Sequence[int] | None = ids
        self._added: Sequence[int] = ids
        self._length = len(ids)

    @classmethod
    def of(cls, ids: Sequence[int]) -> SentPrompt:
        """`ids`, which may be that already."""
        return ids if isinstance(ids, SentPrompt) else cls(ids)

    def followed_by(self, added: Sequence[int]) -> SentPrompt:
        """These ids and then `added`, with what is known of these."""
        if not self._length:
            return SentPrompt(added)
        sent = SentPrompt(added)
        if added:
            written, more = memoryview(self.raw), memoryview(sent.raw)
            sent.raw = msgspec.Raw(b"".join((written[:-1], b",", more[1:])))
        else:
            sent.raw = self.raw
        sent.checked, sent.highest = self.checked, self.highest
        sent._ids = None
        sent._length = self._length + len(added)
        return sent

    @property
    def ids(self) -> Sequence[int]:
        """[P]; read off `raw` where nobody has needed them before."""
        if self._ids is None:
            self._ids = msgspec.json.decode(self.raw, type=list[int])
        return self._ids

    def unchecked(self, highest: float) -> Sequence[int]:
        """The ids of which it is not known whether they lie from 0 to `highest`."""
        known = self.checked if self.highest == highest else 0
        if known == self._length - len(self._added):
            return self._added
        return self.ids[known:]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self.ids[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentPrompt) and self.raw == other.raw

    __hash__ = None  # type: ignore[assignment]  # as of a list
