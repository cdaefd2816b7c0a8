"""Recordings for the tests of export: rows of one and of several turns, of groups, and with every fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from managed_cli.node import SequenceNode
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB
from tests.storage.rows import rows_at

HIGHEST_ID = 200
"""Inside every vocabulary that the tests know."""


def node(
    sample_id: str,
    choice: int,
    pieces: Sequence[tuple[bool, int]],
    *,
    node_id: str | None = None,
    parent_id: str | None = None,
    logprob: float | None = None,
    finish_reason: str = "stop",
    **metadata: Any,
) -> SequenceNode:
    """A row of pieces (whether sampled, how many tokens), the same at every call."""
    source = random.Random(f"{sample_id}/{choice}/{pieces}")
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    turns = []
    for is_sampled, length in pieces:
        ids = [source.randrange(3, HIGHEST_ID) for _ in range(length)]
        if is_sampled:
            span = {"start": len(tokens), "end": len(tokens) + length, "text": f"<{choice}.{len(turns)}>"}
            turns.append({**span, "finish_reason": finish_reason, "stop_reason": None})
        tokens += ids
        masks += ids if is_sampled else [IGNORED_TOKEN_ID] * length
        logprobs += [-source.random() if is_sampled else MASKED_LOGPROB for _ in ids]
    if logprob is not None:
        logprobs[masks.index(next(mask for mask in masks if mask != IGNORED_TOKEN_ID))] = logprob
    return SequenceNode(
        full_text=f"{sample_id} {choice}",
        tokens=tokens,
        masked_tokens=masks,
        logprobs=logprobs,
        metadata={
            "sample_id": sample_id,
            "choice_index": choice,
            "node_id": node_id or f"0.{choice}",
            "parent_id": parent_id,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "turns": turns,
            "sampling": {"temperature": 0.5, "n": 2},
            "logprobs_mode": "raw",
            "fields": {"answer": choice},
            **metadata,
        },
    )


ONE_TURN = ((False, 4), (True, 3))
TWO_TURNS = ((False, 3), (True, 2), (False, 5), (True, 4))
PROMPT_ENDS_EARLY = ((False, 1), (True, 1))


def samples() -> list[list[SequenceNode]]:
    """Three samples of two choices each: one turn, two turns of a chat, and the shortest row there can be."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "<0.0>"}]
    chats = {"two": {"messages": [*asked, {"role": "user", "content": "Two?"}]}}
    shapes = {"one": ONE_TURN, "two": TWO_TURNS, "short": PROMPT_ENDS_EARLY}
    return [
        [
            node(name, choice, shape, finish_reason=("stop", "length")[choice], **chats.get(name, {}))
            for choice in (0, 1)
        ]
        for name, shape in shapes.items()
    ]


def expected(path: Path, reward: object = None) -> list[dict[str, Any]]:
    """Each row as `load_with` gives it, in the order of the recording, read off the columns alone."""
    rows = rows_at(path)
    return [
        {
            "ids": row["tokens"],
            "sampled": [mask != IGNORED_TOKEN_ID for mask in row["masked_tokens"]],
            "logprobs": [
                value
                for value, mask in zip(row["logprobs"], row["masked_tokens"], strict=True)
                if mask != IGNORED_TOKEN_ID
            ],
            "reward": reward(row) if callable(reward) else None,
        }
        for row in rows
    ]
