"""Sampling parameters as users give them: checked, and complete before anything is sent."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence

from managed_cli.errors import ConfigError
from managed_cli.types import TOP_K_OFF, SamplingParams

SEED_BITS = 31
"""Seeds made here fit into a signed 32-bit integer, which every server takes."""


def checked_sampling(
    *,
    n: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = TOP_K_OFF,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
) -> SamplingParams:
    """The parameters, every one of them set; a seed is drawn where none is given.

    Raises:
        ConfigError: a value outside its range, or n > 1 at temperature 0, whose choices would all be the same.
    """
    defaults = SamplingParams()
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    params = SamplingParams(
        n=n,
        max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=TOP_K_OFF if top_k in (0, TOP_K_OFF) else top_k,
        min_p=float(min_p),
        repetition_penalty=float(repetition_penalty),
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stop=stops,
        stop_token_ids=tuple(stop_token_ids or ()),
    )
    _check(params)
    return params


def _check(params: SamplingParams) -> None:
    rules = [
        (params.n >= 1, f"n is {params.n}; it must be at least 1"),
        (params.max_tokens >= 1, f"max_tokens is {params.max_tokens}; it must be at least 1"),
        (
            math.isfinite(params.temperature) and params.temperature >= 0,
            f"temperature is {params.temperature}; it must be 0 or more",
        ),
        (0 < params.top_p <= 1, f"top_p is {params.top_p}; it must be above 0 and at most 1"),
        (params.top_k == TOP_K_OFF or params.top_k >= 1, f"top_k is {params.top_k}; it must be -1 (off) or at least 1"),
        (0 <= params.min_p <= 1, f"min_p is {params.min_p}; it must be between 0 and 1"),
        (params.repetition_penalty > 0, f"repetition_penalty is {params.repetition_penalty}; it must be above 0"),
        (all(params.stop), "a stop string is empty"),
        (all(token >= 0 for token in params.stop_token_ids), "a stop token id is negative"),
        (
            not (params.n > 1 and params.temperature == 0),
            f"n is {params.n} at temperature 0: the choices would all be the same",
        ),
    ]
    for holds, complaint in rules:
        if not holds:
            raise ConfigError(complaint)
