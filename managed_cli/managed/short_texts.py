"""Planning a long conversation's turn on the event loop, as long as only what is new in it has to be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from managed_cli.types import Tokenizer

CHARACTERS_PER_ID = 4
"""Of English text, about."""


class LongText(Exception):
    """A text is to be encoded or decoded that would hold up the event loop."""


class _ShortTexts:
    """A tokenizer that takes short texts only; everything else about it is that of the one it stands for."""

    def __init__(self, tokenizer: Tokenizer, characters: int) -> None:
        self._tokenizer = tokenizer
        self._characters = characters

    def __getattr__(self, name: str) -> Any:  # Any: whatever a tokenizer has
        return getattr(self._tokenizer, name)

    def _refuse_more(self, characters: int) -> None:
        if characters > self._characters:
            raise LongText

    def encode_rendered(self, text: str) -> list[int]:
        self._refuse_more(len(text))
        return self._tokenizer.encode_rendered(text)

    def encode_suffix(self, text: str) -> list[int]:
        self._refuse_more(len(text))
        return self._tokenizer.encode_suffix(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if not self._tokenizer.decodes_bytes:
            self._refuse_more(CHARACTERS_PER_ID * len(token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def short_texts(tokenizer: Tokenizer, characters: int) -> Tokenizer:
    """`tokenizer`, but that it raises LongText instead of working on more than `characters`."""
    return cast("Tokenizer", _ShortTexts(tokenizer, characters))
