"""A row as its turns made it: each holds what it added, and the lists of the whole are made once, when they are wanted.

To copy three lists of all that was said at every turn took a tenth of a long conversation's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from managed_cli.node import SequenceNode
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB


class RowPart:
    """The last positions of a row of T tokens, and before them those of `before`. Nothing in it changes.

    Attributes:
        before: the positions in front; None where this part begins the row.
        tokens: the part's own ids.
        logprobs: theirs; None where the part was not sampled.
        length: T.
    """

    __slots__ = ("before", "length", "logprobs", "tokens")

    def __init__(self, before: RowPart | None, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.before = before
        self.tokens = tokens
        self.logprobs = logprobs
        self.length: int = len(tokens) if before is None else before.length + len(tokens)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        """The ids of the whole row."""
        return iter(self.all_tokens())

    def parts(self) -> list[RowPart]:
        """The parts of the whole row, the first one first."""
        parts, part = [self], self.before
        while part is not None:
            parts.append(part)
            part = part.before
        parts.reverse()
        return parts

    def all_tokens(self) -> list[int]:
        """The ids of the whole row, [T], in a list of its own."""
        tokens: list[int] = []
        for part in self.parts():
            tokens += part.tokens
        return tokens

    def arrays(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, masked tokens (-100 where nothing was sampled), logprobs (1.0 there): each [T], a list of its own."""
        tokens: list[int] = []
        masks: list[int] = []
        logprobs: list[float] = []
        for part in self.parts():
            tokens += part.tokens
            if part.logprobs is None:
                masks += [IGNORED_TOKEN_ID] * len(part.tokens)
                logprobs += [MASKED_LOGPROB] * len(part.tokens)
            else:
                masks += part.tokens
                logprobs += part.logprobs
        return tokens, masks, logprobs

    def node(self, full_text: str, metadata: dict[str, Any]) -> SequenceNode:  # Any: JSON values
        """The row with lists of its own; every part was checked when it came."""
        tokens, masks, logprobs = self.arrays()
        return SequenceNode.of_checked(
            full_text=full_text, tokens=tokens, masked_tokens=masks, logprobs=logprobs, metadata=metadata
        )
