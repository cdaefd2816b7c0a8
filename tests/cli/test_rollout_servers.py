"""Several servers, and servers that go and come back in mid-run: every sample is recorded once, on one server."""

from __future__ import annotations

import collections
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.rollout_command import (
    at,
    check,
    eventually,
    failures_of,
    rollout,
    rows_of,
    sent_to_any,
    started_rollout,
    write_prompts,
)
from tests.servers.process import RunningServer, running_server

SHORT = ("--max-tokens", 4, "--seed", 3)


def write_many(directory: Path, count: int) -> Path:
    return write_prompts(directory / "in.jsonl", [{"id": f"s{i:04d}", "prompt": f"Say {i}."} for i in range(count)])


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def port_of(server: RunningServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def servers_of(path: Path) -> collections.Counter[str]:
    return collections.Counter(row["metadata"]["server"] for row in rows_of(path))


def assert_each_once(path: Path, count: int) -> None:
    """Every sample of `write_many` has its one row, and nothing is wrong with any."""
    assert [row["sample_id"] for row in rows_of(path)] == [f"s{i:04d}" for i in range(count)]
    assert check(path).returncode == 0


def test_two_servers_share_the_samples_and_rows_and_summary_say_which_did_what(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 40), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 20) as one, running_server("vllm", "--delay-ms", 20) as other:
        both = [*at(one), "--base-url", other.url]
        done = rollout(source, *both, *SHORT, "--concurrency", 8, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout)["servers"]
        assert servers_of(out) == {one.url: counts[one.url]["rows"], other.url: counts[other.url]["rows"]}
    assert_each_once(out, 40)
    assert min(counts[url]["samples"] for url in counts) >= 10
    assert all(counts[url]["outages"] == 0 for url in counts)
    assert f"vllm at {one.url} and 1 more server" in done.stderr
    assert f"  {other.url}: {counts[other.url]['samples']} samples, " in done.stderr


