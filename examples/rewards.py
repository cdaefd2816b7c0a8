"""A reward function for `managed-cli export`: does the completion hold the answer that the input line names?

managed-cli rollout examples/prompts.jsonl -n 8 --max-tokens 48
managed-cli export out.parquet --to atropos --reward examples.rewards:holds_answer --out groups.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def holds_answer(row: Mapping[str, Any]) -> float | None:  # Any: the columns' values
    """1.0 where it does, 0.0 where not, None (the row is left out) for a line without an answer.

    `row` has every column by name; `fields` is what the input line had beside the prompt, `completion` the text of the
    last sampled turn, `messages` a chat with its answer.
    """
    answer = row["fields"].get("answer")
    return None if answer is None else float(str(answer) in row["completion"])
