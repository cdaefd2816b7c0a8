"""A vLLM that runs on a CPU, and what must not happen to it.

Its engine ends, and every later request gets HTTP 500, when a seeded request is still reading its prompt at the end of
a step: it then rewinds the request's random generator, and generators on a CPU have no offset to rewind (vLLM 0.32,
`gpu_model_runner`, "CPU Generator does not use offset"). A step reads at most `max_num_batched_tokens` tokens of all
requests together, so seeded requests are held back here until all of them fit into one step; a request that does not
fit alone goes without a seed. A CPU is busy long before so many tokens are in flight.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
from collections.abc import AsyncIterator

STEP_TOKENS = 2048
"""vLLM's default `max_num_batched_tokens` for a server on one CPU."""

OTHERS_TOKENS = 256
"""Left of a step to whoever else uses the server: a second, small run beside a full one must not end it."""

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def runs_on_cpu(metrics: str) -> bool:
    """Whether `/metrics` describes a key-value cache as only vLLM's CPU platform makes it.

    Named memory for a cache of blocks of 128 that nobody asked for; older versions name the memory of a CPU cache.
    """
    found = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(found.group(1))) if found else {}
    if labels.get("cpu_kvcache_space_bytes", "None") != "None":
        return True
    return (
        labels.get("block_size") == "128"
        and labels.get("user_specified_block_size") == "False"
        and labels.get("kv_cache_memory_bytes", "None") != "None"
    )


class StepBudget:
    """Tokens of one step, shared by the requests in flight; given out in the order of asking."""

    def __init__(self, tokens: int = STEP_TOKENS - OTHERS_TOKENS) -> None:
        self.tokens = tokens
        self._free = tokens
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @staticmethod
    def needed(prompt_length: int, n: int) -> int:
        """Tokens that a request takes of a step at most: each choice its prompt, or one token while it samples."""
        return n * (prompt_length + 1)

    @contextlib.asynccontextmanager
    async def taken(self, tokens: int) -> AsyncIterator[None]:
        """Hold `tokens` of the budget, or all of it where that is less, once they are free."""
        wanted = min(tokens, self.tokens)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, granted))
        self._give_out()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += wanted
            self._give_out()

    def _give_out(self) -> None:
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.done() and wanted > self._free:
                return
            self._waiting.popleft()
            if not granted.done():  # a cancelled one only leaves the queue
                self._free -= wanted
                granted.set_result(None)
