"""Prompts that are given as token ids."""

from __future__ import annotations

from typing import Any

from managed_cli.errors import InputError
from managed_cli.rollout.jsonl import fault, shown
from managed_cli.rollout.overrides import MAX_INT32

TOKEN_ID_FIELDS = ("prompt_token_ids", "input_ids")
"""Fields of token ids: vLLM's name for them, and SGLang's and tokenizers'."""


def parse_token_ids(field: str, value: object) -> tuple[int, ...]:
    """The ids of a prompt, at least one; the server's vocabulary is not known here.

    Raises:
        InputError: names the first id that is none, by its index from 0.
    """
    if not isinstance(value, list) or not value:
        raise fault(field, "a list of token ids", value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_INT32:
        index, item = next((i, item) for i, item in enumerate(value) if not _is_token_id(item))
        raise InputError(
            f"`{field}[{index}]`: expected a token id, an integer from 0 to {MAX_INT32}, came {shown(item)}"
        )
    return tuple(value)


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT32


def parse_text_or_ids(field: str, value: object) -> dict[str, Any]:  # Any: one type per key
    """A text prompt or token ids, by the value's type.

    Raises:
        InputError: it is neither.
    """
    if isinstance(value, str) and value:
        return {"prompt": value}
    if isinstance(value, list) and value and type(value[0]) is int:
        return {"prompt_ids": parse_token_ids(field, value)}
    raise fault(field, "a non-empty string or a list of token ids", value)
