"""The ids of a prompt as they are sent: a conversation sends all of its history at every turn.

Writing the history as JSON and looking whether each of its ids is one took a sixth of a turn's time; what was written
and looked at for an earlier turn is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, overload

import msgspec

NO_ECHO = msgspec.Raw(b"null")
"""What stands for an echo that a reply does not have."""


class SentPrompt(Sequence[int]):
    """P ids in the form of a request. The ids must not change any more.

    Attributes:
        ids: [P].
        raw: the same as JSON; goes into a payload, and is what most servers echo to the byte.
        checked: how many of the first ids are known to lie from 0 to `highest`.
    """

    __slots__ = ("checked", "highest", "ids", "raw")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.raw = msgspec.Raw(msgspec.json.encode(ids))
        self.checked = 0
        self.highest = -1.0

    @classmethod
    def of(cls, ids: Sequence[int]) -> SentPrompt:
        """`ids`, which may be that already."""
        return ids if isinstance(ids, SentPrompt) else cls(ids)

    @classmethod
    def following(cls, earlier: SentPrompt | None, ids: Sequence[int]) -> Self:
        """`ids`, which begin with all those of `earlier`, with what is known of these.

        That they do so is not looked at: it would take as long as what is saved.
        """
        known = 0 if earlier is None else len(earlier.ids)
        if earlier is None or known in (0, len(ids)):
            return cls(ids)
        sent = cls.__new__(cls)
        sent.ids = ids
        written, more = memoryview(earlier.raw), memoryview(msgspec.json.encode(ids[known:]))
        sent.raw = msgspec.Raw(b"".join((written[:-1], b",", more[1:])))
        sent.checked, sent.highest = earlier.checked, earlier.highest
        return sent

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self.ids[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentPrompt) and self.ids == other.ids

    __hash__ = None  # type: ignore[assignment]  # as of a list
