"""A backend that answers what it was told to, and remembers exactly what was sent and returned."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence

from managed_cli.errors import ServerContractError
from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import Generation, GenerationReply, LogprobsMode, PromptLogprobs, SamplingParams, ServerInfo

MakeChoices = Callable[[Sequence[int]], Sequence[Generation]]


@dataclasses.dataclass(eq=False)
class Exchange:
    """One call as the backend saw it: P ids sent, n choices returned."""

    make_choices: MakeChoices
    fails: bool = False
    gate: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    sent: list[int] = dataclasses.field(default_factory=list)
    sampling: SamplingParams | None = None
    returned: tuple[Generation, ...] = ()


CURRENT: contextvars.ContextVar[Exchange] = contextvars.ContextVar("exchange of the call that runs in this task")


class ScriptedBackend:
    """Implements `Backend`; `CURRENT` says which exchange a call belongs to."""

    server_type = "scripted"
    base_url = "http://scripted"

    def __init__(self, vocab_size: int) -> None:
        self.info = ServerInfo(
            server_type=self.server_type, base_url=self.base_url, model="script", vocab_size=vocab_size
        )
        self.log: list[Exchange] = []

    async def wait_until_ready(self, seconds: float) -> None:  # noqa: ARG002 the protocol's signature
        return

    async def probe(self) -> ServerInfo:
        return self.info

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:  # noqa: ARG002 the protocol's signature
        return None

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        exchange = CURRENT.get()
        exchange.sent, exchange.sampling = list(prompt_ids), sampling
        self.log.append(exchange)
        exchange.arrived.set()
        await exchange.gate.wait()
        if exchange.fails:
            raise ServerContractError("the script breaks its contract here")
        exchange.returned = tuple(exchange.make_choices(exchange.sent))
        return GenerationReply(
            choices=exchange.returned, sampling=sampling, server=self.base_url, logprobs_mode=LogprobsMode.RAW
        )

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        raise NotImplementedError

    def limit_vocabulary(self, vocab_size: int) -> None:  # noqa: ARG002 the protocol's signature
        return

    def know_end_tokens(self, token_ids: Iterable[int]) -> None:  # noqa: ARG002 the protocol's signature
        return

    def check_sampling(self, sampling: SamplingParams) -> None:  # noqa: ARG002 the protocol's signature
        return

    async def aclose(self) -> None:
        return


def generation(
    ids: Sequence[int],
    *,
    text: str | None = None,
    finish_reason: str = "length",
    end_token_id: int | None = None,
    stop_reason: str | int | None = None,
    seed: int = 0,
) -> Generation:
    """A choice with logprobs of its own, none of which repeats."""
    source = random.Random(seed)
    return Generation(
        token_ids=list(ids),
        logprobs=[-source.uniform(0.0, 20.0) for _ in ids],
        text=text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        end_token_id=end_token_id,
    )


def server_text(tokenizer: HuggingFaceTokenizer, ids: Sequence[int]) -> str:
    """The text of a choice as a server streams it: after other text, special tokens skipped."""
    inner = tokenizer._tokenizer
    before = inner.encode("a", add_special_tokens=False)
    whole: str = inner.decode([*before, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole[len(inner.decode(before)) :]


def finished(tokenizer: HuggingFaceTokenizer, ids: Sequence[int], end_id: int, *, seed: int = 0) -> Generation:
    """`ids` and then the token that ends the turn, with the text that a server would send."""
    text = server_text(tokenizer, ids)
    return generation([*ids, end_id], text=text, finish_reason="stop", end_token_id=end_id, seed=seed)


def truncated(tokenizer: HuggingFaceTokenizer, ids: Sequence[int], *, seed: int = 0) -> Generation:
    """`ids`, cut by the limit, with the text that a server would send."""
    return generation(ids, text=server_text(tokenizer, ids), seed=seed)
