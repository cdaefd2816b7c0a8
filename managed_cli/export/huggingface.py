"""Hugging Face: rows for `datasets`, and for TRL's SFTTrainer without tokenising anything again."""

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
from managed_cli.types import MASKED_LOGPROB

if TYPE_CHECKING:
    from managed_cli.export.rollouts import Rollout


def _lines(rollouts: Sequence[Rollout], number: int) -> list[Line]:  # noqa: ARG001 (as for every format)
    return [
        {
            "input_ids": r.tokens.tolist(),
            "labels": r.masked_tokens.tolist(),
            "completion_mask": r.sampled.astype(int).tolist(),
            "logprobs": r.logprobs_with(MASKED_LOGPROB),
            "text": r.columns["full_text"],
            "completions": r.turn_texts,
            "messages": r.conversation,
            "tools": r.tools_text,
            "reward": r.reward,
            "advantage": r.advantage,
            **identity_of(r),
        }
        for r in rollouts
    ]


FORMAT = Format(
    name="hf",
    project="Hugging Face datasets, and TRL's SFTTrainer: a tokenised example",
    source="trl 1.16.0: trainer/sft_trainer.py (pre-tokenised datasets); datasets 5.2.0: load_dataset('json')",
    unit="row",
    fields=(
        Field("input_ids", "list[int] [T]", "ids of prompt and completions"),
        Field("labels", "list[int] [T]", "the same ids, -100 where the model did not sample"),
        Field("completion_mask", "list[int] [T]", "1 where the model sampled, 0 where it did not"),
        Field("logprobs", "list[float] [T]", "natural log at sampled positions, 1.0 elsewhere"),
        Field("text", "str", "the whole row as text, special tokens kept"),
        Field("completions", "list[str]", "the sampled turns as a person reads them"),
        Field(
            "messages",
            "list[dict] | null",
            "the chat: what was sent for the last turn, and the answer as a person reads it; null for other prompts",
        ),
        Field("tools", "str | null", "JSON of the tools that the chat template was given; null without"),
        REWARD,
        ADVANTAGE,
        *IDENTITY,
    ),
    lines=_lines,
    conventions=(
        UNSHIFTED + "; models of transformers shift `labels` themselves",
        "SFTTrainer takes input_ids and labels as they are: nothing is tokenised again",
        "a trainer that reads chats takes `messages` (of a conversational prompt and completion: all but the last, and "
        "the last); it tokenises them again, so ids, masks and logprobs are not those of its tokens",
        LOGPROBS_CONVENTION,
    ),
    loading=(
        "import datasets",
        'rows = datasets.load_dataset("json", data_files=OUT, split="train")',
        "SFTTrainer(..., train_dataset=rows)  # the ids; for another tokenizer, the chats alone:",
        'SFTTrainer(..., train_dataset=rows.select_columns(["messages", "tools"]))',
    ),
)
