"""The truth about recorded rows: their logprobs from a float32 forward pass over the same ids.

usage: forward.py ROWS.parquet MODEL_FOLDER [--temperature T] [--tokens-per-batch N] [--out REPORT.json]

Runs in the servers' environment, which has torch and transformers, and shares no code with managed_cli: the rules that
a row must obey are written out here a second time. The report, one JSON object (on stdout without --out):

    rows        one object per row: sample_id, choice_index, sampled (positions), max_abs and mean_abs (differences
                recorded − truth, nats), worst_position, recorded and expected (there)
    problems    sentences: rows that break a rule; their logprobs are not compared
    sampled     positions compared, max_abs and mean_abs over all of them
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

NOT_SAMPLED = -100  # ignore_index of PyTorch's cross-entropy
NOT_SAMPLED_LOGPROB = 1.0

TOKENS_PER_BATCH = 2048
"""Bounds memory: logits take 4 bytes × vocabulary (49152) × this many tokens = 400 MB, and a little for the rest."""

Row = dict[str, Any]  # Any: a Parquet row as Python objects


def broken_rule(row: Row, vocabulary: int) -> str | None:
    """The first rule that `row` breaks, in words; None if it obeys all."""
    tokens, masked, logprobs = row["tokens"], row["masked_tokens"], row["logprobs"]
    if not len(tokens) == len(masked) == len(logprobs):
        return f"lengths differ: {len(tokens)} tokens, {len(masked)} masked_tokens, {len(logprobs)} logprobs"
    for position, (token, mask, logprob) in enumerate(zip(tokens, masked, logprobs, strict=True)):
        if not 0 <= token < vocabulary:
            return f"position {position}: token {token} is outside the vocabulary of {vocabulary}"
        if (mask == NOT_SAMPLED) != (logprob == NOT_SAMPLED_LOGPROB):
            return f"position {position}: masked_tokens has {mask}, but the logprob is {logprob}"
        if mask == NOT_SAMPLED:
            continue
        if mask != token:
            return f"position {position}: masked_tokens has {mask}, tokens has {token}"
        if not (math.isfinite(logprob) and logprob <= 1e-6):
            return f"position {position}: sampled, but the logprob is {logprob}"
        if position == 0:
            return "position 0 is sampled: nothing precedes it"
    sampled = len(sampled_positions(row))
    if sampled == 0:
        return "no position is sampled"
    if (row["completion_length"], row["prompt_length"]) != (sampled, len(tokens) - sampled):
        return f"{sampled} of {len(tokens)} positions are sampled, the length columns say otherwise"
    return None


def sampled_positions(row: Row) -> list[int]:
    return [position for position, mask in enumerate(row["masked_tokens"]) if mask != NOT_SAMPLED]


def batches(rows: list[Row], tokens_per_batch: int) -> Iterator[list[Row]]:
    """`rows` in groups whose padded size stays within the bound; a longer row is a group of its own."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row["tokens"])):
        if batch and (len(batch) + 1) * len(row["tokens"]) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def true_logprobs(model: Any, batch: list[Row], temperature: float) -> list[list[float]]:
    """Per row, per sampled position: ln p(token | all tokens before it), computed from the model alone."""
    longest = max(len(row["tokens"]) for row in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    attention = torch.zeros_like(ids)
    for index, row in enumerate(batch):
        length = len(row["tokens"])
        ids[index, :length] = torch.tensor(row["tokens"])
        attention[index, :length] = 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    result = []
    for index, row in enumerate(batch):
        positions = torch.tensor(sampled_positions(row))
        # The logits at position p - 1 are the distribution of the token at p.
        distributions = torch.log_softmax(logits[index, positions - 1].float() / temperature, dim=-1)
        result.append(distributions.gather(1, ids[index, positions].unsqueeze(1)).squeeze(1).tolist())
    return result


def compared(row: Row, truth: list[float]) -> tuple[Row, list[float]]:
    """The report on one row, and its absolute differences."""
    positions = sampled_positions(row)
    differences = [abs(row["logprobs"][p] - t) for p, t in zip(positions, truth, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    report = {
        "sample_id": row["sample_id"],
        "choice_index": row["choice_index"],
        "sampled": len(positions),
        "max_abs": differences[worst],
        "mean_abs": math.fsum(differences) / len(differences),
        "worst_position": positions[worst],
        "recorded": row["logprobs"][positions[worst]],
        "expected": truth[worst],
    }
    return report, differences


def report_on(rows: list[Row], model: Any, *, temperature: float, tokens_per_batch: int) -> dict[str, Any]:
    problems, sound = [], []
    for row in rows:
        broken = broken_rule(row, model.config.vocab_size)
        if broken is None:
            sound.append(row)
        else:
            problems.append(f"sample {row['sample_id']}, choice {row['choice_index']}: {broken}")
    reports, differences = [], []
    for batch in batches(sound, tokens_per_batch):
        for row, truth in zip(batch, true_logprobs(model, batch, temperature), strict=True):
            report, of_row = compared(row, truth)
            reports.append(report)
            differences += of_row
    return {
        "sampled": len(differences),
        "max_abs": max(differences, default=0.0),
        "mean_abs": math.fsum(differences) / len(differences) if differences else 0.0,
        "problems": problems,
        "rows": sorted(reports, key=lambda report: (report["sample_id"], report["choice_index"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="compare recorded logprobs with a float32 forward pass")
    parser.add_argument("rows", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--temperature", type=float, default=1.0, help="divide logits by this first (default: 1, raw)")
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    rows = pq.read_table(options.rows).to_pylist()
    report = report_on(rows, model, temperature=options.temperature, tokens_per_batch=options.tokens_per_batch)
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
