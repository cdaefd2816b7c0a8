"""Benchmarks of the recorder: `python -m tests.bench NAME… [--repeats 3] [--json FILE]`; tables go to stdout."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tests.bench.costs import compared, floors_of, say
from tests.bench.flat import SIZES, growing_conversations, growing_runs
from tests.bench.jobs import Job
from tests.bench.real import real_paces, servers_environment
from tests.bench.stalls import LARGE
from tests.bench.stalls import stalls as found_stalls
from tests.bench.start import ROWS, waiting_times
from tests.bench.tables import request_table, token_table

KINDS = ("vllm", "sglang", "trl")


class Jsonable(Protocol):
    """Something measured."""

    def to_json(self) -> dict[str, object]:
        """As it stands in the JSON file."""
        ...


Found = tuple[str, Sequence[Jsonable]]
"""A scenario's table, and what it was made of."""


def tokens(options: argparse.Namespace) -> Found:
    """CPU per completion token: replies of 8 choices with 512 tokens, 256 requests in flight."""
    samples = options.samples or 1000  # 4.1 million tokens
    jobs = [Job(kind=kind, samples=samples, n=8, tokens=512, concurrency=256) for kind in options.kinds]
    found = [
        each for job in jobs for each in compared(job, repeats=options.repeats, peers=job.kind == "vllm", told=say)
    ]
    return token_table(found, {floor.job.kind: floor for floor in floors_of(found)}), found


def requests(options: argparse.Namespace) -> Found:
    """CPU per request: one choice with 16 tokens, 256 and 1024 requests in flight."""
    samples = options.samples or 8000
    jobs = [Job(kind="vllm", samples=samples, n=1, tokens=16, concurrency=count) for count in (256, 1024)]
    found = [each for job in jobs for each in compared(job, repeats=options.repeats, peers=True, told=say)]
    return request_table(found, {floor.job.concurrency: floor for floor in floors_of(found)}), found


def flat(options: argparse.Namespace) -> Found:
    """Whether cost and memory stay what they are from 10^3 to 10^6 samples: short prompts, 16 tokens, 256 in flight."""
    return growing_runs(options.samples or max(SIZES), options.repeats, say)


def turns(options: argparse.Namespace) -> Found:
    """Whether a token costs the same in conversations of 8, 16 and 32 turns, which have up to 34 thousand tokens."""
    return growing_conversations(options.repeats, say)


def start(options: argparse.Namespace) -> Found:
    """Seconds of wall time: help, a small run, the summary of 10^6 rows, and going on from them."""
    return waiting_times(options.samples or ROWS, options.repeats, say)


def stalls(options: argparse.Namespace) -> Found:
    """What holds the event loop: 1 MB replies, 1024 in flight, shards written meanwhile."""
    return found_stalls(options.samples or LARGE.samples, say)


def real(options: argparse.Namespace) -> Found:
    """Tokens per second of real servers, under the recorder and under clients that record nothing."""
    servers = servers_environment()
    if servers is None:
        return "MANAGED_CLI_REAL_SERVERS does not name an environment of real servers: not measured", []
    return real_paces(servers, options.samples or 96, options.repeats, say)


SCENARIOS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "tokens": tokens,
    "requests": requests,
    "flat": flat,
    "turns": turns,
    "start": start,
    "stalls": stalls,
    "real": real,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="the least CPU time of so many runs counts")
    parser.add_argument("--samples", type=int, help="instead of the scenario's own number")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="servers, for `tokens`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; choose from {', '.join(SCENARIOS)}")
    load = os.getloadavg()[0]
    say(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    measured = {}
    for name in options.names or SCENARIOS:
        table, found = SCENARIOS[name](options)
        print(f"{name}: {SCENARIOS[name].__doc__}\n\n{table}\n", flush=True)
        measured[name] = [each.to_json() for each in found]
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
