"""Where two tokenizers that should be the same are not."""

from __future__ import annotations

from collections.abc import Sequence

from managed_cli.types import Tokenizer


def first_disagreement(tokenizer: Tokenizer, text: str, theirs: Sequence[int]) -> str | None:
    """Where our ids of `text` and a server's differ, in words; None when they are the same."""
    ours = tokenizer.encode_rendered(text)
    if ours == list(theirs):
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return (
        f"{text!r}: ours has {len(ours)} ids, the server's {len(theirs)}; "
        f"at position {position} {ours[position : position + 3]} against {list(theirs[position : position + 3])}"
    )
