"""prime-rl: training samples, as its orchestrator sends them to the trainer."""

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
"""What prime-rl puts at positions that the model did not sample; its masks leave them out."""

UNSTATED_TEMPERATURE = 1.0
"""For a row that does not say what it was sampled at: prime-rl divides by it."""

ENVIRONMENT = "managed_cli"
"""prime-rl keeps its metrics by the environment's name."""


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:  # noqa: ARG001 (as for every format)
    return [_line(rollout) for rollout in rollouts]


def _line(rollout: Rollout) -> Line:
    temperature = UNSTATED_TEMPERATURE if rollout.temperature is None else rollout.temperature
    tokens, mask, logprobs = rollout.tokens.tolist(), rollout.sampled.tolist(), rollout.logprobs_with(NOT_SAMPLED)
    end = rollout.prompt_end
    return {
        "token_ids": tokens,
        "mask": mask,
        "logprobs": logprobs,
        "temperatures": [temperature] * len(tokens),
        "env_name": ENVIRONMENT,
        "advantages": None if rollout.advantage is None else rollout.at_sampled(rollout.advantage),
        "prompt_ids": tokens[:end],
        "prompt_mask": mask[:end],
        "completion_ids": tokens[end:],
        "completion_mask": mask[end:],
        "completion_logprobs": logprobs[end:],
        "completion_temperatures": [temperature] * (len(tokens) - end),
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        **identity_of(rollout),
    }


FORMAT = Format(
    name="prime-rl",
    project="prime-rl: a TrainingSample, in the flat shape of newer versions and the split one of earlier ones",
    source="src/prime_rl/transport/types.py, read in its repository (it is on no package index), in both shapes",
    unit="row",
    fields=(
        Field("token_ids", "list[int] [T]", "ids of prompt and completions"),
        Field("mask", "list[bool] [T]", "true where the model sampled"),
        Field("logprobs", "list[float] [T]", "natural log at sampled positions, 0.0 elsewhere"),
        Field("temperatures", "list[float] [T]", "what each position was sampled at; 1.0 where the row does not say"),
        Field("env_name", "str", "managed_cli"),
        Field("advantages", "list[float] | null [T]", "the row's advantage at sampled positions, 0.0 elsewhere"),
        Field("prompt_ids", "list[int] [P]", "split shape: ids before the first sampled one"),
        Field("prompt_mask", "list[bool] [P]", "split shape: all false"),
        Field("completion_ids", "list[int] [C]", "split shape: all ids from there on"),
        Field("completion_mask", "list[bool] [C]", "split shape: true where the model sampled"),
        Field("completion_logprobs", "list[float] [C]", "split shape: as `logprobs`"),
        Field("completion_temperatures", "list[float] [C]", "split shape: as `temperatures`"),
        REWARD,
        ADVANTAGE,
        *IDENTITY,
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED,
        "its types change with its versions, and are arrays on the wire: make them by field name, as below",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import json",
        "from prime_rl.transport.types import TrainingBatch, TrainingSample",
        "def sample(line):",
        "    row = json.loads(line)",
        "    return TrainingSample(**{key: row[key] for key in TrainingSample.__struct_fields__ if key in row})",
        "batch = TrainingBatch(examples=[sample(line) for line in open(OUT)], step=0)",
    ),
)