def test_the_server_with_the_fewest_samples_under_way_gets_the_next(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 60), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 1500) as slow, running_server("vllm") as fast:
        done = rollout(source, *at(slow), "--base-url", fast.url, *SHORT, "--concurrency", 4, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        shares = servers_of(out)
        assert shares[fast.url] > 3 * shares[slow.url]


def test_a_conversation_stays_on_one_server(tmp_path: Path) -> None:
    talks = [{"id": f"t{i}", "turns": [f"Hello {i}.", f"More of {i}.", f"And {i}?"]} for i in range(12)]
    source = write_prompts(tmp_path / "in.jsonl", talks)
    with running_server("vllm", "--delay-ms", 5, "--delay-jitter-ms", 40) as one, running_server("vllm") as other:
        done = rollout(source, *at(one), "--base-url", other.url, *SHORT, "--concurrency", 6, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        turns = {
            url: len([record for record in server.records() if "prompt" in record["body"]])
            for url, server in ((one.url, one), (other.url, other))
        }
        shares = collections.Counter(
            {row["sample_id"]: row["metadata"]["server"] for row in rows_of(tmp_path / "out.parquet")}.values()
        )
        probes = 2  # each server is asked for its logprobs mode first
        assert turns == {url: 3 * shares[url] + probes for url in turns}
        assert min(shares.values()) >= 1


def test_a_server_that_dies_leaves_its_samples_to_the_others(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 60), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 30) as one, running_server("vllm", "--delay-ms", 30) as other:
        arguments = (source, *at(one), "--base-url", other.url, *SHORT, "--concurrency", 8, "--json")
        with started_rollout(*arguments, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 6, run)
            one.process.kill()
            stdout, stderr = run.communicate()
    assert run.returncode == 0, stderr
    assert_each_once(out, 60)
    assert json.loads(stdout)["servers"][one.url]["outages"] == 1
    assert f"warning: vllm at {one.url} is out: vllm at {one.url} cannot be reached" in stderr


def test_a_server_that_answers_nothing_while_it_generates_is_not_taken_for_lost(tmp_path: Path) -> None:
    """A connection of TRL's own server breaks, and others keep it busy for longer than a look at it lasts."""
    source, out = write_many(tmp_path, 12), tmp_path / "out.parquet"
    with running_server("trl", "--delay-ms", 1500, "--drop-every", 3) as server:
        known = ("--tokenizer", server.tokenizer_dir, "--context-length", 2048)
        done = rollout(source, *at(server), *known, *SHORT, "--concurrency", 12, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_each_once(out, 12)
    assert json.loads(done.stdout)["servers"][server.url]["outages"] == 0


@pytest.mark.parametrize("alone", [True, False])
def test_a_server_that_is_started_again_is_let_back_in(tmp_path: Path, alone: bool) -> None:
    source, out = write_many(tmp_path, 80), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 40) as one, running_server("vllm", "--delay-ms", 200) as other:
        others = [] if alone else ["--base-url", other.url]
        arguments = (source, *at(one), *others, *SHORT, "--concurrency", 4, "--wait-for-server", 50)
        with started_rollout(*arguments, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 12, run)
            one.process.kill()
            one.process.wait()
            with running_server("vllm", "--port", port_of(one)) as again:
                stderr = run.communicate()[1]
                assert run.returncode == 0, stderr
                probes = 2
                assert sent_to_any(again) > probes
    assert_each_once(out, 80)
    assert f"vllm at {one.url} is back after" in stderr


def test_a_lone_server_that_does_not_come_back_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 40), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 40) as one:
        arguments = (source, *at(one), *SHORT, "--concurrency", 4)
        with started_rollout(*arguments, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 12, run)
            one.process.kill()
            stderr = run.communicate()[1]
    assert run.returncode == 4, stderr
    assert "continue with the same command and --resume" in stderr
    assert failures_of(out) == []
    with running_server("vllm") as other:
        done = rollout(source, *at(other), *SHORT, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_each_once(out, 40)


def test_a_server_that_comes_back_with_another_context_is_not_let_in(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 60), tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 30) as one, running_server("vllm", "--delay-ms", 150) as other:
        arguments = (source, *at(one), "--base-url", other.url, *SHORT, "--concurrency", 4)
        with started_rollout(*arguments, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 6, run)
            one.process.kill()
            one.process.wait()
            with running_server("vllm", "--port", port_of(one), "--max-model-len", 1000) as again:
                stderr = run.communicate()[1]
                samples = [record for record in again.records() if record["body"].get("max_tokens") == SHORT[1]]
    assert run.returncode == 0, stderr
    assert samples == []
    assert_each_once(out, 60)
    assert f"vllm at {one.url} is not let back in" in stderr
    assert "context length: 2048 and 1000" in stderr


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [("--max-model-len", 999, "context length"), ("--logprobs-mode", "processed", "logprobs")],
)
def test_servers_that_differ_are_refused_before_anything_is_sampled(
    tmp_path: Path, option: str, value: object, word: str
) -> None:
    source = write_many(tmp_path, 4)
    with running_server("vllm") as one, running_server("vllm", option, value) as other:
        done = rollout(source, *at(one), "--base-url", other.url, *SHORT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert f"vllm at {other.url} does not serve what {one.url} does" in done.stderr
    assert word in done.stderr
    assert not list(tmp_path.glob("out.parquet*"))


def test_servers_of_different_models_are_refused(tmp_path: Path) -> None:
    source = write_many(tmp_path, 4)
    with running_server("vllm") as one, running_server("vllm", "--served-model-name", "another") as other:
        done = rollout(source, *at(one), "--base-url", other.url, *SHORT, cwd=tmp_path)
    assert done.returncode == 4
    assert "and another" in done.stderr


def test_a_server_that_is_down_at_the_start_is_told_of_and_let_in_when_it_is_up(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 60), tmp_path / "out.parquet"
    port = unused_port()
    late = f"http://127.0.0.1:{port}"
    with running_server("vllm", "--delay-ms", 250) as one:
        arguments = (source, *at(one), "--base-url", late, *SHORT, "--concurrency", 4)
        with started_rollout(*arguments, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 6, run)
            with running_server("vllm", "--port", port):
                stderr = run.communicate()[1]
    assert run.returncode == 0, stderr
    assert_each_once(out, 60)
    assert f"warning: vllm at {late} is out" in stderr
    assert servers_of(out)[late] > 0


def test_all_servers_down_at_the_start_is_an_error(tmp_path: Path) -> None:
    source = write_many(tmp_path, 4)
    urls = [f"http://127.0.0.1:{unused_port()}" for _ in range(2)]
    options = [word for url in urls for word in ("--base-url", url)]
    done = rollout(source, "--server-type", "vllm", *options, cwd=tmp_path)
    assert done.returncode == 4
    assert "cannot be reached" in done.stderr


def test_the_same_server_twice_is_a_usage_error(tmp_path: Path) -> None:
    source = write_many(tmp_path, 1)
    url = "http://127.0.0.1:9"
    done = rollout(source, "--server-type", "vllm", "--base-url", url, "--base-url", url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: --base-url {url} is given twice\n")


def test_one_server_that_wants_another_key_is_told_without_a_traceback(tmp_path: Path) -> None:
    source = write_many(tmp_path, 1)
    with running_server("vllm") as one, running_server("vllm", "--api-key", "other") as other:
        done = rollout(source, *at(one), "--base-url", other.url, *SHORT, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert f"vllm at {other.url} answered" in done.stderr


def test_a_late_first_server_is_held_against_the_one_that_the_run_began_with(tmp_path: Path) -> None:
    source, out = write_many(tmp_path, 40), tmp_path / "out.parquet"
    port = unused_port()
    late = f"http://127.0.0.1:{port}"
    with running_server("vllm", "--delay-ms", 250) as one:
        arguments = (source, "--server-type", "vllm", "--base-url", late, "--base-url", one.url)
        with started_rollout(*arguments, *SHORT, "--concurrency", 2, cwd=tmp_path) as run:
            eventually(lambda: sent_to_any(one) > 4, run)
            with running_server("vllm", "--port", port, "--max-model-len", 1000):
                stderr = run.communicate()[1]
    assert run.returncode == 0, stderr
    assert f"vllm at {late} is not let back in" in stderr
    assert servers_of(out) == {one.url: 40}
