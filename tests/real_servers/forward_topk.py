"""The likeliest next tokens at every position of a prompt, from a float32 forward pass.

usage: forward_topk.py MODEL_FOLDER TOKEN_IDS_AS_JSON REPORT.json

Runs in the servers' environment and shares no code with managed_cli. The report is a list with one object per
position: logprob by token id. Position 0 is empty, since nothing precedes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

LIKELIEST = 64
"""More than any test asks for, so that ties at the edge are seen."""


@torch.inference_mode()
def main() -> None:
    folder, token_ids, report = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
    best = torch.log_softmax(logits, dim=-1).topk(LIKELIEST, dim=-1)
    positions: list[dict[int, float]] = [{}]
    for ids, values in zip(best.indices[:-1].tolist(), best.values[:-1].tolist(), strict=True):
        positions.append(dict(zip(ids, values, strict=True)))
    report.write_text(json.dumps(positions), encoding="utf-8")


if __name__ == "__main__":
    main()
