"""Ids → text for byte-level tokenizers, at a thirtieth of the library's time.

Decoding a row is the largest cost of recording it, and in a byte-level vocabulary (GPT-2's, which most models have)
it is a join of bytes: every character of a token stands for one byte, a token with any other character for its own
UTF-8. The table is filled as ids come, and is used only for a tokenizer on whose ids it gives the library's own text.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Sequence
from typing import Any

TRIED_SEQUENCES = 24
TRIED_LENGTH = 40
"""Random ids on which the table is compared with the library before it is used: split characters and specials occur."""

PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for themselves in GPT-2's scheme; the others follow from U+0100 on, in order."""


def byte_of_character() -> dict[str, int]:
    """GPT-2's character → the byte that it stands for."""
    others = [byte for byte in range(256) if byte not in PRINTABLE_BYTES]
    return {chr(byte): byte for byte in PRINTABLE_BYTES} | {chr(256 + at): byte for at, byte in enumerate(others)}


class TokenTable:
    """Id → bytes, found when an id is first asked for; ids that the vocabulary lacks have none."""

    def __init__(self, backend: Any) -> None:  # Any: a `tokenizers.Tokenizer`, which has no types
        self._backend = backend
        self._byte_of = byte_of_character()
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=0) + 1)
        self._known: list[bytes | None] = [None] * size

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; a split UTF-8 character shows as U+FFFD."""
        ids = token_ids
        if skip_special_tokens and not self._special.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._special]
        if len(ids) < 2:  # with one index `itemgetter` gives no tuple
            return b"".join(map(self._found, ids)).decode("utf-8", "replace")
        try:
            joined = b"".join(operator.itemgetter(*ids)(self._known))  # a None is a TypeError
        except (TypeError, IndexError):
            joined = b"".join(map(self._found, ids))
        return joined.decode("utf-8", "replace")

    def _found(self, token_id: int) -> bytes:
        """The bytes of one id, kept where the vocabulary has it."""
        known = self._known[token_id] if 0 <= token_id < len(self._known) else b""
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = b"" if token is None else self._spelled(token)
            self._known[token_id] = known
        return known

    def _spelled(self, token: str) -> bytes:
        values = [self._byte_of.get(character) for character in token]
        return token.encode("utf-8") if None in values else bytes(value for value in values if value is not None)


def token_table(tokenizer: Any) -> TokenTable | None:  # Any: transformers publishes no complete types
    """A table for `tokenizer`, or None where its text is not a join of bytes or the library would say anything else."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    try:
        decoder = json.loads(backend.to_str()).get("decoder") or {}
    except Exception:  # noqa: BLE001 (a tokenizer that cannot be written down is decoded by the library)
        return None
    if decoder.get("type") != "ByteLevel":
        return None
    table = TokenTable(backend)
    chance = random.Random(0)
    size = backend.get_vocab_size(with_added_tokens=True)
    added = sorted(backend.get_added_tokens_decoder())
    for _ in range(TRIED_SEQUENCES):
        ids = [chance.randrange(size) for _ in range(TRIED_LENGTH)] + chance.sample(added, min(2, len(added)))
        chance.shuffle(ids)
        for skip in (False, True):
            library = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if table.text(ids, skip_special_tokens=skip) != library:
                return None
    return table
