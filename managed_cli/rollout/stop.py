"""Signals: the first asks to finish what is in flight, the second to stop now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from managed_cli.errors import ExitCode

EXIT_CODES = {signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM}


class Stop:
    """Whether the run is asked to end.

    Attributes:
        asked: set by the first signal.
        now: set by the second.
        exit_code: that of the first signal; None without one.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_code: ExitCode | None = None

    def receive(self, number: signal.Signals) -> None:
        """Take note of one signal."""
        if self.asked.is_set():
            self.now.set()
            return
        self.exit_code = EXIT_CODES[number]
        self.asked.set()


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
