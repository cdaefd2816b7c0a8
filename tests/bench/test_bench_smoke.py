"""The benchmarks run, and what they compare is the same work. Their numbers are no test: `tests/bench/run.sh`."""

from __future__ import annotations

import pytest

from tests.bench.costs import FLOOR, RECORDER, compared
from tests.bench.jobs import Job
from tests.bench.tables import token_table

FAR_TOO_MANY_FLOORS = 20.0
"""A recorder that costs so much more than the floor is broken; everything below is for the benchmarks to tell."""


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trl"])
def test_recorder_and_floor_record_the_same_tokens_of_every_server(kind: str) -> None:
    """`compared` raises where a file does not hold the job's tokens."""
    job = Job(kind=kind, samples=12, n=4, tokens=64, concurrency=8)
    found = compared(job, repeats=1)
    recorder, floor = (next(each for each in found if each.program == name) for name in (RECORDER, FLOOR))
    assert recorder.cpu < FAR_TOO_MANY_FLOORS * floor.cpu
    assert f"| {kind} | {RECORDER} |" in token_table(found, {kind: floor})
