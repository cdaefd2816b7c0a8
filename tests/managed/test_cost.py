"""What long conversations cost: the tracking must stay far below the time that sampling takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

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
    """Turn 32 has 32 times the history of turn 1, of which most is known: it costs two to three times as much."""
    seconds_of_turns(smollm2, history)
    spent = seconds_of_turns(smollm2, history)
    early, late = sorted(spent[4:8])[1], sorted(spent[-4:])[1]
    history_ratio = (TURNS - 2) / 6
    assert late < history_ratio * early
    assert sum(spent) < 8.0


class Counting:
    """A tokenizer that counts what it is given to work on."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = self.ids = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_rendered(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode_rendered(text)

    def encode_prompt(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode_prompt(text)

    def encode_suffix(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode_suffix(text)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        self.ids += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("how", ["template", "verbatim", "text"])
def test_history_is_neither_encoded_nor_decoded_again(smollm2: HuggingFaceTokenizer, how: str) -> None:
    end_id, counting = catalog.end_ids("smollm2")[0], Counting(smollm2)
    answer = smollm2.encode_suffix("The answer is forty-two, and so on. " * 8)

    async def talk() -> list[tuple[int, int]]:
        context = Context(counting, history="template" if how == "text" else how)  # type: ignore[arg-type] # as good as one
        said, text, counts = [USER], "What is 6 times 7?", []
        for _ in range(TURNS):
            counting.characters = counting.ids = 0
            choice = finished(smollm2, answer, end_id)
            reply = await (context.complete(text, choice) if how == "text" else context.chat(said, choice))
            counts.append((counting.characters, counting.ids))
            if how == "text":
                text = f"{context.nodes[-1].full_text}\nWhat is 6 times 7?"
            else:
                said = [*said, {"role": "assistant", "content": reply.choices[0].message.content}, USER]
        (node,) = context.nodes
        assert len(node.tokens) > TURNS * len(answer)
        return counts

    _, *later = asyncio.run(talk())
    assert len(set(later)) == 1, "each turn works on as much text as the one before"
    assert later[0][1] < 3 * len(answer)
