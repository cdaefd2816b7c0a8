"""Rollouts that are killed, interrupted and interrupted twice, at random moments of their whole lives.

Each is gone on from with `--resume` until it is finished: value for value the rows and failures of an undisturbed run.
MANAGED_CLI_TORTURE=full takes under ten minutes; MANAGED_CLI_TORTURE_SEED chooses other moments.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from managed_cli.errors import ExitCode
from tests.cli.rollout_command import at, rollout
from tests.cli.torture import How, OnDisk, Row, Storm, Tally, When, look
from tests.rollout.inputs_on_disk import json_lines
from tests.servers.process import RunningServer, running_server

IS_FULL = os.environ.get("MANAGED_CLI_TORTURE") == "full"

DISTURBANCES = {How.KILL: 100, How.TERM: 25, How.TWICE: 10} if IS_FULL else {How.KILL: 6, How.TERM: 3, How.TWICE: 2}
"""For each form of output."""

SEED = int(os.environ.get("MANAGED_CLI_TORTURE_SEED", "20"))

OUTPUTS = ["out.parquet", "rows/"]

SAMPLES = 64

LEAST_ALIVE = 0.6
"""Of the kills: the others came when the run had ended already, which is an end like any other."""

LEAST_RECORDED = 0.3
"""Of the kills: these met a run that had written rows or failures. Those in the first second cannot."""

MOST_OUTPUTS = 12 + sum(DISTURBANCES.values())
"""Moments are chance, and on a slow machine more of them fall into the start: kills are added until enough
have met what they should, but not for ever."""

SETTINGS = (
    *("--seed", 5, "-n", 2, "--max-tokens", 10, "--concurrency", 4, "--rows-per-shard", 6),
    *("--on-bad-line", "skip", "--wait-for-server", 10),
)

SERVER = ("--delay-ms", 30, "--delay-jitter-ms", 30, "--mutate", "positive_logprob", "--mutate-fraction", 0.1)
"""A reply to some of the prompts breaks the contract, always to the same ones."""


def input_lines(count: int) -> bytes:
    """The first `count` of the samples: text, chats, conversations, and some that fail in every run."""
    lines = []
    for index in range(count):
        record: dict[str, object] = {"id": f"s{index:03}", "topic": index % 5}
        if index % 16 == 3:
            record["prompt"] = "too long for the context " * 2000
        elif index % 16 == 7:
            record["prompt"] = index
        elif index % 8 == 2:
            record["messages"] = [{"role": "user", "content": f"Name {index} fruits."}]
        elif index % 8 == 5:
            record["turns"] = [f"What is {index} + 1?", "And one more?"]
        else:
            record |= {"prompt": f"Count to {index}.", "sampling": {"n": 1 + index % 3}}
        lines.append(record)
    return json_lines(lines)


def settings(server: RunningServer) -> tuple[object, ...]:
    return ("in.jsonl", *at(server), *SETTINGS)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("llamacpp", *SERVER, record=False) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "in.jsonl").write_bytes(input_lines(SAMPLES))
    done = rollout(*settings(server), "--out", "out.parquet", cwd=directory)
    assert done.returncode == ExitCode.SOME_FAILED, done.stderr
    found = look(f"{directory}/out.parquet")
    errors = {str(failure["error"]) for failure in found.failures.values()}
    assert errors == {"PromptRejected", "InputError", "ServerContractError"}
    assert len({identity[0] for identity in found.rows}) + len(found.failures) == SAMPLES
    return found


def of_first(count: int, rows: dict[str, Row] | dict[tuple[str, int, str], Row]) -> dict[object, Row]:
    """Those that belong to the first `count` samples."""
    return {key: row for key, row in rows.items() if row["sample_id"] < f"s{count:03}"}


@pytest.mark.parametrize("out", OUTPUTS)
def test_no_disturbance_loses_or_doubles_or_changes_anything(
    tmp_path: Path, out: str, server: RunningServer, undisturbed: OnDisk
) -> None:
    chance, tally, began = random.Random(f"{SEED} {out}"), Tally(), time.monotonic()
    left = [how for how, count in DISTURBANCES.items() for _ in range(count)]
    chance.shuffle(left)
    kills = DISTURBANCES[How.KILL]

    def has_met_enough() -> bool:
        alive, recorded = tally.met["kill -9: a run alive"], tally.met["kill -9: that had recorded something"]
        return alive >= LEAST_ALIVE * kills and recorded >= LEAST_RECORDED * kills

    while left or (not has_met_enough() and tally.outputs < MOST_OUTPUTS):
        left = left or [How.KILL]
        cwd = tmp_path / f"storm-{tally.outputs}"
        cwd.mkdir()
        storm = Storm(out, settings(server), cwd, chance, tally)
        # A finished output that more input comes to grows while it stands: that can be ended from outside, too.
        for count in [SAMPLES // 2, SAMPLES] if tally.outputs % 4 == 1 else [SAMPLES]:
            (cwd / "in.jsonl").write_bytes(input_lines(count))
            assert_survived(storm, left, of_first(count, undisturbed.rows), of_first(count, undisturbed.failures))
    report = f"{out}, seed {SEED}, {time.monotonic() - began:.0f} s: {tally}"
    print(report)
    assert has_met_enough(), report
    assert tally.met["SIGTERM: a run alive"] + tally.met["two signals: a run alive"], report
    if IS_FULL:
        assert tally.met["left behind: a torn shard"], report
        assert all(tally.met[f"kill -9: a run alive {when.value}"] for when in When), report


def assert_survived(storm: Storm, left: list[How], rows: dict[object, Row], failures: dict[object, Row]) -> None:
    """Disturb the output until it is finished, or `left` is empty and it is let finish; it is then as undisturbed."""
    safe = look(storm.path)
    while safe.left or safe.rows != rows or safe.failures != failures:
        now = storm.disturb(left.pop(), len(rows)) if left else storm.finish()
        assert safe.rows.keys() <= now.rows.keys()
        assert safe.failures.keys() <= now.failures.keys()
        assert now.rows.items() <= rows.items()
        assert now.failures.items() <= failures.items()
        safe = now
    storm.assert_finished()
