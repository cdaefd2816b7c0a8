"""Reward functions as users write them."""

from __future__ import annotations

import asyncio
from typing import Any

Row = dict[str, Any]

running = 0
most_at_once = 0


def by_choice(row: Row) -> float:
    return 1.0 if row["choice_index"] == 1 else 0.25


async def by_choice_later(row: Row) -> float:
    global running, most_at_once
    running += 1
    most_at_once = max(most_at_once, running)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running -= 1
    return by_choice(row)


def from_everything(row: Row) -> int:
    """An error unless all that is promised is there, and what is printed must not reach stdout."""
    print("printed by the reward function")
    assert row["fields"]["answer"] == row["choice_index"]
    assert row["completion"].startswith(f"<{row['choice_index']}.")
    assert row["metadata"]["turns"]
    assert len(row["tokens"]) == len(row["masked_tokens"]) == len(row["logprobs"])
    return row["row"]


def only_first_choices(row: Row) -> float | None:
    return 1.0 if row["choice_index"] == 0 else None


def only_sample_one(row: Row) -> float | None:
    return 2.0 if row["sample_id"] == "one" else None


def fails_at_one(row: Row) -> float:
    return 1.0 / (row["choice_index"] - 1)


async def fails_at_one_later(row: Row) -> float:
    await asyncio.sleep(0)
    return fails_at_one(row)


def not_a_number(row: Row) -> float:
    return float("nan")


def text(row: Row) -> Any:
    return "1.0"


value = 3
