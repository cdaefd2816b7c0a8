"""A reverse proxy that writes down what a client and a server said to each other, byte for byte as text.

usage: python recording_proxy.py TARGET_URL LOG.jsonl     prints the URL it listens on, then serves until ended

One JSON object a line, in the order in which replies ended: method, path, status, request, reply (bodies as text).
It changes no body, and asks the server for uncompressed replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

# Of one connection, not of the message (RFC 9110, 7.6.1), or set anew for the other side.
NOT_FORWARDED = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
MAX_BODY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request and its reply. `status` is 0 where the server could not be reached."""

    method: str
    path: str
    status: int
    request: str
    reply: str

    def request_json(self) -> Any:  # Any: whatever was sent
        return json.loads(self.request)

    def reply_json(self) -> Any:  # Any: whatever came back
        return json.loads(self.reply)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """A proxy that is running. `base_url` is what the client gets in place of the server's."""

    base_url: str
    log: Path

    def exchanges(self) -> list[Exchange]:
        """All exchanges that have ended so far."""
        with self.log.open(encoding="utf-8") as lines:
            return [Exchange(**json.loads(line)) for line in lines]


@contextlib.contextmanager
def recording(target: str, log: Path) -> Iterator[Recording]:
    """A proxy before the server at `target`, as a process of its own; ended when the block is left."""
    command = [sys.executable, __file__, target, str(log)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the recording proxy before {target} did not start")
            yield Recording(base_url=url, log=log)
        finally:
            process.terminate()


async def _serve(target: str, log: Path) -> None:
    async with aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        with log.open("a", encoding="utf-8") as output:

            def write_down(exchange: Exchange) -> None:
                output.write(json.dumps(dataclasses.asdict(exchange), ensure_ascii=False) + "\n")
                output.flush()

            async def handle(request: web.Request) -> web.StreamResponse:
                return await _forward(session, target, request, write_down)

            application = web.Application(client_max_size=MAX_BODY_BYTES)
            application.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            print(f"http://{host}:{port}", flush=True)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
            await ended.wait()
            await runner.cleanup()


async def _forward(
    session: aiohttp.ClientSession, target: str, request: web.Request, write_down: Any
) -> web.StreamResponse:
    body = await request.read()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED}
    headers["Accept-Encoding"] = "identity"
    pieces: list[bytes] = []
    status = 0
    try:
        async with session.request(
            request.method,
            target.rstrip("/") + request.raw_path,
            data=body or None,
            headers=headers,
            allow_redirects=False,
        ) as reply:
            status = reply.status
            response = web.StreamResponse(status=status, reason=reply.reason)
            for name, value in reply.headers.items():
                if name.lower() not in NOT_FORWARDED:
                    response.headers.add(name, value)
            if reply.content_length is not None:
                response.content_length = reply.content_length
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
    except aiohttp.ClientConnectionError:
        if request.transport is not None:
            request.transport.abort()  # the client sees what the proxy saw: a connection that broke
        response = web.StreamResponse()
    write_down(
        Exchange(
            method=request.method,
            path=request.raw_path,
            status=status,
            request=body.decode("utf-8", "replace"),
            reply=b"".join(pieces).decode("utf-8", "replace"),
        )
    )
    if status:
        await response.write_eof()
    return response


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2])))
