"""A node whose place an extension has taken, read off that extension: a conversation is in memory once."""

from __future__ import annotations

from managed_cli.tracking.masking import TrackedNode

KEPT = ("node_id", "row", "metadata", "spans", "end_token_text", "conversation", "tools", "unwritten")
"""What a replaced node holds itself: no text of the whole conversation is among it, and its row is a part of that."""


class ReplacedNode(TrackedNode):
    """What a node was; its tokens and texts are the beginning of those of the newest node that extends it.

    Attributes:
        by: that node.
    """

    __slots__ = ("_texts", "by")

    by: TrackedNode
    _texts: tuple[str | int, str | int, str | int]

    @classmethod
    def of(cls, was: TrackedNode, by: TrackedNode) -> ReplacedNode | None:
        """`was` as the beginning of `by`; None where `by` is no extension of it."""
        prompt = by.row.before
        if prompt is None or prompt.before is not was.row:
            return None
        replaced = cls.__new__(cls)
        for name in KEPT:
            object.__setattr__(replaced, name, getattr(was, name))
        object.__setattr__(replaced, "by", by)
        texts = (
            _shared(was.full_text, by.full_text),
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
        return _beginning(self._texts[0], self.by.full_text)

    @property
    def prompt_text(self) -> str:
        """The prompt as rendered."""
        return _beginning(self._texts[1], self.by.prompt_text)

    @property
    def continued_text(self) -> str:
        """`prompt_text` and then the text of the completion, special tokens kept."""
        return _beginning(self._texts[2], self.by.prompt_text)

    @property
    def shown_length(self) -> int:
        """Characters of `shown_text`."""
        return _length(self._texts[1]) + len(self.last_span.text)

    @property
    def reach(self) -> int:
        """Characters of the longest text that a prompt which continues this node begins with."""
        return max(_length(self._texts[2]), _length(self._texts[0]))


def _shared(text: str, longer: str) -> str | int:
    """The length of `text` where `longer` begins with it, else the text itself."""
    return len(text) if longer.startswith(text) else text


def _beginning(text: str | int, longer: str) -> str:
    return text if isinstance(text, str) else longer[:text]


def _length(text: str | int) -> int:
    return len(text) if isinstance(text, str) else text
