"""What long conversations cost: the tracking must stay far below the time that sampling takes."""

from __future__ import annotations

import asyncio
import time

import pytest

from managed_cli.tokenizers import HuggingFaceTokenizer
from tests.managed.context import USER, Context
from tests.managed.scripted import finished
from tests.tokenizers import catalog

TURNS = 32
TOKENS_PER_TURN = 400


def seconds_of_turns(tokenizer: HuggingFaceTokenizer, history: str) -> list[float]:
    """Seconds of this process for each turn of one conversation."""
    end_id = catalog.end_ids("smollm2")[0]
    answer = (tokenizer.encode_suffix("The answer is forty-two, and so on. ") * TOKENS_PER_TURN)[:TOKENS_PER_TURN]

    async def talk() -> list[float]:
        context, messages, spent = Context(tokenizer, history=history), [USER], []
        for _ in range(TURNS):
            choice = finished(tokenizer, answer, end_id)
            started = time.process_time()
            reply = await context.chat(messages, choice)
            spent.append(time.process_time() - started)
            messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}, USER]
        (node,) = context.nodes
        assert node.sampled_length == TURNS * (TOKENS_PER_TURN + 1)
        return spent

    return asyncio.run(talk())


@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_turn_costs_no_more_than_its_tokens(smollm2: HuggingFaceTokenizer, history: str) -> None:
    """Turn 32 has 32 times the tokens of turn 1, and may cost that much more, with room for a busy machine."""
    seconds_of_turns(smollm2, history)
    spent = seconds_of_turns(smollm2, history)
    early, late = sum(spent[4:8]) / 4, sum(spent[-4:]) / 4
    tokens_ratio = (TURNS - 2) / 6
    assert late < 3 * tokens_ratio * early
    assert sum(spent) < 8.0
