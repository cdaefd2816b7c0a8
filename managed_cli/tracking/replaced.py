"""A node whose place an extension has taken, read off that extension: a conversation is in memory once."""

from __future__ import annotations

import operator
from typing import Any

from managed_cli.node import SequenceNode
from managed_cli.tracking.masking import TrackedNode

KEPT = ("node_id", "spans", "end_token_text", "conversation", "tools", "unwritten")
"""What a replaced node holds itself: no list and no text of the whole conversation is among it."""


class ReplacedNode(TrackedNode):
    """What a node was; its tokens and texts are the beginning of those of the newest node that extends it.

    Attributes:
        by: that node.
    """

    __slots__ = ("_length", "_metadata", "_texts", "by")

    by: TrackedNode
    _length: int
    _metadata: dict[str, Any]  # Any: JSON values
    _texts: tuple[str | int, str | int, str | int]

    @classmethod
    def of(cls, was: TrackedNode, by: TrackedNode) -> ReplacedNode | None:
        """`was` as the beginning of `by`; None where `by` is no extension of it.

        An extension has the spans of its parent, and is made of the parent's arrays. To compare these, too, took a
        twelfth of a long conversation's time.
        """
        length, old, new = len(was.node.tokens), was.node, by.node
        if len(by.spans) <= len(was.spans) or not all(map(operator.is_, was.spans, by.spans)):
            return None
        replaced = cls.__new__(cls)
        for name in KEPT:
            object.__setattr__(replaced, name, getattr(was, name))
        object.__setattr__(replaced, "by", by)
        object.__setattr__(replaced, "_length", length)
        object.__setattr__(replaced, "_metadata", old.metadata)
        texts = (
            _shared(old.full_text, new.full_text),
            _shared(was.prompt_text, by.prompt_text),
            _shared(was.continued_text, by.prompt_text),
        )
        object.__setattr__(replaced, "_texts", texts)
        return replaced

    @property
    def is_spelled_alike(self) -> bool:
        """Whether text and prompt, too, are the beginning of that node's."""
        return not isinstance(self._texts[0], str) and not isinstance(self._texts[1], str)

    def move_to(self, newer: TrackedNode, *, spelled_alike: bool) -> None:
        """Read it off `newer` from now on: its tokens begin with those of `by`.

        Args:
            spelled_alike: so do its texts.
        """
        if not spelled_alike:
            texts = (
                _shared(self.full_text, newer.full_text),
                _shared(self.prompt_text, newer.prompt_text),
                _shared(self.continued_text, newer.prompt_text),
            )
            object.__setattr__(self, "_texts", texts)
        object.__setattr__(self, "by", newer)

    @property
    def sent(self) -> None:
        """Nothing: its prompt is part of that node's."""

    @property
    def full_text(self) -> str:
        """`decode` of its tokens."""
        return _beginning(self._texts[0], self.by.node.full_text)

    @property
    def prompt_text(self) -> str:
        """The prompt as rendered."""
        return _beginning(self._texts[1], self.by.prompt_text)

    @property
    def continued_text(self) -> str:
        """`prompt_text` and then the text of the completion, special tokens kept."""
        return _beginning(self._texts[2], self.by.prompt_text)

    @property
    def node(self) -> SequenceNode:
        """The row that it was."""
        row, length = self.by.node, self._length
        return SequenceNode.of_checked(
            full_text=self.full_text,
            tokens=row.tokens[:length],
            masked_tokens=row.masked_tokens[:length],
            logprobs=row.logprobs[:length],
            metadata=self._metadata,
        )


def _shared(text: str, longer: str) -> str | int:
    """The length of `text` where `longer` begins with it, else the text itself."""
    return len(text) if longer.startswith(text) else text


def _beginning(text: str | int, longer: str) -> str:
    return text if isinstance(text, str) else longer[:text]
