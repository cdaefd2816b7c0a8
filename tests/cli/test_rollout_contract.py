"""Replies that break the contract fail their sample, by name; replies that come late or at the second try do not."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.types import IGNORED_TOKEN_ID
from tests.cli.rollout_command import at, failures_of, many_rollouts, rollout, rows_of, sent_to, write_prompts
from tests.servers.core import is_mutated
from tests.servers.mutate import NAMES
from tests.servers.process import RunningServer, running_server
from tests.servers.tokenizer import FakeTokenizer, shared_tokenizer_directory

SAMPLES, FRACTION = 30, 0.14
BREACHES = [name for name in NAMES if name not in ("wrong_tokenizer", "abort_finish")]
"""Breaches in replies to samples; a wrong tokenizer is seen before, and `abort` is a way to end (see below)."""

WHOLE_REPLY = {"truncated_json", "nan_logprob"}
"""Breaches of which no choice can be named: the reply is not JSON (NaN is none of its numbers)."""

STARTING_AT_ONCE = 4
"""Servers that start side by side: more would only wait for the processor."""


def lines() -> list[dict[str, str]]:
    return [{"id": f"s{index:02d}", "prompt": f"Question {index}: how many?"} for index in range(SAMPLES)]


def broken_samples() -> set[str]:
    tokenizer = FakeTokenizer(shared_tokenizer_directory())
    return {line["id"] for line in lines() if is_mutated(tokenizer.encode(line["prompt"]), FRACTION)}


@dataclass(frozen=True)
class Run:
    code: int
    stderr: str
    url: str
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    is_sound: bool


@contextmanager
def breaking(breach: str) -> Iterator[RunningServer]:
    with running_server("vllm", "--mutate", breach, "--mutate-fraction", FRACTION, record=False) as server:
        yield server


def arguments(server: RunningServer, source: Path, out: Path) -> list[object]:
    return [source, *at(server), "-n", 2, "--max-tokens", 16, "--seed", 2, "--out", out]


def outcome(done: subprocess.CompletedProcess[str], server: RunningServer, out: Path) -> Run:
    is_sound = check_recording(open_recording(str(out))).ok
    return Run(done.returncode, done.stderr, server.url, rows_of(out), failures_of(out), is_sound)


def run_with(breach: str, directory: Path, *options: object) -> Run:
    source, out = write_prompts(directory / "in.jsonl", lines()), directory / "out.parquet"
    with breaking(breach) as server:
        return outcome(rollout(*arguments(server, source, out), *options, cwd=directory), server, out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One run for each breach."""
    directory = tmp_path_factory.mktemp("breaches")
    source = write_prompts(directory / "in.jsonl", lines())
    outs = [directory / f"{breach}.parquet" for breach in BREACHES]
    with ExitStack() as stack, ThreadPoolExecutor(STARTING_AT_ONCE) as pool:
        servers = list(pool.map(lambda breach: stack.enter_context(breaking(breach)), BREACHES))
        every_run = [arguments(server, source, out) for server, out in zip(servers, outs, strict=True)]
        done = many_rollouts(every_run, cwd=directory)
    return {breach: outcome(*of) for breach, *of in zip(BREACHES, done, servers, outs, strict=True)}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_fails_its_samples_and_no_other(runs: dict[str, Run], breach: str) -> None:
    run, broken = runs[breach], broken_samples()
    assert 0 < len(broken) < SAMPLES
    assert run.code == 3, run.stderr
    assert {failure["sample_id"] for failure in run.failures} == broken
    assert len(run.failures) == len(broken)
    whole = {line["id"] for line in lines()} - broken
    assert [(row["sample_id"], row["choice_index"]) for row in run.rows] == [
        (i, c) for i in sorted(whole) for c in (0, 1)
    ]
    assert run.is_sound
    assert f"{len(broken)} of {SAMPLES} samples failed ({len(broken)} ServerContractError)" in run.stderr


@pytest.mark.parametrize("breach", BREACHES)
def test_a_failure_names_server_choice_sample_and_line(runs: dict[str, Run], breach: str) -> None:
    run = runs[breach]
    for failure in run.failures:
        message, line = failure["message"], int(failure["sample_id"][1:]) + 1
        assert f"vllm at {run.url}" in message
        assert f"sample {failure['sample_id']} (in.jsonl:{line})" in message
        assert breach in WHOLE_REPLY or "choice" in message
        assert (failure["source"], failure["line"], failure["error"]) == (
            f"in.jsonl:{line}",
            line,
            "ServerContractError",
        )
        assert failure["attempts"] == 1


def test_an_aborted_choice_fails_its_sample_or_says_so_in_its_row(tmp_path: Path) -> None:
    run, broken = run_with("abort_finish", tmp_path), broken_samples()
    failed = {failure["sample_id"] for failure in run.failures}
    told = {row["sample_id"] for row in run.rows if row["finish_reason"] == "abort"}
    assert failed | told == broken
    assert not failed & told


def test_nonfinite_keep_records_minus_infinity_where_the_server_sent_it(tmp_path: Path) -> None:
    run = run_with("minus_9999", tmp_path, "--nonfinite", "keep")
    assert (run.code, run.failures) == (0, [])
    for row in run.rows:
        infinite = [position for position, logprob in enumerate(row["logprobs"]) if logprob == -math.inf]
        is_broken = row["sample_id"] in broken_samples() and row["choice_index"] == 1
        assert len(infinite) == is_broken
        assert all(row["masked_tokens"][position] != IGNORED_TOKEN_ID for position in infinite)


def test_a_busy_server_is_asked_again_and_the_attempts_are_in_the_row(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines())
    with running_server("vllm", "--fail-every", 4, 503, "--retry-after", 1) as server:
        done = rollout(source, *at(server), "--max-tokens", 4, "--out", "out.parquet", cwd=tmp_path)
        sent = sent_to(server)
    assert done.returncode == 0, done.stderr
    for row in rows_of(tmp_path / "out.parquet"):
        tries = [e["status"] for e in sent if e["body"]["seed"] == row["metadata"]["sampling"]["seed"]]
        assert tries == [503] * (len(tries) - 1) + [200]
        assert row["metadata"]["attempts"] == len(tries)
    assert any(entry["status"] == 503 for entry in sent)


def test_a_dropped_connection_is_tried_again(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines())
    with running_server("vllm", "--drop-every", 5) as server:
        done = rollout(source, *at(server), "--max-tokens", 4, "--out", "out.parquet", cwd=tmp_path)
        dropped = [entry for entry in sent_to(server) if entry["fault"] == "drop"]
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out.parquet")
    assert len(rows) == SAMPLES
    again = {entry["body"]["seed"] for entry in dropped}
    assert again
    assert {row["metadata"]["sampling"]["seed"] for row in rows if row["metadata"]["attempts"] > 1} == again


def test_a_refused_sample_is_not_sent_again_and_does_not_end_the_run(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines())
    with running_server("vllm", "--fail-every", 5, 500) as server:
        done = rollout(source, *at(server), "--max-tokens", 4, "--out", "out.parquet", cwd=tmp_path)
        sent = sent_to(server)
    assert done.returncode == 3, done.stderr
    assert len(sent) == SAMPLES
    failures = failures_of(tmp_path / "out.parquet")
    assert {failure["error"] for failure in failures} == {"ServerRefused"}
    assert len(failures) + len(rows_of(tmp_path / "out.parquet")) == SAMPLES
