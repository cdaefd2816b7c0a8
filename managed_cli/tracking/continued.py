"""The text of ids of which the first have been decoded before: a conversation is not decoded anew at every turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from managed_cli.types import Tokenizer

SPLIT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def continued_text(known: str, known_ids: Iterable[int], more_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """`decode([*known_ids, *more_ids])`, where `known` is `decode(known_ids)`.

    Where a text is that of bytes one after the other, what is known stays as it is, unless it ends in a character that
    more bytes could complete. Other decoders may look back, and decode the whole.
    """
    if tokenizer.decodes_bytes and not known.endswith(SPLIT_CHARACTER):
        return known + tokenizer.decode(more_ids)
    return tokenizer.decode([*known_ids, *more_ids])
