"""Replies in turn: so much work in a round of the event loop, and then it looks at sockets, timers and signals again.

Everything that is ready runs in one round. Of replies that are whole, hundreds can be ready at once, and to decode and
record one of a megabyte takes some 30 ms: a signal, a time limit or the next request then waited for seconds.
"""

from __future__ import annotations

import asyncio
import collections
import weakref

ROUND_BYTES = 128 * 1024
"""Replies of so many bytes are let into one round, about 4 ms; a larger one has a round of its own."""

REPLY_BYTES = 8 * 1024
"""What a reply costs however short it is, in bytes of a long one."""


class Rounds:
    """Lets replies into the rounds of one event loop, first come, first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._left = ROUND_BYTES
        self._is_counting = False
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def turn(self, size: int) -> None:
        """Return in a round that has room for a reply of `size` bytes: in this one, without waiting, where it has."""
        cost = size + REPLY_BYTES
        if self._left > 0 and not self._waiting:
            self._let_in(cost)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        await turn

    def _let_in(self, cost: int) -> None:
        self._left -= cost
        if not self._is_counting:
            self._is_counting = True
            self._call_soon()

    def _begin_round(self) -> None:
        self._left = ROUND_BYTES
        while self._waiting and self._left > 0:
            cost, turn = self._waiting.popleft()
            if not turn.done():  # whoever waited may have been cancelled
                self._left -= cost
                turn.set_result(None)
        self._is_counting = self._left < ROUND_BYTES
        if self._is_counting:
            self._call_soon()

    def _call_soon(self) -> None:
        loop = self._loop()
        if loop is not None:
            loop.call_soon(self._begin_round)


_rounds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Rounds] = weakref.WeakKeyDictionary()


async def turn(size: int) -> None:
    """As `Rounds.turn`, of the running event loop: all servers' replies are let in together."""
    loop = asyncio.get_running_loop()
    rounds = _rounds.get(loop)
    if rounds is None:
        rounds = _rounds[loop] = Rounds(loop)
    await rounds.turn(size)
