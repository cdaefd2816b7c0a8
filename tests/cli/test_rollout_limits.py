"""A run that is going nowhere stops at its limit, and can be resumed; a slow reply fails its sample once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.rollout_command import at, check, failures_of, rollout, rows_of, sent_to_any, write_prompts
from tests.servers.process import running_server

SHORT = ("--max-tokens", 2, "--seed", 3, "--concurrency", 1)
LONG = "x" * 900
"""Does not fit into the context that the servers of these tests have."""

SMALL = ("--max-model-len", 200)


def write_lines(directory: Path, prompts: str) -> Path:
    """`.` is a prompt that works, `F` one that fails."""
    records = [{"id": f"s{i:03d}", "prompt": LONG if kind == "F" else f"Say {i}."} for i, kind in enumerate(prompts)]
    return write_prompts(directory / "in.jsonl", records)


@pytest.mark.parametrize(
    ("prompts", "option", "settled"),
    [
        ("F.F.F.....", "--max-failures", 3),
        ("F.FF......", "--max-consecutive-failures", 4),
    ],
)
def test_the_run_stops_when_the_limit_is_reached_and_resumes(
    tmp_path: Path, prompts: str, option: str, settled: int
) -> None:
    source, out = write_lines(tmp_path, prompts), tmp_path / "out.parquet"
    with running_server("llamacpp", *SMALL) as server:
        done = rollout(source, *at(server), *SHORT, option, 2, "--json", cwd=tmp_path)
        document = json.loads(done.stdout)
        assert (done.returncode, document["state"]) == (3, "stopped")
        assert document["recorded"] + document["failed"] == settled
        assert option in done.stderr
        assert "--resume --retry-failed" in done.stderr
        again = rollout(source, *at(server), *SHORT, "--resume", cwd=tmp_path)
    assert again.returncode == 3
    assert len(rows_of(out)) == prompts.count(".")
    assert len(failures_of(out)) == prompts.count("F")
    assert check(out).returncode == 0


def test_failures_that_are_not_in_a_row_do_not_reach_a_limit_for_a_row(tmp_path: Path) -> None:
    source = write_lines(tmp_path, "F.F.F.F.F.")
    with running_server("llamacpp", *SMALL) as server:
        done = rollout(source, *at(server), *SHORT, "--max-consecutive-failures", 2, cwd=tmp_path)
    assert done.returncode == 3


def test_a_limit_that_the_last_sample_reaches_does_not_keep_the_run_from_its_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path, "..F")
    with running_server("llamacpp", *SMALL) as server:
        done = rollout(source, *at(server), *SHORT, "--max-failures", 1, cwd=tmp_path)
    assert done.returncode == 3
    assert (tmp_path / "out.parquet").is_file()


def test_failures_of_earlier_sessions_do_not_count(tmp_path: Path) -> None:
    source = write_lines(tmp_path, "FF...")
    with running_server("llamacpp", *SMALL) as server:
        assert rollout(source, *at(server), *SHORT, "--max-failures", 2, cwd=tmp_path).returncode == 3
        done = rollout(source, *at(server), *SHORT, "--max-failures", 1, "--resume", cwd=tmp_path)
    assert done.returncode == 3


def test_lines_that_are_skipped_do_not_count(tmp_path: Path) -> None:
    source = write_lines(tmp_path, "...")
    source.write_bytes(b"{\n{\n{\n" + source.read_bytes())
    with running_server("llamacpp", *SMALL) as server:
        done = rollout(source, *at(server), *SHORT, "--on-bad-line", "skip", "--max-failures", 1, cwd=tmp_path)
    assert done.returncode == 3
    assert len(rows_of(tmp_path / "out.parquet")) == 3


def test_a_reply_that_takes_too_long_fails_its_sample_and_is_not_asked_for_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path, "..")
    with running_server("llamacpp", "--delay-ms", 60_000) as server:
        done = rollout(source, *at(server), *SHORT, "--request-timeout", 0.5, cwd=tmp_path)
        assert sent_to_any(server) == 2
    assert done.returncode == 3, done.stderr
    failures = failures_of(tmp_path / "out.parquet")
    assert [(failure["error"], failure["attempts"]) for failure in failures] == [("RequestTimedOut", 1)] * 2
    assert "--request-timeout" in failures[0]["hint"]
