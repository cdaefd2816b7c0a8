"""Connections to one server: kept alive while it thinks, read to the end, and clean before they are used again."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 20
KEEPALIVE_PROBES = 6
"""A connection that is silent for a minute is probed: routers forget silent ones, and a host that has lost its power
says nothing. After two more minutes without an answer it counts as lost."""


class Connections(aiohttp.TCPConnector):
    """Connections of which none is used again that something has come in on: it would pass for the next reply.

    aiohttp asks only whether an idle connection is still open. `_get` is a name of its own, not of its interface.
    """

    async def _get(self, *arguments: Any) -> aiohttp.connector.Connection | None:  # Any: aiohttp's own, handed on
        while (connection := await super()._get(*arguments)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                return connection
            connection.close()
        return None


def kept_alive_socket(address: tuple[Any, ...]) -> socket.socket:  # Any: as `getaddrinfo` gives it
    """A socket for one connection, with TCP keepalive on."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not every system has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def whole_body(response: aiohttp.ClientResponse, *, most: int) -> bytes | None:
    """What a reply holds; None where that is more than `most` bytes.

    Read to its end, it has given its connection back. Where it has not, the connection is closed: after a fault, or
    when the server has switched to another protocol.
    """
    try:
        length = response.content_length
        if length is not None and length <= most and "content-encoding" not in response.headers:
            return await response.read()
        parts, size = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > most:
                return None
        return b"".join(parts)
    finally:
        if response.connection is not None:
            response.close()
