"""What all fake servers share: routing, faults, counting, recording. One class per server kind derives from it."""

import asyncio
import json
import os
import socket
import struct
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from tests.servers.model import Choice, LogprobsMode, Model, Sampling, unit_hash
from tests.servers.mutate import broken_echo, mutate_choices
from tests.servers.tokenizer import FakeTokenizer

GARBAGE = b"<html><head><title>502 Bad Gateway</title></head><body><h1>It works!</h1></body></html>\n"
SALT_MUTATION, SALT_DELAY = 1, 2


class Reply:
    """Status, body and headers of an answer; a body that is neither bytes nor None goes out as JSON."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: object = None,
        status: int = 200,
        *,
        headers: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        self.body, self.status, self.headers, self.content_type = body, status, headers or {}, content_type

    def encoded(self, *, literal_nan: bool = False) -> bytes:
        """The body's bytes; `literal_nan` writes NaN as NaN, as servers with a lax encoder do, else it is null."""
        if self.body is None:
            return b""
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode() if literal_nan else msgspec.json.encode(self.body)


class Refusal(Exception):
    """A request that the server answers with an error."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


class Hang(Exception):
    """The server never answers this request, nor any later one."""


class Crash(Exception):
    """The server dies while it works on this request."""


def is_mutated(prompt_ids: list[int], fraction: float) -> bool:
    """Whether `--mutate NAME --mutate-fraction FRACTION` breaks the replies to this prompt; for servers and tests."""
    return unit_hash(prompt_ids, SALT_MUTATION) < fraction


class FakeServer:
    """An inference server without inference; handlers are plain functions from the request's body to a reply."""

    kind: ClassVar[str]
    generation_paths: ClassVar[frozenset[str]]

    def __init__(self, options: Namespace, tokenizer: FakeTokenizer) -> None:
        self.options, self.tokenizer, self.model = options, tokenizer, Model(tokenizer)
        self.name: str = options.served_model_name or str(tokenizer.directory)
        self.root = str(tokenizer.directory)
        self.limit: int = options.max_model_len
        self.mode: LogprobsMode = options.logprobs_mode
        self.routes: dict[str, dict[str, Callable[[Any], Reply]]] = {}
        self.created = int(time.time())
        self.ready_at = time.monotonic() + options.loading_seconds
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.in_flight = self.max_in_flight = self.generations = 0
        self.connections: set[object] = set()
        self.record = Path(options.record).open("ab", buffering=0) if options.record else None  # noqa: SIM115 (open until exit)
        self.mutation: str | None = None  # breach applied to the reply that is being built

    # What a kind may override.

    def authorized(self, path: str, header: str) -> bool:
        key = self.options.api_key
        return key is None or not self.guarded(path) or header == f"Bearer {key}"

    def guarded(self, path: str) -> bool:  # noqa: ARG002 (for kinds that leave some paths open)
        return True

    def unauthorized(self) -> Reply:
        return Reply({"error": "Unauthorized"}, 401)

    def not_found(self) -> Reply:
        return Reply({"detail": "Not Found"}, 404)

    def method_not_allowed(self) -> Reply:
        return Reply({"detail": "Method Not Allowed"}, 405)

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        raise NotImplementedError

    def loading(self) -> Reply:
        return Reply(None, 503)

    # Sampling with faults.

    def sample(
        self, prompt: list[int], sampling: Sampling, n: int, *, seed_step: int = 0, same: bool = False
    ) -> tuple[list[Choice], list[int]]:
        """The n choices and the prompt as the reply echoes it, both broken where a breach was asked for.

        With `seed_step`, choice j is choice 0 of seed + j * seed_step; with `same`, every choice is choice 0.
        """
        choices = []
        for index in range(n):
            if seed_step:
                seeded = replace(sampling, seed=(sampling.seed or 0) + index * seed_step)
                choices.append(self.model.sample(prompt, seeded, 0, self.mode))
            else:
                choices.append(self.model.sample(prompt, sampling, 0 if same else index, self.mode))
        name = self.options.mutate
        if name is None or name == "wrong_tokenizer" or not is_mutated(prompt, self.options.mutate_fraction):
            return choices, prompt
        self.mutation = name
        return mutate_choices(choices, name), broken_echo(prompt) if name == "wrong_prompt_echo" else prompt

    def tokenized(self, ids: list[int]) -> list[int]:
        """Ids as `/tokenize` answers them: shifted by one where the server has another tokenizer than it says."""
        return [(i + 1) % self.tokenizer.size for i in ids] if self.options.mutate == "wrong_tokenizer" else ids

    # HTTP.

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/_fake/stats":
            return _response(Reply(self.stats()))
        self.counts[path] += 1
        if request.transport is not None:
            self.connections.add(request.transport.get_extra_info("peername"))
        if path not in self.generation_paths or request.method != "POST":
            return await self.serve(request)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            return await self.serve(request)
        finally:
            self.in_flight -= 1

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to any request but those to the fake itself; may take its time."""
        raw = await request.content.read() if request.body_exists else b""
        if self.options.garbage:
            return _response(Reply(GARBAGE, content_type="text/html"))
        if time.monotonic() < self.ready_at:
            return _response(self.loading())
        if request.path not in self.generation_paths or request.method != "POST":
            return _response(await self.answer(request, raw))
        return await self.generate(request, raw)

    async def generate(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        """The answer to a generation request, or the fault that its number in the order of arrival asks for."""
        options, number = self.options, self.generations + 1
        self.generations = number
        if options.die_after is not None and number > options.die_after:
            self.note(request.path, raw, number, None, b"", "die")
            os._exit(1)
        if options.drop_every and number % options.drop_every == 0:
            self.note(request.path, raw, number, None, b"", "drop")
            return self.dropped(request)
        if options.fail_every and number % options.fail_every[0] == 0:
            status = options.fail_every[1]
            reply = Reply(
                {"error": {"message": "overloaded", "type": "server_error", "param": None, "code": status}}, status
            )
            reply.headers["Retry-After"] = options.retry_after
            body, fault = reply.encoded(), f"fail:{status}"
        else:
            delay = options.delay_ms
            if options.delay_jitter_ms:
                delay += unit_hash(list(raw), SALT_DELAY) * options.delay_jitter_ms
            if delay:
                await asyncio.sleep(delay / 1000)
            self.mutation = None
            try:
                reply = await self.answer(request, raw)
            except Crash:
                self.note(request.path, raw, number, None, b"", "crash")
                self.dropped(request)
                os._exit(1)
            body = reply.encoded(literal_nan=self.mutation == "nan_logprob")
            fault = f"mutate:{self.mutation}" if self.mutation else None
            if self.mutation == "truncated_json":
                body = body[: len(body) // 2]
            self.mutation = None
        self.note(request.path, raw, number, reply.status, body, fault)
        return _response(reply, body)

    async def answer(self, request: web.BaseRequest, raw: bytes) -> Reply:
        path = request.path
        if not self.authorized(path, request.headers.get("Authorization", "")):
            return self.unauthorized()
        methods = self.routes.get(path)
        if methods is None:
            return self.not_found()
        handler = methods.get(request.method)
        if handler is None:
            return self.method_not_allowed()
        try:
            return handler(msgspec.json.decode(raw) if raw else None)
        except msgspec.DecodeError:
            try:
                json.loads(raw)
            except json.JSONDecodeError as error:
                return self.malformed(error)
            raise
        except Refusal as refusal:
            return refusal.reply
        except Hang:
            self.note(request.path, raw, self.generations, None, b"", "hang")
            await asyncio.Event().wait()
            raise

    def dropped(self, request: web.BaseRequest) -> web.StreamResponse:
        """Closes the connection without a reply, with a reset where the system grants it."""
        if request.transport is not None:
            linger_not_at_all = struct.pack("ii", 1, 0)
            request.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger_not_at_all
            )
            request.transport.abort()
        return web.Response()

    def note(self, path: str, raw: bytes, number: int, status: int | None, reply: bytes, fault: str | None) -> None:
        """One line of the record: what was asked and what was answered, to the byte where it is no JSON."""
        if fault is not None:
            self.faults[fault] += 1
        if self.record is None:
            return
        entry = {
            "number": number,
            "path": path,
            "status": status,
            "fault": fault,
            "body": _json_or_text(raw),
            "reply": _json_or_text(reply),
        }
        self.record.write(json.dumps(entry).encode() + b"\n")

    def stats(self) -> dict[str, object]:
        return {
            "requests": dict(self.counts),
            "generations": self.generations,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "connections": len(self.connections),
            "faults": dict(self.faults),
        }


def _response(reply: Reply, body: bytes | None = None) -> web.Response:
    body = reply.encoded() if body is None else body
    headers = {"Content-Type": reply.content_type, **reply.headers} if body else reply.headers
    return web.Response(body=body, status=reply.status, headers=headers)


def _json_or_text(raw: bytes) -> object:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode("utf-8", "replace")
