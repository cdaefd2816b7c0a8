"""A faulty network and a faulty server in front of a sound one, to the byte: `python -m tests.servers.faulty UPSTREAM`.

Reads a JSON object `{name: {"fault": …, "scope": …, "tries": …, "after": …}}` from stdin, listens on a port for each
name, and prints one line: a JSON object `{name: address}`, with the address for questions under "control". What a fault
does not concern is passed on. Ends on SIGTERM, or when the process that started it ends.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import ssl
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers.core import is_mutated
from tests.servers.http_faults import Exchange, apply
from tests.servers.http_messages import Message, head, json_reply, prompt_of, read_message, reset

FRACTION = 0.4
"""Of the prompts, by hash: those that a fault in the scope "victims" concerns."""

BACKLOG = 1024
LONGEST_HEAD = 1 << 20
PARENT_CHECK_SECONDS = 0.5
CERTIFICATE = Path(__file__).with_name("self_signed.pem")
"""Of 127.0.0.1, signed by nobody else, good for a hundred years; the key in it protects nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One fault, and what it concerns.

    Attributes:
        scope: "victims", "samples", "everything", or paths with blanks between them.
        tries: how often the same prompt, or the same path, meets it; None: always.
        after: samples asked for before it begins.
    """

    fault: str
    scope: str = "victims"
    tries: int | None = None
    after: int = 0

    def concerns(self, request: Message, samples: int) -> bool:
        if samples < self.after:
            return False
        if self.scope == "everything":
            return True
        if self.scope not in ("victims", "samples"):
            return request.path in self.scope.split()
        ids = prompt_of(request)
        return ids is not None and (self.scope == "samples" or is_mutated(ids, FRACTION))


class Port:
    """A listening port in front of the sound server, with its fault."""

    def __init__(self, setting: Setting, upstream: str) -> None:
        self.setting, self.upstream = setting, urlsplit(upstream)
        self.hits: Counter[str] = Counter()
        self.samples = 0
        self.has_ended = False  # an engine that has: no sample is answered any more
        self.number = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"{'https' if self.setting.fault == 'speaks_tls' else 'http'}://127.0.0.1:{self.number}"

    async def listen(self) -> None:
        tls = None
        if self.setting.fault == "speaks_tls":
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(CERTIFICATE)
        self._listener = await asyncio.start_server(
            self._serve, "127.0.0.1", self.number, ssl=tls, backlog=BACKLOG, limit=LONGEST_HEAD
        )
        self.number = self._listener.sockets[0].getsockname()[1]

    def go_down(self) -> None:
        """As a process that is killed: nobody listens, every connection is reset."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            reset(writer)

    async def go_down_for(self, seconds: float) -> None:
        self.go_down()
        await asyncio.sleep(seconds)
        if self._listener is None:
            await self.listen()

    async def ask_upstream(self, request: Message) -> Message:
        """The sound server's answer."""
        assert self.upstream.hostname is not None
        reader, writer = await asyncio.open_connection(self.upstream.hostname, self.upstream.port, limit=LONGEST_HEAD)
        try:
            headers = {**request.headers, "connection": "close", "content-length": str(len(request.body))}
            writer.write(head(request.start, headers) + request.body)
            reply = await read_message(reader)
        finally:
            writer.close()
        assert reply is not None, "the sound server went away"
        reply.headers.pop("connection", None)
        return reply

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing() and (request := await read_message(reader)) is not None:
                    await self._answer(request, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Message, writer: asyncio.StreamWriter) -> None:
        is_sample, setting = prompt_of(request) is not None, self.setting
        key = json.dumps(prompt_of(request)) if is_sample else request.path
        is_hit = setting.concerns(request, self.samples) and (setting.tries is None or self.hits[key] < setting.tries)
        self.samples += is_sample
        if is_hit:
            self.hits[key] += 1
        if is_hit or self.has_ended:
            await apply(setting.fault, Exchange(self, request, writer))
        else:
            writer.write((await self.ask_upstream(request)).encoded())
        await writer.drain()


async def control(ports: dict[str, Port]) -> str:
    """The address where `/NAME` tells how often each prompt or path met the fault, `/NAME/down` and `/NAME/up` act."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_message(reader)
        if request is not None:
            name, _, act = request.path[1:].partition("/")
            if act == "down":
                ports[name].go_down()
            elif act == "up":
                await ports[name].listen()
            writer.write(json_reply(200, ports[name].hits).encoded())
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    return f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def main(upstream: str, settings: dict[str, dict[str, Any]]) -> None:
    stopped, parent = asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    ports = {name: Port(Setting(**setting), upstream) for name, setting in settings.items()}
    for port in ports.values():
        await port.listen()
    addresses = {name: port.address for name, port in ports.items()}
    print(json.dumps({**addresses, "control": await control(ports)}), flush=True)
    while not stopped.is_set() and os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), PARENT_CHECK_SECONDS)
    os._exit(0)  # connections that are never answered are not waited for


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.load(sys.stdin)))
