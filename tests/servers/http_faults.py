"""What a connection, an HTTP server and a whole server can do wrong. Each fault answers one request, badly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.servers.http_messages import Message, head, json_reply, reset
from tests.servers.reply_faults import REPLY_FAULTS, broken_reply, doubled_keys

if TYPE_CHECKING:
    from tests.servers.faulty import Port

ENGINE_DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
"""What vLLM 0.32 says, with HTTP 500, from the moment its engine has died."""

HTML = b"<html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>\n"
DRIP_SECONDS = 0.2
SHORT_OUTAGE_SECONDS = 0.3
HUGE = 100_000_000
DEEP = 200_000
BOMB = 64 << 20
RETRY_AFTER = {
    "seconds": "0",
    "date": email.utils.formatdate(time.time() + 3600, usegmt=True),
    "huge": "9" * 30,
    "negative": "-5",
    "fraction": "0.5",
    "words": "a while",
    "superscript": "\xb2",  # a digit to Python, a number to nobody
    "empty": "",
}

Fault = Callable[["Exchange"], Awaitable[None]]
FAULTS: dict[str, Fault] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """One request that a fault concerns, and where its answer goes."""

    port: Port
    request: Message
    writer: asyncio.StreamWriter

    async def answer(self) -> Message:
        """What the sound server says to it."""
        return await self.port.ask_upstream(self.request)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def write_and_close(self, data: bytes) -> None:
        await self.write(data)
        self.writer.close()


async def apply(name: str, exchange: Exchange) -> None:
    if name in REPLY_FAULTS:
        reply = await exchange.answer()
        reply.body = broken_reply(name, exchange.request, reply.body)
        await exchange.write(reply.encoded())
    else:
        await FAULTS[name](exchange)


def fault(made: Fault) -> Fault:
    FAULTS[made.__name__] = made
    return made


# Connections.


@fault
async def reset_before_the_reply(exchange: Exchange) -> None:
    reset(exchange.writer)


@fault
async def closed_before_the_reply(exchange: Exchange) -> None:
    exchange.writer.close()


@fault
async def closed_in_the_headers(exchange: Exchange) -> None:
    await exchange.write_and_close((await exchange.answer()).encoded()[:40])


@fault
async def closed_after_the_headers(exchange: Exchange) -> None:
    data = (await exchange.answer()).encoded()
    await exchange.write_and_close(data[: data.index(b"\r\n\r\n") + 4])


@fault
async def reset_after_the_headers(exchange: Exchange) -> None:
    data = (await exchange.answer()).encoded()
    await exchange.write(data[: data.index(b"\r\n\r\n") + 4])
    reset(exchange.writer)


@fault
async def closed_after_half_the_body(exchange: Exchange) -> None:
    reply = await exchange.answer()
    await exchange.write_and_close(reply.encoded()[: -len(reply.body) // 2])


@fault
async def reset_after_half_the_body(exchange: Exchange) -> None:
    reply = await exchange.answer()
    await exchange.write(reply.encoded()[: -len(reply.body) // 2])
    reset(exchange.writer)


@fault
async def closed_after_every_reply(exchange: Exchange) -> None:
    await exchange.write_and_close((await exchange.answer()).encoded())


@fault
async def never_answers(exchange: Exchange) -> None:
    await asyncio.Event().wait()


@fault
async def silent_after_the_headers(exchange: Exchange) -> None:
    data = (await exchange.answer()).encoded()
    await exchange.write(data[: data.index(b"\r\n\r\n") + 4])
    await asyncio.Event().wait()


@fault
async def drips(exchange: Exchange) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in (await exchange.answer()).encoded():
            await exchange.write(bytes([byte]))
            await asyncio.sleep(DRIP_SECONDS)


# HTTP.


def bytes_as(made: Callable[[Message], bytes], *, close: bool = False) -> Fault:
    """A fault that sends what `made` makes of the sound reply."""

    async def send(exchange: Exchange) -> None:
        data = made(await exchange.answer())
        await (exchange.write_and_close(data) if close else exchange.write(data))

    return send


def body_as(made: Callable[[bytes], bytes], **headers: str) -> Fault:
    """A fault of the body alone, in well-formed HTTP."""

    def changed(reply: Message) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Message(reply.start, {**reply.headers, **named}, made(reply.body)).encoded()

    return bytes_as(changed)


def start_as(start: str, **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return bytes_as(lambda reply: Message(start, {**reply.headers, **named}, reply.body).encoded())


def with_length(length: Callable[[bytes], object], *, close: bool = False) -> Fault:
    """A reply whose content-length is another."""
    return bytes_as(
        lambda reply: head(reply.start, {**reply.headers, "content-length": str(length(reply.body))}) + reply.body,
        close=close,
    )


def chunked(made: Callable[[bytes], bytes], *, close: bool = False) -> Fault:
    """A reply in chunks, whose bytes on the wire `made` makes of the body."""

    def sent(reply: Message) -> bytes:
        headers = {name: value for name, value in reply.headers.items() if name != "content-length"}
        return head(reply.start, {**headers, "transfer-encoding": "chunked"}) + made(reply.body)

    return bytes_as(sent, close=close)


def in_front(data: bytes) -> Fault:
    return bytes_as(lambda reply: data + reply.encoded())


def http_1_0(made: Callable[[bytes], bytes]) -> Fault:
    """A reply that ends where its connection does."""
    return bytes_as(lambda reply: head("HTTP/1.0 200 OK", {}) + made(reply.body), close=True)


async def _endless(exchange: Exchange) -> None:
    await exchange.write(head("HTTP/1.1 200 OK", {"content-type": "application/json"}) + b'{"junk": "')
    with contextlib.suppress(ConnectionError):
        while not exchange.writer.is_closing():
            await exchange.write(b"x" * (1 << 16))


async def _reply_of_another(exchange: Exchange, *, late: bool) -> None:
    """The right reply, and behind it one to another prompt of the same length that nobody has asked for."""
    reply = await exchange.answer()
    body = json.loads(exchange.request.body)
    field = next(name for name in ("prompt", "input_ids", "prompts") if name in body)
    ids = body[field][0] if field == "prompts" else body[field]
    other = [*ids[:-1], ids[-1] - 1]
    body[field] = [other] if field == "prompts" else other
    request = Message(exchange.request.start, exchange.request.headers, json.dumps(body).encode())
    extra = (await exchange.port.ask_upstream(request)).encoded()
    if late:
        await exchange.write(reply.encoded())
        await asyncio.sleep(DRIP_SECONDS)
        await exchange.write(extra)
    else:
        await exchange.write(reply.encoded() + extra)


def _insert(body: bytes, field: bytes) -> bytes:
    """`field` in front of the fields of the reply's object, or of the first of its objects."""
    return body.replace(b"{", b"{" + field + b",", 1)


