"""A connection is used again only where nothing has come in on it that nobody asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from managed_cli.backends import _http
from managed_cli.backends._http import HttpClient
from managed_cli.errors import ServerContractError, ServerRefused

TURNS_OF_THE_LOOP = 5
"""What has reached this machine's own socket is read by then."""

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def client_of(serve: Serve, *, max_connections: int = 8) -> AsyncIterator[HttpClient]:
    """A client of a server that handles each connection with `serve`."""

    handling: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(address, label="a server", max_connections=max_connections)
        try:
            yield client
        finally:
            await client.aclose()
            await asyncio.wait(filter(None, handling))


def test_a_reply_that_came_while_a_connection_was_idle_is_not_taken_for_the_next() -> None:
    received, unasked = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(b"right"))
        await received.wait()
        writer.write(reply(b"wrong"))
        await writer.drain()
        unasked.set()
        await reader.read()

    async def ask_twice() -> list[bytes]:
        async with client_of(serve) as client:
            first = await client.get("/x")
            received.set()
            await unasked.wait()
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            return [first.body, (await client.get("/x")).body]

    assert asyncio.run(ask_twice()) == [b"right", b"right"]


def test_a_server_that_switches_protocols_keeps_no_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                writer.write(SWITCHED if b"/switch" in asked else reply(b"right"))

    async def ask() -> None:
        refusals = []  # their tracebacks hold the replies, which would else be let go of with their connections
        async with client_of(serve, max_connections=2) as client, asyncio.timeout(10):
            for _ in range(5):
                with pytest.raises(ServerRefused, match="HTTP 101") as refusal:
                    await client.post("/switch", {})
                refusals.append(refusal.value)
            assert (await client.post("/x", {})).body == b"right"

    asyncio.run(ask())


def test_a_connection_with_nothing_on_it_is_used_again() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply(b"right"))

    async def ask_twice() -> None:
        async with client_of(serve) as client:
            assert [(await client.get("/x")).body for _ in range(3)] == [b"right"] * 3

    asyncio.run(ask_twice())
    assert connections == 1


def test_a_reply_larger_than_any_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_http, "LARGEST_REPLY_BYTES", 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 100)
            await writer.drain()

    async def ask() -> None:
        async with client_of(serve) as client:
            await client.get("/x")

    with pytest.raises(ServerContractError, match="sent a reply of more than 1,000 bytes"):
        asyncio.run(ask())
