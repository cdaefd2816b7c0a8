"""Numbers of a reply: what stands for minus infinity, and whether many are within bounds."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal

import numpy as np

from managed_cli.sent_prompt import SentPrompt

MINUS_INF_FLOOR = -9998.0
"""At or below it a logprob stands for -inf: vLLM writes -9999.0, SGLang -3.4e38. Real logits come nowhere near."""

MANY_NUMBERS = 256
"""From here on making an array of them is quicker than looking at each."""


def logprob_or_minus_inf(value: float | None) -> float:
    """A server's null where -inf does not fit into JSON (TRL), as -inf."""
    return -math.inf if value is None else value


def all_within(lists: Sequence[Sequence[float]], code: Literal["i", "d"], *, above: float, highest: float) -> bool:
    """Whether every number of every list is greater than `above` and at most `highest`.

    False also where one is None or NaN, or does not fit into 32 bits where `code` is "i".

    Args:
        code: how `struct` writes them: long lists are compared as one array of it, in a third of the time.
    """
    try:
        if sum(map(len, lists)) < MANY_NUMBERS:
            return all(_within(values, above, highest, maybe_nan=code == "d") for values in lists if values)
        packed = b"".join([struct.pack(f"{len(values)}{code}", *values) for values in lists])
    except (TypeError, struct.error):
        return False
    array = np.frombuffer(packed, dtype=code)
    return bool(above < array.min() and array.max() <= highest)


def ids_within(prompt_ids: Sequence[int], highest: float) -> bool:
    """Whether every id is at least 0 and at most `highest`; what is known of a prompt that is sent is not looked at."""
    if not isinstance(prompt_ids, SentPrompt):
        return all_within([prompt_ids], "i", above=-1, highest=highest)
    unchecked = prompt_ids.unchecked(highest)
    if unchecked and not all_within([unchecked], "i", above=-1, highest=highest):
        return False
    prompt_ids.checked, prompt_ids.highest = len(prompt_ids), highest
    return True


def _within(values: Sequence[float], above: float, highest: float, *, maybe_nan: bool) -> bool:
    return above < min(values) and max(values) <= highest and not (maybe_nan and math.isnan(sum(values)))
