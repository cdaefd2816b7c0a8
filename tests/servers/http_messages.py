"""HTTP messages as the faulty server reads and writes them: whole, and to the byte."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
from typing import Any

GENERATION_PATHS = frozenset({"/v1/completions", "/generate", "/generate/", "/completion"})


@dataclasses.dataclass(slots=True)
class Message:
    """A request or a reply: its first line, its headers, its whole body."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """Of a request."""
        return self.start.split()[1].partition("?")[0]

    def encoded(self) -> bytes:
        """Well-formed HTTP, its length corrected."""
        headers = {name: value for name, value in self.headers.items() if name != "content-length"}
        headers["content-length"] = str(len(self.body))
        return head(self.start, headers) + self.body


def head(start: str, headers: dict[str, str]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def json_reply(status: int, value: object, **headers: str) -> Message:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Message(f"HTTP/1.1 {status} .", {"content-type": "application/json", **named}, json.dumps(value).encode())


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next request, or the one reply of a connection; None at its end."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Message(lines[0], headers, body)


def prompt_of(request: Message) -> list[int] | None:
    """The ids that a sample is asked of; None for everything else, the probes of a server among it."""
    if request.path not in GENERATION_PATHS:
        return None
    body: dict[str, Any] = json.loads(request.body)
    ids = body.get("prompt", body.get("input_ids", body.get("prompts")))
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids = ids[0]
    is_sample = isinstance(ids, list) and len(ids) > 1 and "logit_bias" not in body
    return ids if is_sample else None


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a reset."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
