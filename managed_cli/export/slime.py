"""slime: samples, as `Sample.from_dict` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from managed_cli.export.formats import LOGPROBS_CONVENTION, UNSHIFTED, Field, Format, Line, identity_of

if TYPE_CHECKING:
    from managed_cli.export.rollouts import Rollout

NOT_SAMPLED = 0.0
"""What slime's own multi-turn examples put at positions that the model did not sample."""

STATUS_OF_FINISH = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""Finish reason → `Sample.Status`, as slime's own `update_from_meta_info` has it."""


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:
    return [
        {
            "group_index": number,
            "index": r.row,
            "prompt": "",
            "tokens": r.tokens.tolist(),
            "response": "".join(r.turn_texts),
            "response_length": len(r.tokens) - r.prompt_end,
            "label": None,
            "reward": r.reward,
            "loss_mask": r.sampled[r.prompt_end :].astype(int).tolist(),
            "weight_versions": _weight_versions(r),
            "rollout_log_probs": r.logprobs_with(NOT_SAMPLED)[r.prompt_end :],
            "status": STATUS_OF_FINISH.get(str(r.columns["finish_reason"]), "completed"),
            "metadata": {"advantage": r.advantage, **identity_of(r)},
        }
        for r in rollouts
    ]


def _weight_versions(rollout: Rollout) -> list[str]:
    turns = rollout.metadata.get("turns")
    spans = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    told = [str(span["weight_version"]) for span in spans if span.get("weight_version") is not None]
    last = rollout.metadata.get("weight_version")
    return told or ([] if last is None else [str(last)])


FORMAT = Format(
    name="slime",
    project="slime: a Sample, as Sample.from_dict reads it",
    source="slime's slime/utils/types.py and slime/ray/rollout.py, read in its repository (it is on no package index)",
    unit="row",
    fields=(
        Field("group_index", "int", "number of the sample in this file, from 0"),
        Field("index", "int", "number of the row in the recording, from 0"),
        Field("prompt", "str", "empty: rows hold the prompt as ids, in `tokens`"),
        Field("tokens", "list[int] [T]", "ids of prompt and completions"),
        Field("response", "str", "the sampled turns as a person reads them, one after the other"),
        Field("response_length", "int", "C: positions from the first sampled one on"),
        Field("label", "null", "none: rewards are made before"),
        Field("reward", "float | null", "what --reward gave the row; null without it"),
        Field("loss_mask", "list[int] [C]", "1 where the model sampled, 0 where it did not"),
        Field("weight_versions", "list[str]", "the server's word for its weights, where it has one"),
        Field("rollout_log_probs", "list[float] [C]", "natural log at sampled positions, 0.0 elsewhere"),
        Field("status", "str", "completed (stop), truncated (length) or aborted (abort)"),
        Field(
            "metadata",
            "dict",
            "advantage, sample_id, choice_index, node_id, finish_reason, temperature, logprobs_mode",
        ),
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED + "; loss_mask and rollout_log_probs begin at the first sampled position",
        "slime normalises rewards by group itself, and wants groups of one size",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import json, torch  # then: --load-debug-rollout-data rollout_{rollout_id}.pt --debug-train-only",
        "samples = [json.loads(line) for line in open(OUT)]",
        'torch.save({"rollout_id": 0, "samples": samples}, "rollout_0.pt")',
    ),
)
