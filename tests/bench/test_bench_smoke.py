"""The benchmarks run, and what they compare is the same work. Their numbers are no test: `tests/bench/run.sh`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.children import replay_server
from tests.bench.costs import FLOOR, RECORDER, compared
from tests.bench.flat import TURN_TOKENS, conversations, conversations_at_the_floor, growing_runs
from tests.bench.jobs import Job, tokenizer_directory
from tests.bench.stalls import stalls
from tests.bench.start import waiting_times
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


def quiet(line: str) -> None:
    """Nobody is to be told."""


def test_runs_of_growing_size_are_measured_beside_each_other() -> None:
    table, found = growing_runs(1000, 1, quiet)
    assert [each.size for each in found] == [1000]
    assert "| 1,000 |" in table


def test_every_turn_of_a_measured_conversation_extends_the_one_before(tmp_path: Path) -> None:
    """`conversations` raises where it does not; the floor has as many tokens, but for those of the chat template."""
    with replay_server("vllm", tokenizer_directory(), f"1x{TURN_TOKENS}") as url:
        _, tokens = conversations(url, tmp_path, 3, 2)
        _, at_the_floor = conversations_at_the_floor(url, tmp_path, 3, 2)
    assert tokens > at_the_floor > 0.9 * tokens > 2 * 3 * TURN_TOKENS


def test_a_grown_recording_is_shown_and_gone_on_from() -> None:
    """Each command must succeed: the resumed one finds every sample recorded."""
    _, found = waiting_times(3000, 1, quiet)
    assert [each.what for each in found][-2:] == [
        "`inspect` of 3,000 rows",
        "`--resume` of 3,000 recorded rows, none owed",
    ]


def test_the_loop_is_watched_while_a_run_records() -> None:
    """`stalls` raises where the file does not hold the job's tokens."""
    _, (found,) = stalls(20, quiet)
    assert found.late_p99 is not None
