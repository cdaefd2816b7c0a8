"""The contract of `Backend.token_logprobs`: one real logprob for every id but the first, or an error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from managed_cli.backends.numbers import MINUS_INF_FLOOR, logprob_or_minus_inf
from managed_cli.errors import ServerContractError
from managed_cli.types import LOGPROB_TOLERANCE

SCORING_HINT = "`--server-type transformers` scores with the weights themselves, in this process"


def check_positions(label: str, token_ids: Sequence[int], positions: int) -> None:
    """Raise ServerContractError unless a reply has logprobs at as many positions as there are ids behind the first."""
    if positions != len(token_ids) - 1:
        raise ServerContractError(
            f"{label} sent prompt logprobs for {positions} positions, not for the {len(token_ids) - 1} behind the first"
        )


def checked_token_logprobs(label: str, token_ids: Sequence[int], values: Sequence[float | None]) -> list[float]:
    """`values`, [P - 1], as natural logs of the ids at positions 1 … P - 1; -inf in any server's spelling as -inf.

    Raises:
        ServerContractError: another number of values, or one that is no logprob.
    """
    check_positions(label, token_ids, len(values))
    logprobs = []
    for position, value in enumerate(map(logprob_or_minus_inf, values), start=1):
        if math.isnan(value) or value > LOGPROB_TOLERANCE:
            raise ServerContractError(
                f"{label} sent the logprob {value} for the token at position {position}; it must be 0 or less"
            )
        logprobs.append(-math.inf if value <= MINUS_INF_FLOOR else value)
    return logprobs
