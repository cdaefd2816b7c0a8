"""However a run ends before its time, what was finished is on disk in whole shards, and the last line says so."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from managed_cli.storage.reader import open_recording
from tests.cli.rollout_command import at, check, eventually, rollout, rows_of, sent_to, started_rollout, write_prompts
from tests.servers.process import RunningServer, running_server

ONE_REQUEST = ("--max-tokens", 1, "--seed", 1)
"""With these no sample needs more than one request of llama.cpp, which is asked again about parts of characters."""

FOR_EVER_MS = 600_000
"""Longer than any run of these tests may take."""

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def write_many(directory: Path, count: int) -> Path:
    return write_prompts(directory / "in.jsonl", [{"id": f"s{i:04d}", "prompt": f"Say {i}."} for i in range(count)])


def shards(directory: Path) -> list[Path]:
    return sorted((directory / "out.parquet.partial").glob("shard-*.parquet"))


def answered(server: RunningServer) -> int:
    """Samples whose reply the server has sent."""
    return sum(entry["status"] == 200 for entry in sent_to(server))


def read_until(run: subprocess.Popen[str], beginning: str) -> None:
    """Return once `run` has written a line that begins so on stderr."""
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the run ended without saying: {beginning}")


def last_line(stderr: str) -> str:
    return stderr.rstrip("\n").rpartition("\n")[2]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_one_signal_lets_requests_in_flight_finish_and_sends_no_more(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source = write_many(tmp_path, 100)
    with (
        running_server("llamacpp", "--delay-ms", 1000) as server,
        started_rollout(
            source, *at(server), *ONE_REQUEST, "--concurrency", 4, "--out", "out.parquet", cwd=tmp_path
        ) as run,
    ):
        eventually(lambda: answered(server) >= 4 and server.stats()["in_flight"] == 4, run)
        run.send_signal(number)
        stderr = run.communicate()[1]
        assert (run.returncode, answered(server)) == (code, 8), stderr
    assert len(rows_of(tmp_path / "out.parquet.partial")) == 8
    assert last_line(stderr) == (
        "interrupted after 8 of 100 samples; 8 rows of 8 samples are in out.parquet.partial/; "
        "continue with the same command and --resume"
    )
    assert "Traceback" not in stderr
    assert check(tmp_path / "out.parquet.partial").returncode == 0


def test_requests_that_outlive_the_grace_are_given_up(tmp_path: Path) -> None:
    source = write_many(tmp_path, 8)
    with (
        running_server("llamacpp", "--delay-ms", FOR_EVER_MS) as server,
        started_rollout(source, *at(server), "--grace", 0.2, cwd=tmp_path) as run,
    ):
        eventually(lambda: server.stats()["in_flight"] == 8, run)
        run.send_signal(signal.SIGINT)
        stderr = run.communicate()[1]
        assert run.returncode == 130, stderr
    assert last_line(stderr) == "interrupted after 0 of 8 samples; no row was recorded"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_second_signal_ends_the_run_at_once_and_keeps_what_is_finished(tmp_path: Path) -> None:
    source = write_many(tmp_path, 100)
    with (
        running_server("llamacpp", "--delay-jitter-ms", 100_000) as server,
        started_rollout(
            source,
            *at(server),
            *("--seed", 1, "--max-tokens", 1, "--grace", 3600, "--concurrency", 100, "--out", "out.parquet"),
            cwd=tmp_path,
        ) as run,
    ):
        eventually(lambda: answered(server) >= 3, run)
        run.send_signal(signal.SIGINT)
        read_until(run, "stopping: nothing more is sent")
        run.send_signal(signal.SIGTERM)
        stderr = run.communicate()[1]
        assert run.returncode == 130, stderr
    rows = len(rows_of(tmp_path / "out.parquet.partial"))
    assert rows >= 1
    assert f"interrupted after {rows} of 100 samples; " in last_line(stderr)
    assert check(tmp_path / "out.parquet.partial").returncode == 0


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_while_a_server_is_waited_for_ends_the_run(tmp_path: Path, number: signal.Signals, code: int) -> None:
    source = write_many(tmp_path, 3)
    with (
        running_server("llamacpp", "--loading-seconds", 3600) as server,
        started_rollout(source, *at(server), "--wait-for-server", 3600, cwd=tmp_path) as run,
    ):
        eventually(lambda: bool(server.stats()["requests"]), run)
        run.send_signal(number)
        stdout, stderr = run.communicate()
        assert (run.returncode, stdout) == (code, "")
    assert stderr == "interrupted before the first sample was sent; nothing was written to out.parquet\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_signal_that_comes_when_all_is_in_flight_still_ends_with_a_finished_file(tmp_path: Path) -> None:
    source = write_many(tmp_path, 4)
    with (
        running_server("llamacpp", "--delay-ms", 1500) as server,
        started_rollout(source, *at(server), *ONE_REQUEST, "--out", "out.parquet", cwd=tmp_path) as run,
    ):
        eventually(lambda: server.stats()["in_flight"] == 4, run)
        run.send_signal(signal.SIGINT)
        stderr = run.communicate()[1]
        assert run.returncode == 0, stderr
    assert len(rows_of(tmp_path / "out.parquet")) == 4


def test_a_server_that_dies_ends_the_run_and_keeps_what_was_finished(tmp_path: Path) -> None:
    source = write_many(tmp_path, 100)
    options = ("--concurrency", 4, "--rows-per-shard", 5, "--out", "out.parquet", "--json")
    with running_server("vllm", "--die-after", 42) as server:
        done = rollout(source, *at(server), *options, cwd=tmp_path)
    assert done.returncode == 4
    assert done.stderr.count("error: ") == 1
    assert f"error: vllm at {server.url} cannot be reached" in done.stderr
    assert '"state": "stopped"' in done.stdout
    rows = rows_of(tmp_path / "out.parquet.partial")
    assert len(rows) == 40  # two of the 42 answers were to the probes
    assert "stopped after 40 of 100 samples; 40 rows of 40 samples are in out.parquet.partial/" in last_line(
        done.stderr
    )
    assert check(tmp_path / "out.parquet.partial").returncode == 0


def test_a_run_killed_at_any_moment_leaves_whole_shards(tmp_path: Path) -> None:
    source = write_many(tmp_path, 2000)
    options = ("--max-tokens", 4, "--rows-per-shard", 20, "--out", "out.parquet")
    wanted = random.Random().randrange(1, 40)
    with (
        running_server("vllm", record=False) as server,
        started_rollout(source, *at(server), *options, cwd=tmp_path) as run,
    ):
        eventually(lambda: len(shards(tmp_path)) >= wanted, run)
        run.kill()
        run.wait()
        assert run.returncode == -signal.SIGKILL
        partial = tmp_path / "out.parquet.partial"
        recording = open_recording(str(partial))
        assert recording.rows >= 20 * wanted
        assert {row["sample_id"] for row in rows_of(partial)} <= {f"s{i:04d}" for i in range(2000)}
        assert len({row["sample_id"] for row in rows_of(partial)}) == recording.rows
        done = check(partial)
        assert done.returncode == 0, done.stdout + done.stderr
        again = rollout(source, *at(server), *options, "--limit", 5, "--overwrite", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(rows_of(tmp_path / "out.parquet")) == 5
