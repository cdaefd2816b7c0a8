"""Text → ids by the Rust library itself, where the library above it adds nothing, and by known pieces where it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from managed_cli.piece_encoder import PieceEncoder, can_be_cut

PIECE_PROBES = (
    "one  two   three \n four\t five\r\n\r\n six ",
    " it's 'tis we'LL x1 1,234.5 $x$ (a) ?! ... -- == \n\n“so” said\u00a0she , \u3000 and",
    "漢字 と 漢 字 😀 é e\u0301 \u0301 ½ ² 5 6 7.8 \x01 a\x01 b \ufeff z \u200b w\u2028 end",
    "def f(x):\n    return x ** 2  # no \n\n\nclass A: <|im_end|> <|endoftext|>x</s> <s>",
)
"""Further texts for pieces, where cuts may and may not be: runs of white space, marks, digits, specials."""


class Encode(Protocol):
    """Ids of a text."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def quick_encoder(tokenizer: Any, texts: Sequence[str]) -> Encode:  # Any: transformers publishes no complete types
    """`tokenizer.encode`, without finding offsets that nobody asks for, where that gives the same ids.

    Args:
        tokenizer: one of the transformers library.
        texts: on which both must agree.
    """

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    rust: Any = getattr(tokenizer, "backend_tokenizer", None)  # Any: tokenizers publishes no complete types
    if not hasattr(rust, "encode_batch_fast"):
        return encode
    pieces = PieceEncoder(rust) if can_be_cut(rust) else None

    def quick(text: str, *, add_special_tokens: bool) -> list[int]:
        # Whoever shares this tokenizer may have left settings on it, which `encode` takes off again.
        if rust.truncation is not None or rust.padding is not None or rust.encode_special_tokens:
            return encode(text, add_special_tokens=add_special_tokens)
        if pieces is not None and not add_special_tokens:
            return pieces.encode(text)
        ids: list[int] = rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def agrees() -> bool:
        return all(
            encode(text, add_special_tokens=specials) == quick(text, add_special_tokens=specials)
            for text in (*texts, *(PIECE_PROBES * 2 if pieces is not None else ()))  # twice: unknown, then known
            for specials in (True, False)
        )

    if agrees():
        return quick
    if pieces is not None:
        pieces = None
        if agrees():
            return quick
    return encode
