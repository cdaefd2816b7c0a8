"""A managed context on a scripted backend, for tests that say call by call what is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from managed_cli.managed.server import ManagedServer
from managed_cli.node import SequenceNode
from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import Generation
from tests.managed.scripted import CURRENT, Exchange, ScriptedBackend

USER = {"role": "user", "content": "What is 6 times 7?"}


class Context:
    """A managed context whose replies are given call by call."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = ScriptedBackend(tokenizer.vocab_size)
        self.managed = ManagedServer(self.backend, tokenizer, **settings)

    async def chat(self, messages: Sequence[Any], *choices: Generation, **settings: Any) -> Any:
        CURRENT.set(opened(choices))
        return await self.managed.chat_completion(messages=messages, n=len(choices), **settings)

    async def complete(self, prompt: str, *choices: Generation, **settings: Any) -> Any:
        CURRENT.set(opened(choices))
        return await self.managed.completion(prompt=prompt, n=len(choices), **settings)

    @property
    def nodes(self) -> list[SequenceNode]:
        return self.managed.nodes()

    @property
    def sent(self) -> list[int]:
        return self.backend.log[-1].sent


def opened(choices: Sequence[Generation]) -> Exchange:
    exchange = Exchange(lambda _sent: choices)
    exchange.gate.set()
    return exchange


def unmasked(node: SequenceNode) -> list[int]:
    return [mask for mask in node.masked_tokens if mask != -100]
