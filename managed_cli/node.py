"""`SequenceNode`: one row of training data, and the rule that its arrays obey.

Shapes: T tokens. For every position t exactly one of these holds:

    sampled   masked_tokens[t] == tokens[t]   logprobs[t] <= 0 (tolerance 1e-6; -inf only where it was asked to be kept)
    masked    masked_tokens[t] == -100        logprobs[t] == 1.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from managed_cli.errors import AlignmentError
from managed_cli.types import IGNORED_TOKEN_ID, LOGPROB_TOLERANCE, MASKED_LOGPROB


def alignment_breach(
    tokens: Sequence[int], masked_tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[str, str] | None:
    """The first breach of the alignment rule as (kind, sentence), or None.

    Kinds: `length`, `negative_token`, `mask_value`, `masked_logprob`, `sampled_logprob`, `nan_logprob`.
    """
    if not len(tokens) == len(masked_tokens) == len(logprobs):
        sizes = f"{len(tokens)} tokens, {len(masked_tokens)} masked_tokens, {len(logprobs)} logprobs"
        return "length", f"arrays of different lengths: {sizes}"
    for position, (token, mask, logprob) in enumerate(zip(tokens, masked_tokens, logprobs, strict=True)):
        if token < 0:
            return "negative_token", f"position {position}: token id {token} is negative"
        if logprob != logprob:
            return "nan_logprob", f"position {position}: logprob is NaN"
        if mask == IGNORED_TOKEN_ID:
            if logprob != MASKED_LOGPROB:
                return "masked_logprob", f"position {position} is masked but has logprob {logprob}"
        elif mask != token:
            return "mask_value", f"position {position}: masked_tokens has {mask}, tokens has {token}"
        elif logprob > LOGPROB_TOLERANCE:
            return "sampled_logprob", f"position {position} is sampled but has logprob {logprob}"
    return None


class SequenceNode(BaseModel):
    """One sequence of T tokens: what was sent masked, what was sampled trainable.

    Attributes:
        full_text: `decode(tokens, skip_special_tokens=False)`.
        tokens: ids the model saw and sampled, [T].
        masked_tokens: the same ids, -100 where the model did not sample, [T].
        logprobs: natural logs at sampled positions, 1.0 elsewhere, [T].
        metadata: identity, sampling, spans and facts of the row.

    Raises:
        AlignmentError: the arrays break the rule at the top of this module.
    """

    model_config = ConfigDict(extra="forbid")

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = Field(default_factory=dict)  # Any: free-form JSON values

    @classmethod
    def of_checked(
        cls,
        *,
        full_text: str,
        tokens: list[int],
        masked_tokens: list[int],
        logprobs: list[float],
        metadata: dict[str, Any],  # Any: as above
    ) -> Self:
        """`model_construct` in a quarter of its time: a node of values that are known to obey the rule."""
        node = cls.__new__(cls)
        values = {
            "full_text": full_text,
            "tokens": tokens,
            "masked_tokens": masked_tokens,
            "logprobs": logprobs,
            "metadata": metadata,
        }
        put = object.__setattr__
        put(node, "__dict__", values)
        put(node, "__pydantic_fields_set__", set(values))
        put(node, "__pydantic_extra__", None)
        put(node, "__pydantic_private__", None)
        return node

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        breach = alignment_breach(self.tokens, self.masked_tokens, self.logprobs)
        if breach is not None:
            raise AlignmentError(f"a row does not align: {breach[1]}")
        return self

    @property
    def sampled_length(self) -> int:
        """How many positions the model sampled (tokens)."""
        return len(self.masked_tokens) - self.masked_tokens.count(IGNORED_TOKEN_ID)

    def mean_logprob(self) -> float | None:
        """Mean over sampled positions, natural log; None without any."""
        sampled = [
            logprob for mask, logprob in zip(self.masked_tokens, self.logprobs, strict=True) if mask != IGNORED_TOKEN_ID
        ]
        return math.fsum(sampled) / len(sampled) if sampled else None
