"""The ids of a prompt as they are sent, so that an echo of them is compared as it came: a quarter of decoding it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NO_ECHO = msgspec.Raw(b"null")
"""What stands for an echo that a reply does not have."""


class SentPrompt:
    """Ids in the form of a request.

    Attributes:
        ids: [P].
        raw: the same as JSON; goes into a payload, and is what most servers echo to the byte.
    """

    __slots__ = ("ids", "raw")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.raw = msgspec.Raw(msgspec.json.encode(ids))
