"""The recorder beside the floor and beside other programs, on the same replies from the same server."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.children import Cost, replay_server
from tests.bench.jobs import PEERS_PYTHON, Job, at_the_floor, by_peer, recorded, tokenizer_directory, workplace
from tests.bench.tables import Measured

RECORDER, FLOOR = "managed-cli", "floor"
PEERS = {"atroposlib 0.4": "atropos_managed", "openai SDK": "openai_sdk"}

Run = Callable[[Job, str, Path], Cost]


def compared(
    job: Job, *, repeats: int, peers: bool = False, told: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """Every program on `job`, in turns, so that what else the machine does meets all of them alike.

    Peers, where the environment made for them is there, run on a quarter of the samples: they are slow.
    """
    runs: dict[str, tuple[Run, Job]] = {RECORDER: (recorded, job), FLOOR: (at_the_floor, job)}
    if peers and PEERS_PYTHON.exists():
        part = dataclasses.replace(job, samples=max(1, job.samples // 4))
        runs |= {name: (functools.partial(by_peer, script), part) for name, script in PEERS.items()}
    with workplace() as directory, replay_server(job.kind, tokenizer_directory(), job.size) as url:
        where = Path(directory)
        starts: dict[str, list[Cost]] = {name: [] for name in runs}
        costs: dict[str, list[Cost]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, (run, its_job) in runs.items():
                starts[name].append(run(dataclasses.replace(its_job, samples=1), url, where))
                costs[name].append(run(its_job, url, where))
                told(f"{job.kind} {job.size}, {job.concurrency} in flight: {name}: {costs[name][-1].cpu:.2f} s of CPU")
    return [
        Measured(name, its_job, min(starts[name], key=lambda cost: cost.cpu), costs[name])
        for name, (_, its_job) in runs.items()
    ]


def floors_of(found: Sequence[Measured]) -> list[Measured]:
    """Those of the floor."""
    return [each for each in found if each.program == FLOOR]


def say(line: str) -> None:
    """For people."""
    print(line, file=sys.stderr, flush=True)