FAULTS |= {
    **{
        f"status_{status}": bytes_as(
            lambda _, status=status: json_reply(
                status, {"error": {"message": f"this is a {status}", "code": status}}, retry_after="0"
            ).encoded()
        )
        for status in (400, 401, 403, 404, 405, 408, 409, 413, 422, 425, 429, 500, 501, 502, 503, 504, 507, 599, 999)
    },
    **{
        f"retry_after_{name}": bytes_as(
            lambda _, value=value: json_reply(429, {"error": "too many"}, retry_after=value).encoded()
        )
        for name, value in RETRY_AFTER.items()
    },
    "status_429_alone": bytes_as(lambda _: json_reply(429, {"error": "too many"}).encoded()),
    "engine_error_500": bytes_as(lambda _: json_reply(500, ENGINE_DEAD).encoded()),
    **{
        f"redirect_{status}": bytes_as(lambda _, status=status: json_reply(status, {}, location="/elsewhere").encoded())
        for status in (301, 302, 303, 307, 308)
    },
    "html": body_as(lambda _: HTML, content_type="text/html"),
    "empty_body": body_as(lambda _: b""),
    "status_204": bytes_as(lambda _: head("HTTP/1.1 204 No Content", {})),
    "cut_json": body_as(lambda body: body[: len(body) // 2]),
    "json_null": body_as(lambda _: b"null"),
    "json_list": body_as(lambda _: b"[1, 2]"),
    "json_number": body_as(lambda _: b"17"),
    "json_string": body_as(lambda body: json.dumps(body.decode()).encode()),
    "error_with_200": body_as(lambda _: json.dumps({"error": {"message": "out of memory", "code": 507}}).encode()),
    "byte_order_mark": body_as(lambda body: b"\xef\xbb\xbf" + body),
    "utf_16": body_as(lambda body: body.decode().encode("utf-16")),
    "invalid_utf_8": body_as(lambda body: body.replace(b'"text":"', b'"text":"\xff\xfe')),
    "lone_surrogate": body_as(lambda body: body.replace(b'"text":"', b'"text":"\\ud83d')),
    "doubled_keys": body_as(doubled_keys),
    "doubled_key": body_as(lambda body: _insert(body, b'"choices":[]')),
    "two_documents": body_as(lambda body: body + b"\n" + body),
    "nested_deeply": body_as(lambda body: _insert(body, b'"junk":' + b"[" * DEEP + b"]" * DEEP)),
    "nested_error": bytes_as(
        lambda _: Message("HTTP/1.1 400 .", {}, b'{"error":' + b"[" * DEEP + b"]" * DEEP + b"}").encoded()
    ),
    "huge_ignored_field": body_as(lambda body: _insert(body, b'"junk":"' + b"x" * HUGE + b'"')),
    "gzip_bomb": body_as(
        lambda body: gzip.compress(_insert(body, b'"junk":"' + b"x" * BOMB + b'"'), 1), content_encoding="gzip"
    ),
    "gzip_sound": body_as(gzip.compress, content_encoding="gzip"),
    "gzip_cut": body_as(lambda body: gzip.compress(body)[:-40], content_encoding="gzip"),
    "gzip_that_is_none": body_as(lambda body: body, content_encoding="gzip"),
    "gzip_garbage": body_as(lambda body: gzip.compress(body)[:20] + b"\x00" * 200, content_encoding="gzip"),
    "gzip_unlabelled": body_as(gzip.compress),
    "encoding_unknown": body_as(lambda body: body[::-1], content_encoding="x-reversed"),
    "length_too_long_closed": with_length(lambda body: len(body) + 10, close=True),
    "length_too_long_open": with_length(lambda body: len(body) + 10),
    "length_too_short": with_length(lambda body: len(body) - 10),
    "length_zero": with_length(lambda _: 0),
    "length_no_number": with_length(lambda _: "many"),
    "length_negative": with_length(lambda _: -1),
    "chunks_sound": chunked(
        lambda body: b"5;x=y\r\n%b\r\n%x\r\n%b\r\n0\r\nTrailer: t\r\n\r\n" % (body[:5], len(body) - 5, body[5:])
    ),
    "chunk_size_no_number": chunked(lambda body: b"zz\r\n" + body, close=True),
    "chunks_unfinished": chunked(lambda body: b"%x\r\n%b\r\n" % (len(body), body), close=True),
    "chunk_too_short": chunked(lambda body: b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 7, body), close=True),
    "header_of_1_mb": start_as("HTTP/1.1 200 OK", x_long="x" * 1_000_000),
    "thousands_of_headers": bytes_as(
        lambda reply: Message(reply.start, {f"x-{i}": "y" for i in range(5000)}, reply.body).encoded(), close=True
    ),
    "control_characters_in_a_header": start_as("HTTP/1.1 200 OK", x_odd="a\x00b"),
    "status_line_without_a_status": start_as("HTTP/1.1 OK"),
    "status_line_of_another_protocol": start_as("ICY 200 OK"),
    "json_without_a_head": bytes_as(lambda reply: reply.body, close=True),
    "noise": bytes_as(lambda _: bytes(range(256)) * 4, close=True),
    "continue_first": in_front(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "continue_a_hundred_times": in_front(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "early_hints_first": in_front(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    "switching_protocols": bytes_as(
        lambda _: head("HTTP/1.1 101 Switching Protocols", {"connection": "upgrade", "upgrade": "x"}), close=True
    ),
    "http_1_0": http_1_0(lambda body: body),
    "http_1_0_cut": http_1_0(lambda body: body[:-20]),
    "endless_body": _endless,
    "two_replies_at_once": lambda exchange: _reply_of_another(exchange, late=False),
    "second_reply_later": lambda exchange: _reply_of_another(exchange, late=True),
}


# Whole servers.


@fault
async def redirect_to_itself(exchange: Exchange) -> None:
    await exchange.write(json_reply(307, {}, location=exchange.request.path).encoded())


@fault
async def dies(exchange: Exchange) -> None:
    exchange.port.go_down()


@fault
async def dies_and_is_started_again(exchange: Exchange) -> None:
    await exchange.port.go_down_for(SHORT_OUTAGE_SECONDS)


@fault
async def resets_from_now_on(exchange: Exchange) -> None:
    exchange.port.has_ended = True
    reset(exchange.writer)


@fault
async def engine_ends(exchange: Exchange) -> None:
    exchange.port.has_ended = True
    reply = json_reply(500, ENGINE_DEAD) if exchange.request.path != "/version" else await exchange.answer()
    await exchange.write(reply.encoded())


@fault
async def engine_ends_and_is_started_again(exchange: Exchange) -> None:
    if not exchange.port.has_ended:
        exchange.port.has_ended = True
        asyncio.get_running_loop().call_later(SHORT_OUTAGE_SECONDS, setattr, exchange.port, "has_ended", False)
    await exchange.write(json_reply(500, ENGINE_DEAD).encoded())


@fault
async def speaks_tls(exchange: Exchange) -> None:
    await exchange.write((await exchange.answer()).encoded())
