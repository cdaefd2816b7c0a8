"""A server without inference that is never the slow one: `python -m tests.bench.replay KIND --tokenizer DIR`.

Raw HTTP/1.1 with keep-alive and content-length. Prints `listening http://127.0.0.1:PORT`; ends with SIGTERM, or when
the process that started it does. `GET /_bench/last` is the body of the last generation request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bench.canned import CONTEXT_LENGTH, Canned, Json, Material, canned, recorded

PARENT_CHECK_SECONDS = 0.5
BACKLOG = 2048


class _Sampling(msgspec.Struct, frozen=True):
    n: int = 1
    max_new_tokens: int = 16


class _Request(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"[]")
    prompts: msgspec.Raw = msgspec.Raw(b"[]")
    input_ids: msgspec.Raw = msgspec.Raw(b"[]")
    n: int = 1
    max_tokens: int = 16
    sampling_params: _Sampling = _Sampling()
    logprobs: int | None = None
    top_logprobs_num: int = 0


class _AtroposPrompt(msgspec.Struct):
    prompt_token_ids: msgspec.Raw


class _Tokenize(msgspec.Struct):
    prompt: str


class Replay:
    """What each kind of server answers on each of its paths."""

    def __init__(self, kind: str, directory: Path, replies: int) -> None:
        self.kind, self.replies = kind, replies
        self.material = Material(directory)
        self.last = b""
        self._canned: dict[tuple[str, int, int], Iterator[Canned]] = {}
        self._facts = {path: msgspec.json.encode(body) for path, body in facts(kind, str(directory)).items()}

    def replies_of(self, shape: str, n: int, tokens: int) -> Iterator[Canned]:
        """The replies of that size, over and over; made when first asked for."""
        key = (shape, n, tokens)
        if key not in self._canned:
            made = [canned(self.material, shape, n, tokens, number) for number in range(self.replies)]
            self._canned[key] = itertools.cycle(made)
        return self._canned[key]

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body."""
        if not body:
            return (200, self.last) if path == "/_bench/last" else self._fact(path)
        if path == "/tokenize":
            ids = self.material.encode(msgspec.json.decode(body, type=_Tokenize).prompt)
            return 200, msgspec.json.encode({"tokens": ids, "count": len(ids)})
        request = msgspec.json.decode(body, type=_Request)
        if request.logprobs == 2 or request.top_logprobs_num == 2:
            return 200, msgspec.json.encode(probed(self.kind))
        return 200, self._generated(path, request, body)

    def _fact(self, path: str) -> tuple[int, bytes]:
        return (200, self._facts[path]) if path in self._facts else (404, b'{"detail":"Not Found"}')

    def _generated(self, path: str, request: _Request, body: bytes) -> bytes:
        n, tokens, shape, prompt = request.n, request.max_tokens, self.kind, request.prompt
        if self.kind == "sglang":
            n, tokens, prompt = request.sampling_params.n, request.sampling_params.max_new_tokens, request.input_ids
        elif self.kind == "trl":
            prompt = request.prompts
        elif path == "/generate":
            shape, prompt = "atropos", msgspec.json.decode(prompt, type=_AtroposPrompt).prompt_token_ids
        self.last = body
        return next(self.replies_of(shape, n, tokens)).sent_with(bytes(prompt))


def facts(kind: str, directory: str) -> dict[str, object]:
    """Path → what the server says of itself, as recorded, its paths and limits exchanged."""
    model = {"model_path": directory, "tokenizer_path": directory}
    if kind == "trl":
        return {"/health/": recorded("trl/health"), "/get_world_size/": recorded("trl/world_size")}
    if kind == "sglang":
        limits = {"context_length": CONTEXT_LENGTH, "max_req_input_len": CONTEXT_LENGTH - 6}
        listed = recorded("sglang/get_v1_models")
        return {
            "/health": {},
            "/model_info": {**recorded("sglang/get_model_info"), **model},
            "/server_info": {**recorded("sglang/get_get_server_info"), **model, **limits},
            "/v1/models": {**listed, "data": [{**listed["data"][0], "max_model_len": CONTEXT_LENGTH}]},
        }
    listed = recorded("vllm/models")
    served = {**listed["data"][0], "root": directory, "max_model_len": CONTEXT_LENGTH}
    return {
        "/health": {},
        "/v1/models": {**listed, "data": [served]},
        "/version": recorded("vllm/version"),
    }


def probed(kind: str) -> Json | list[object]:
    """The answer to the question for two alternatives: the same at every temperature, so logprobs are raw."""
    if kind == "trl":
        alternatives = {"logprobs": [[[-0.5, -1.5]]], "logprob_token_ids": [[[5, 6]]]}
        return {"prompt_ids": [[1]], "completion_ids": [[5]], **alternatives}
    if kind == "sglang":
        triples = [[-0.5, 5, None], [-1.5, 6, None]]
        meta = {"prompt_tokens": 1, "output_token_logprobs": triples[:1], "output_top_logprobs": [triples]}
        return {"text": "x", "output_ids": [5], "meta_info": meta}
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}]}
    return {"choices": [{"index": 0, "text": "x", "finish_reason": "length", "logprobs": logprobs}]}


class Connection(asyncio.Protocol):
    """One kept-alive connection; a request is answered as soon as its last byte is here."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
        self._held += data
        while True:
            head, found, rest = self._held.partition(b"\r\n\r\n")
            if not found:
                return
            lower = head.lower()
            at = lower.find(b"\r\ncontent-length:")
            length = int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(rest) < length:
                return
            self._held = rest[length:]
            status, body = self._replay.answer(head.split(b" ", 2)[1].decode(), rest[:length])
            line = b"HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
            headers = line % (status, b"OK" if status == 200 else b"Not Found")
            self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body))


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or the end of the parent."""
    replay = Replay(options.kind, options.tokenizer, options.replies)
    for size in options.warm:
        n, tokens = map(int, size.split("x"))
        for shape in ("vllm", "atropos") if options.kind == "vllm" else (options.kind,):
            replay.replies_of(shape, n, tokens)
    loop, stopped, parent = asyncio.get_running_loop(), asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = await loop.create_server(lambda: Connection(replay), "127.0.0.1", 0, backlog=BACKLOG)
    print(f"listening http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    while not stopped.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(stopped.wait(), PARENT_CHECK_SECONDS)
        except TimeoutError:
            continue
    server.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replay", description=__doc__)
    parser.add_argument("kind", choices=("vllm", "sglang", "trl"))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--replies", type=int, default=48, help="distinct replies of each size")
    parser.add_argument("--warm", action="append", default=[], metavar="NxTOKENS", help="sizes made before listening")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
