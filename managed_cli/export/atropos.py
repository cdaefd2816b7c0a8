"""Atropos: scored groups, as its environments push them to the trajectory API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from managed_cli.export.formats import LOGPROBS_CONVENTION, UNSHIFTED, Field, Format, Line
from managed_cli.types import MASKED_LOGPROB

if TYPE_CHECKING:
    from managed_cli.export.rollouts import Rollout


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:  # noqa: ARG001 (as for every format)
    advantages = [r.at_sampled(r.advantage) for r in rollouts if r.advantage is not None]
    chats = [r.conversation for r in rollouts]
    sampling = rollouts[0].metadata.get("sampling")
    return [
        {
            "tokens": [r.tokens.tolist() for r in rollouts],
            "masks": [r.masked_tokens.tolist() for r in rollouts],
            "scores": [r.reward for r in rollouts],
            "advantages": advantages or None,
            "ref_logprobs": None,
            "messages": None if None in chats else chats,
            "generation_params": dict(sampling) if isinstance(sampling, dict) else None,
            "inference_logprobs": [r.logprobs_with(MASKED_LOGPROB) for r in rollouts],
            "overrides": None,
            "group_overrides": None,
            "images": None,
            "sample_id": rollouts[0].sample_id,
            "choice_indexes": [r.columns["choice_index"] for r in rollouts],
            "logprobs_mode": str(rollouts[0].metadata.get("logprobs_mode", "unknown")),
        }
    ]


FORMAT = Format(
    name="atropos",
    project="Atropos: a ScoredDataGroup, as POST /scored_data takes it",
    source="atroposlib 0.4.0: envs/base.py (ScoredDataGroup), api/server.py (ScoredData), example_trainer/data.py",
    unit="group",
    needs_reward=True,
    fields=(
        Field("tokens", "list[list[int]] [n][T]", "ids of prompt and completions"),
        Field("masks", "list[list[int]] [n][T]", "the same ids, -100 where the model did not sample"),
        Field("scores", "list[float] [n]", "what --reward gave each row"),
        Field(
            "advantages",
            "list[list[float]] | null [n][T]",
            "the row's advantage at sampled positions, 0.0 elsewhere; null with --advantage none",
        ),
        Field("ref_logprobs", "null", "a reference model's logprobs: none were recorded"),
        Field(
            "messages",
            "list[list[dict]] | null [n]",
            "each row's chat: what was sent for the last turn, and the answer; null for other prompts",
        ),
        Field(
            "generation_params", "dict | null", "the sampling parameters that were sent; trainers read `temperature`"
        ),
        Field("inference_logprobs", "list[list[float]] [n][T]", "natural log at sampled positions, 1.0 elsewhere"),
        Field("overrides", "null", "none"),
        Field("group_overrides", "null", "none"),
        Field("images", "null", "none"),
        Field("sample_id", "str", "which input sample; the API leaves it out"),
        Field("choice_indexes", "list[int] [n]", "which choices; the API leaves it out"),
        Field("logprobs_mode", "str", "raw, temperature, processed or unknown; the API leaves it out"),
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED + ": the trainer shifts all three by one",
        "the example trainer normalises `scores` itself and does not read `advantages`",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import json, requests",
        "for line in open(OUT):",
        '    requests.post("http://127.0.0.1:8000/scored_data", json=json.loads(line)).raise_for_status()',
    ),
)
