"""Signals: the first asks to finish what is in flight, the second to stop now.

A limit on failures that is reached asks as the first signal does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from managed_cli.errors import ExitCode, Interrupted

EXIT_CODES = {signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM}

T = TypeVar("T")


class Stop:
    """Whether the run is asked to end; made inside a running event loop.

    Attributes:
        asked: set by the first signal, or by `wind_down`.
        now: set by the second, or by a first one while the run winds down.
        exit_code: that of the first signal; None without one.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_code: ExitCode | None = None
        self._waits: set[asyncio.Timeout] = set()

    def receive(self, number: signal.Signals) -> None:
        """Take note of one signal."""
        self.exit_code = self.exit_code or EXIT_CODES[number]
        if self.asked.is_set():
            self.now.set()
            return
        self.wind_down()

    def wind_down(self) -> None:
        """Ask for the end, as the first signal does."""
        self.asked.set()
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def unless_asked(self, work: Awaitable[T]) -> T:
        """The result of `work`, which the first signal cancels.

        Raises:
            Interrupted: a signal came first.
        """
        try:
            async with asyncio.timeout(0 if self.asked.is_set() else None) as wait:
                self._waits.add(wait)
                try:
                    return await work
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired() or self.exit_code is None:
                raise
            raise Interrupted("interrupted", exit_code=self.exit_code) from error


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises `Interrupted` in the block, as SIGINT raises KeyboardInterrupt, so that what was opened is closed.

    Raises:
        Interrupted: the signal came while nobody was `listening_to_signals`.
    """

    def end(*_: object) -> None:
        raise Interrupted("interrupted", exit_code=ExitCode.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # signals are not for this one
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def listening_to_signals(stop: Stop) -> Iterator[None]:
    """SIGINT and SIGTERM go to `stop` for the length of the block."""
    loop = asyncio.get_running_loop()
    for number in EXIT_CODES:
        loop.add_signal_handler(number, stop.receive, number)
    try:
        yield
    finally:
        for number in EXIT_CODES:
            loop.remove_signal_handler(number)
