"""TRL: what a `rollout_func` of GRPOTrainer returns, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from managed_cli.export.formats import (
    ADVANTAGE,
    IDENTITY,
    LOGPROBS_CONVENTION,
    REWARD,
    UNSHIFTED,
    Field,
    Format,
    Line,
    identity_of,
)

if TYPE_CHECKING:
    from managed_cli.export.rollouts import Rollout

NOT_SAMPLED = 0.0
"""What TRL's own tool loop puts at positions that the model did not sample."""


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:  # noqa: ARG001 (as for every format)
    return [
        {
            "prompt_ids": r.tokens[: r.prompt_end].tolist(),
            "completion_ids": r.tokens[r.prompt_end :].tolist(),
            "logprobs": r.logprobs_with(NOT_SAMPLED)[r.prompt_end :],
            "env_mask": r.sampled[r.prompt_end :].astype(int).tolist(),
            "reward": r.reward,
            "advantage": r.advantage,
            **identity_of(r),
        }
        for r in rollouts
    ]


FORMAT = Format(
    name="trl",
    project="TRL: one row of what GRPOTrainer's rollout_func returns as columns",
    source="trl 1.16.0: trainer/grpo_trainer.py (rollout_func, env_mask, _tool_call_loop)",
    unit="row",
    fields=(
        Field("prompt_ids", "list[int] [P]", "ids before the first sampled one"),
        Field("completion_ids", "list[int] [C]", "all ids from there on, those between sampled turns included"),
        Field("logprobs", "list[float] [C]", "natural log at sampled positions, 0.0 elsewhere"),
        Field("env_mask", "list[int] [C]", "1 where the model sampled, 0 where it did not: no loss is taken there"),
        REWARD,
        ADVANTAGE,
        *IDENTITY,
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED,
        "TRL makes its own advantages, from reward functions, which get further keys by name: one that returns "
        "`reward` trains on what --reward gave",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import collections, json",
        "rows = collections.defaultdict(list)  # the dataset's prompts are the sample ids",
        "for line in open(OUT):",
        '    rows[(row := json.loads(line))["sample_id"]].append(row)',
        "def rollout_func(prompts, trainer):",
        "    taken = [rows[prompt].pop(0) for prompt in prompts]",
        "    return {key: [row[key] for row in taken] for key in taken[0]}",
        "def recorded(reward, **_):",
        "    return reward",
        "GRPOTrainer(..., reward_funcs=recorded, rollout_func=rollout_func)",
    ),
)
