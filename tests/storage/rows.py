"""Nodes as a run makes them, for the tests of what is stored."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from managed_cli.errors import OutputError
from managed_cli.node import SequenceNode
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import record_batch
from managed_cli.storage.shards import ShardedOutput, open_output
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB

REPOSITORY = Path(__file__).parents[2]
"""Where child processes run, so that they can import `tests`."""

RUN_FACTS: dict[str, object] = {
    "version": "0.1.0",
    "model": "tiny-random",
    "server": {"type": "vllm", "base_url": "http://127.0.0.1:8000"},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "stop": []},
    "started_at": "2026-01-02T03:04:05Z",
}

FINGERPRINT: dict[str, object] = {"model": "tiny-random", "temperature": 1.0, "seed": 7, "stop": ["\n"]}


def make_node(
    sample_id: str = "s-0",
    choice_index: int = 0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    logprobs: Sequence[float] = (-0.5, -0.25),
    full_text: str = "a b c d e",
    finish_reason: str = "stop",
    **metadata: Any,  # Any: free-form JSON values
) -> SequenceNode:
    """One row: `prompt` masked, `sampled` kept."""
    facts = {
        "sample_id": sample_id,
        "choice_index": choice_index,
        "node_id": f"{sample_id}/{choice_index}",
        "parent_id": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "turns": [
            {"start": len(prompt), "end": len(prompt) + len(sampled), "finish_reason": finish_reason, "text": "d e"}
        ],
        "sampling": {"temperature": 1.0, "n": 1},
        "server": "http://127.0.0.1:8000",
        "model": "tiny-random",
    }
    return SequenceNode(
        full_text=full_text,
        tokens=[*prompt, *sampled],
        masked_tokens=[*[IGNORED_TOKEN_ID] * len(prompt), *sampled],
        logprobs=[*[MASKED_LOGPROB] * len(prompt), *logprobs],
        metadata=facts | metadata,
    )


def make_sample(index: int, *, choices: int = 1, prompt_length: int = 3, sampled_length: int = 5) -> list[SequenceNode]:
    """All rows of sample number `index`, the same at every call."""
    source = random.Random(index)
    return [
        make_node(
            f"s-{index}",
            choice,
            prompt=[source.randrange(50_000) for _ in range(prompt_length)],
            sampled=[source.randrange(50_000) for _ in range(sampled_length)],
            logprobs=[-source.random() for _ in range(sampled_length)],
            full_text=f"prompt {index} completion {choice}",
            finish_reason=source.choice(["stop", "length"]),
        )
        for choice in range(choices)
    ]


def write_output(
    path: Path | str,
    samples: Iterable[Sequence[SequenceNode]],
    *,
    rows_per_shard: int = 4,
    fingerprint: Mapping[str, object] | None = None,
    **how: bool,
) -> Path:
    """The finished output of `samples` at `path`; a path that ends in `/` is given as text."""
    with opened(path, rows_per_shard=rows_per_shard, fingerprint=fingerprint or FINGERPRINT, **how) as output:
        fill(output, samples)
        return output.finish()


def opened(
    path: Path | str,
    *,
    rows_per_shard: int = 4,
    fingerprint: Mapping[str, object] | None = FINGERPRINT,
    **how: bool,
) -> ShardedOutput:
    """The output at `path`; `how` are `overwrite`, `resume` and `retry_failed`."""
    return open_output(str(path), run_facts=RUN_FACTS, rows_per_shard=rows_per_shard, fingerprint=fingerprint, **how)


def fill(output: ShardedOutput, samples: Iterable[Sequence[SequenceNode]]) -> None:
    """Add `samples` as a run does, shard by shard; what is left over stays buffered."""
    for sample in samples:
        output.add(sample)
        if output.shard_due:
            output.write_shard(output.take_pending())


def columns_of(nodes: Iterable[SequenceNode]) -> dict[str, list[Any]]:  # Any: the columns' values
    """What every reader must give back: the columns by name, through Arrow's own types."""
    columns: dict[str, list[Any]] = record_batch(list(nodes)).to_pydict()  # Any: as above
    return columns


def rows_at(path: Path | str) -> list[dict[str, Any]]:  # Any: the columns' values
    """All rows recorded at `path`, in the order of their identity."""
    rows = [row for batch in open_recording(path).iter_batches() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["sample_id"], row["choice_index"], row["node_id"]))


def rows_of(samples: Iterable[Sequence[SequenceNode]]) -> list[dict[str, Any]]:  # Any: the columns' values
    """What `rows_at` gives for an output of `samples`."""
    batches = [record_batch(sample) for sample in samples]
    rows = [row for batch in batches for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["sample_id"], row["choice_index"], row["node_id"]))


def samples_at(path: Path | str) -> list[str]:
    """The samples recorded at `path`, in order; none where nothing stands."""
    try:
        return [row["sample_id"] for row in rows_at(path) if row["choice_index"] == 0]
    except OutputError:
        return []


def failures_at(path: Path) -> dict[str, dict[str, Any]]:  # Any: JSON values
    """Sample id → its failure, of a file without superseded lines."""
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({entry["sample_id"] for entry in entries}) == len(entries)
    return {entry["sample_id"]: entry for entry in entries}
