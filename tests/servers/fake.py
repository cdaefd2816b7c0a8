"""Fake inference servers as real processes: `python -m tests.servers.fake KIND [--port 0] [options]`.

Prints `listening http://127.0.0.1:PORT` on stdout and serves until SIGTERM, or until the process that started it ends.
"""

import argparse
import asyncio
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from tests.servers.core import FakeServer
from tests.servers.mutate import NAMES
from tests.servers.tokenizer import FakeTokenizer, shared_tokenizer_directory

KINDS = {
    "vllm": ("tests.servers.fake_vllm", "FakeVllm"),
    "sglang": ("tests.servers.fake_sglang", "FakeSglang"),
    "trl": ("tests.servers.fake_trl", "FakeTrl"),
    "llamacpp": ("tests.servers.fake_llamacpp", "FakeLlamacpp"),
    "openai": ("tests.servers.fake_openai", "FakeOpenai"),
}
PARENT_CHECK_SECONDS = 0.5
BACKLOG = 1024


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.fake", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, default=0)
    model = parser.add_argument_group("model")
    model.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json; a small one is built if unset")
    model.add_argument("--served-model-name", help="default: the tokenizer's directory, as vllm serve does with a path")
    model.add_argument("--max-model-len", type=int, default=2048, help="per slot for llamacpp")
    model.add_argument("--api-key")
    model.add_argument("--server-version")
    model.add_argument("--logprobs-mode", choices=("raw", "temperature", "processed"), default=None)
    model.add_argument("--max-logprobs", type=int, default=20, help="vllm: most alternatives per token; -1: no limit")
    model.add_argument("--generation-config", help="vllm: JSON, sampling defaults for what a request leaves unset")
    model.add_argument("--dialect", choices=("1.10", "0.29", "0.24"), default="1.10", help="trl: version spoken")
    model.add_argument("--slots", type=int, default=4, help="llamacpp: most choices per request")
    model.add_argument("--deterministic-inference", action="store_true", help="sglang: a seed gives n equal choices")
    model.add_argument("--tokens-per-reply", type=int, help="exactly so many tokens, the last one EOS")
    timing = parser.add_argument_group("timing")
    timing.add_argument("--delay-ms", type=float, default=0.0)
    timing.add_argument("--delay-jitter-ms", type=float, default=0.0, help="added, by hash of the request")
    timing.add_argument("--loading-seconds", type=float, default=0.0, help="503 at first")
    timing.add_argument("--refuse-seconds", type=float, default=0.0, help="connection refused at first")
    faults = parser.add_argument_group("faults, counted over generation requests in order of arrival")
    faults.add_argument("--fail-every", type=int, nargs=2, metavar=("K", "STATUS"))
    faults.add_argument("--retry-after", default="0", help="Retry-After of those answers")
    faults.add_argument("--drop-every", type=int, metavar="K", help="connection reset without a reply")
    faults.add_argument("--die-after", type=int, metavar="K", help="K answers, then the process is gone")
    faults.add_argument("--garbage", action="store_true", help="HTML on every route")
    faults.add_argument("--mutate", choices=NAMES, help="a breach of the contract in replies")
    faults.add_argument("--mutate-fraction", type=float, default=1.0, help="of the prompts, by hash")
    parser.add_argument("--record", help="file to append generation requests and replies to, one JSON line each")
    options = parser.parse_args(arguments)
    if options.logprobs_mode is None:
        options.logprobs_mode = {"trl": "processed", "sglang": "temperature"}.get(options.kind, "raw")
    return options


def make_server(options: argparse.Namespace) -> FakeServer:
    module, name = KINDS[options.kind]
    tokenizer = FakeTokenizer(options.tokenizer or shared_tokenizer_directory())
    server: FakeServer = getattr(importlib.import_module(module), name)(options, tokenizer)
    return server


async def serve(options: argparse.Namespace) -> None:
    stopped, parent = asyncio.Event(), os.getppid()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.port))
    runner = web.ServerRunner(web.Server(make_server(options), access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    site, line = (
        web.SockSite(runner, listener, backlog=BACKLOG),
        f"listening http://127.0.0.1:{listener.getsockname()[1]}",
    )
    if options.refuse_seconds:
        print(line, flush=True)
        await asyncio.sleep(options.refuse_seconds)
        await site.start()
    else:
        await site.start()
        print(line, flush=True)
    while not stopped.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(stopped.wait(), PARENT_CHECK_SECONDS)
        except TimeoutError:
            continue
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(parse_arguments(sys.argv[1:])))
