"""The ids of a prompt as they are sent: a conversation sends all of its history at every turn.

Writing the history as JSON and looking whether each of its ids is one took a sixth of a turn's time; what was written
and looked at for an earlier turn is taken over.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

NO_ECHO = msgspec.Raw(b"null")
"""What stands for an echo that a reply does not have."""

AS_SENT = msgspec.Raw(msgspec.json.encode(secrets.token_hex()))
"""Stands for an echo that was cut out of a reply because it was what had been sent; no server can send it."""

ECHO_KEY = b'"prompt_token_ids":'
"""Goes before an echo, and nowhere else in JSON: within a string, its quotes would have backslashes."""

LONG_ECHO_BYTES = 4096
"""Shorter echoes stay in the reply: there, looking for them takes as long as decoding them."""


class SentPrompt(Sequence[int]):
    """P ids in the form of a request. The ids must not change any more.

    Attributes:
        raw: the ids as JSON; goes into a payload, and is what most servers echo to the byte.
        checked: how many of the first ids are known to lie from 0 to `highest`.
    """

    __slots__ = ("_added", "_ids", "_json", "_length", "checked", "highest", "raw")

    def __init__(self, ids: Sequence[int]) -> None:
        self._json = msgspec.json.encode(ids)
        self.raw = msgspec.Raw(self._json)
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
            sent._json = b"".join((memoryview(self._json)[:-1], b",", memoryview(sent._json)[1:]))
        else:
            sent._json = self._json
        sent.raw = msgspec.Raw(sent._json)
        sent.checked, sent.highest = self.checked, self.highest
        sent._ids = None
        sent._length = self._length + len(added)
        return sent

    @property
    def ids(self) -> Sequence[int]:
        """[P]; read off `raw` where nobody has needed them before."""
        if self._ids is None:
            self._ids = msgspec.json.decode(self._json, type=list[int])
        return self._ids

    def unchecked(self, highest: float) -> Sequence[int]:
        """The ids of which it is not known whether they lie from 0 to `highest`."""
        known = self.checked if self.highest == highest else 0
        if known == self._length - len(self._added):
            return self._added
        return self.ids[known:]

    def cut_from(self, body: bytes) -> bytes:
        """A reply with `AS_SENT` in place of every long echo of exactly these ids.

        A decoder looks at each digit of an echo that a turn of a long conversation consists of; here it is compared.
        """
        if 2 * len(self._json) < max(len(body), 2 * LONG_ECHO_BYTES):
            return body
        kept: list[memoryview | msgspec.Raw] = []
        begin, at = 0, body.find(ECHO_KEY)
        while at >= 0:
            at += len(ECHO_KEY)
            if body.startswith(self._json, at):
                kept += (memoryview(body)[begin:at], AS_SENT)
                begin = at = at + len(self._json)
            at = body.find(ECHO_KEY, at)
        return b"".join((*kept, memoryview(body)[begin:])) if kept else body

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
