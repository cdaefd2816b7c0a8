"""Replies in turn: so much work in a round of the event loop, and then it looks at sockets, timers and signals again.

Everything that is ready runs in one round. Of replies that are whole, hundreds can be ready at once, and to decode and
record one of a megabyte takes some 30 ms: a signal, a time limit or the next request then waited for seconds.
"""

from __future__ import annotations

import asyncio
import collections
import weakref

ROUND_BYTES = 128 * 1024
"""A round takes replies until they have so many bytes together, about 4 ms; the last of them may be of any size."""

REPLY_BYTES = 8 * 1024
"""What a reply costs however short it is, in bytes of a long one."""


class Rounds:
    """Lets replies into the rounds of one event loop, in the order they came."""

    def __init__(self) -> None:
        self._left = ROUND_BYTES
        self._is_counting = False
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    def turn_for(self, size: int) -> asyncio.Future[None] | None:
        """What to wait for until a round has room for a reply of `size` bytes; None where this one has."""
        cost = size + REPLY_BYTES
        if self._left > 0 and not self._waiting:
            self._left -= cost
            if not self._is_counting:
                self._is_counting = True
                asyncio.get_running_loop().call_soon(self._begin_round)
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        return turn

    def _begin_round(self) -> None:
        self._left = ROUND_BYTES
        while self._waiting and self._left > 0:
            cost, turn = self._waiting.popleft()
            if not turn.done():  # whoever waited may have been cancelled
                self._left -= cost
                turn.set_result(None)
        self._is_counting = self._left < ROUND_BYTES
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_round)


async def after_others() -> None:
    """Return when every other task that is ready has run.

    Tasks that wait for each other between two steps take each of them in a row. The processor then has the step's code
    at hand: short requests (16 tokens, 256 in flight) take a tenth less than where each runs through all of its steps.
    """
    await asyncio.sleep(0)


_rounds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Rounds] = weakref.WeakKeyDictionary()


async def turn(size: int) -> None:
    """Return in a round with room for a reply of `size` bytes; the replies of all servers share the loop's rounds."""
    loop = asyncio.get_running_loop()
    rounds = _rounds.get(loop)
    if rounds is None:
        rounds = _rounds[loop] = Rounds()
    if (room := rounds.turn_for(size)) is not None:
        await room
