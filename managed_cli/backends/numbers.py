"""Numbers of a reply: what stands for minus infinity, and the least and the greatest of many."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

MINUS_INF_FLOOR = -9998.0
"""At or below it a logprob stands for -inf: vLLM writes -9999.0, SGLang -3.4e38. Real logits come nowhere near."""

LONG_LIST = 160
"""Values from which on making an array of them is quicker than looking at each."""


def logprob_or_minus_inf(value: float | None) -> float:
    """A server's null where -inf does not fit into JSON (TRL), as -inf."""
    return -math.inf if value is None else value


def extremes(values: Sequence[float], code: Literal["q", "d"]) -> tuple[float, float]:
    """The least and the greatest of some numbers; NaN twice where one of them is.

    Args:
        code: how `struct` writes them: long lists are compared as an array of it, in a third of the time.
    """
    if len(values) < LONG_LIST:
        return (math.nan, math.nan) if math.isnan(sum(values)) else (min(values), max(values))
    try:
        array = np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)
    except struct.error:  # an id of more than 64 bits
        return min(values), max(values)
    return array.min().item(), array.max().item()


def logprobs_or_minus_inf(values: Sequence[float | None]) -> Sequence[float]:
    """The same for every value; those without a null as they are."""
    if None in values:
        return [logprob_or_minus_inf(value) for value in values]
    return cast("Sequence[float]", values)
