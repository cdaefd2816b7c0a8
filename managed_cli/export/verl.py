"""verl: the output of an agent loop, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from managed_cli.export.formats import LOGPROBS_CONVENTION, UNSHIFTED, Field, Format, Line, identity_of

if TYPE_CHECKING:
    from managed_cli.export.rollouts import Rollout

NOT_SAMPLED = 0.0
"""What verl's own tool agent loop puts at positions that the model did not sample."""

SIDES_OF_A_TURN = 2
"""verl counts the user's messages and the assistant's; its single-turn loop says 2."""


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:  # noqa: ARG001 (as for every format)
    return [
        {
            "prompt_ids": r.tokens[: r.prompt_end].tolist(),
            "response_ids": r.tokens[r.prompt_end :].tolist(),
            "response_mask": r.sampled[r.prompt_end :].astype(int).tolist(),
            "response_logprobs": r.logprobs_with(NOT_SAMPLED)[r.prompt_end :],
            "reward_score": r.reward,
            "num_turns": SIDES_OF_A_TURN * max(1, len(r.turn_texts)),
            "metrics": {},
            "extra_fields": {"uid": r.sample_id, "advantage": r.advantage, **identity_of(r)},
        }
        for r in rollouts
    ]


FORMAT = Format(
    name="verl",
    project="verl: an AgentLoopOutput",
    source="verl 0.9.1: experimental/agent_loop/agent_loop.py (AgentLoopOutput.as_dict), tool_agent_loop.py",
    unit="row",
    fields=(
        Field("prompt_ids", "list[int] [P]", "ids before the first sampled one"),
        Field("response_ids", "list[int] [C]", "all ids from there on, those between sampled turns included"),
        Field("response_mask", "list[int] [C]", "1 where the model sampled, 0 where it did not"),
        Field("response_logprobs", "list[float] [C]", "natural log at sampled positions, 0.0 elsewhere"),
        Field("reward_score", "float | null", "what --reward gave the row; as_dict() puts it at the last position"),
        Field("num_turns", "int", "messages of user and assistant: two for each sampled turn"),
        Field("metrics", "dict", "empty: nothing was timed"),
        Field(
            "extra_fields",
            "dict",
            "uid (the group: the sample id), advantage, sample_id, choice_index, node_id, finish_reason, temperature, "
            "logprobs_mode",
        ),
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED,
        "as_dict() gives prompts, responses, response_mask, rollout_log_probs and rm_scores; verl pads",
        "verl makes its own advantages, by group: give it `uid`",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import json",
        "from verl.experimental.agent_loop.agent_loop import AgentLoopOutput",
        "outputs = [AgentLoopOutput(**json.loads(line)) for line in open(OUT)]",
    ),
)
