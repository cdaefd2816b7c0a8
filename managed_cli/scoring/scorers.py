"""Who says what the logprobs should be: a server that scores prompts, or the weights in this process (`forward`)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from managed_cli.backends.token_logprobs import SCORING_HINT
from managed_cli.errors import ManagedCliError, PromptRejected
from managed_cli.managed.servers import Server
from managed_cli.scoring.processing import RAW, Processing
from managed_cli.scoring.rows import Floats, Row
from managed_cli.types import Tokenizer

SERVERS_THAT_SCORE = ("vllm", "sglang", "trl")

NO_PROMPT_LOGPROBS = {
    "llamacpp": "llama.cpp's server gives no logprobs of prompt tokens",
    "local": "the embedded engine (llama.cpp) gives no logprobs of prompt tokens",
    "openai": "OpenAI endpoints take no token ids, and give no logprobs of prompt tokens",
}

DEFAULT_CONCURRENCY = 16
"""Rows in flight: scoring fills a server's step by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """What the logprobs of a row of T tokens should be.

    Attributes:
        logprobs: [T], processed as asked for; NaN where there is none (position 0, and what could not be scored).
        variants: name → the same, processed in another way: to find out whether that is what was recorded.
        on_edge: [T], where a filter's limit lies so close to a token that rounding decides about it; None: nowhere.
    """

    logprobs: Floats
    variants: Mapping[str, Floats] = dataclasses.field(default_factory=dict)
    on_edge: npt.NDArray[np.bool_] | None = None


class Scorer(Protocol):
    """Gives logprobs of rows; made ready before use."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...

    def refusal(self, processing: Processing) -> str | None:
        """In words why it cannot give logprobs that are processed like this; None where it can."""
        ...

    async def score(self, rows: Sequence[tuple[Row, Processing]], done: Callable[[int], None]) -> list[Score | str]:
        """For each row its score, or in words why there is none; `done` is told how many more are finished."""
        ...


def refuse_server_without_prompt_logprobs(server_type: str, hint: str = SCORING_HINT) -> None:
    """Raise NotImplementedError for a type of server that cannot score a prompt."""
    reason = NO_PROMPT_LOGPROBS.get(server_type)
    if reason is not None:
        raise NotImplementedError(f"--server-type {server_type}: {reason}\n\nhint: {hint}")


class ServerScorer:
    """A prepared server that gives raw logprobs of prompt tokens.

    Args:
        concurrency: rows in flight.
    """

    def __init__(self, server: Server, *, concurrency: int = DEFAULT_CONCURRENCY) -> None:
        self._server = server
        self._backend = server.backend
        self._free = asyncio.Semaphore(concurrency)

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self._backend.server_type} at {self._backend.base_url} ({self._backend.info.model})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The server's."""
        return self._server.tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids at or above it are not sent."""
        return self._backend.info.vocab_size or self.tokenizer.vocab_size

    def refusal(self, processing: Processing) -> str | None:
        """Servers score prompts before temperature and filters, and only so."""
        if processing == RAW:
            return None
        return "taken after temperature or filters, and a server scores prompts before them"

    async def score(self, rows: Sequence[tuple[Row, Processing]], done: Callable[[int], None]) -> list[Score | str]:
        """For each row its score, or why the server takes no such prompt.

        Raises:
            ServerError: the server cannot be reached, refuses, or breaks its contract; no further row is sent.
        """
        faults: list[ManagedCliError] = []

        async def scored(row: Row) -> Score | str:
            async with self._free:
                if faults:
                    return ""
                try:
                    return await self._score(row)
                except PromptRejected as error:
                    return f"the server takes no such prompt: {error}"
                except ManagedCliError as error:
                    error.details = (*error.details, f"while row {row.number} (sample {row.sample_id}) was scored")
                    faults.append(error)
                    return ""
                finally:
                    done(1)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scored(row)) for row, _ in rows]
        if faults:
            raise faults[0]
        return [task.result() for task in running]

    async def _score(self, row: Row) -> Score:
        """All positions; of a row that fills the context, those that leave room for the token a server must sample."""
        context = self._backend.info.context_length
        ids = row.tokens.tolist()[: None if context is None else context - 1]
        logprobs = np.full(len(row.tokens), np.nan)
        if len(ids) > 1:
            logprobs[1 : len(ids)] = await self._backend.token_logprobs(ids)
        return Score(logprobs=logprobs)
