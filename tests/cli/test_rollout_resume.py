"""A run that was killed, failed or finished is continued: each sample once, the same rows as without a break."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from managed_cli.storage.layout import LOCK_NAME
from tests.cli.rollout_command import (
    at,
    eventually,
    rollout,
    rows_of,
    sent_to,
    started_rollout,
    write_prompts,
)
from tests.servers.process import running_server

SAMPLES = 120
SETTINGS = ("--max-tokens", 8, "--seed", 5, "--rows-per-shard", 10, "--out", "out.parquet")


def write_many(folder: Path, count: int) -> Path:
    return write_prompts(folder / "many.jsonl", [{"id": f"s{i:03}", "prompt": f"Count to {i}."} for i in range(count)])


def values_of(path: Path) -> list[tuple[Any, ...]]:  # Any: columns of several types
    """What a trainer reads of each row, in an order of its own."""
    return sorted(
        (row["sample_id"], row["choice_index"], *(tuple(row[name]) for name in ("tokens", "masked_tokens", "logprobs")))
        for row in rows_of(path)
    )


def sent_by(server: Any) -> int:  # Any: a RunningServer
    return int(server.stats()["generations"])


def test_a_killed_run_is_continued_to_the_rows_of_an_undisturbed_one(tmp_path: Path) -> None:
    source = write_many(tmp_path, SAMPLES)
    shards = tmp_path / "out.parquet.partial"
    with running_server("llamacpp", "--delay-ms", 40) as server:
        where = (source, *at(server), "--concurrency", 4)
        for killed in range(2):
            with started_rollout(*where, *SETTINGS, "--resume", cwd=tmp_path) as run:
                before = len(list(shards.glob("shard-*.parquet")))
                eventually(lambda seen=before: len(list(shards.glob("shard-*.parquet"))) >= seen + 2, run)
                run.kill()
                run.wait()
            assert len(rows_of(shards)) >= 20 * (killed + 1)
        finished = rollout(*where, *SETTINGS, "--resume", cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        undisturbed = rollout(*where, *SETTINGS[:-1], "whole.parquet", cwd=tmp_path)
        assert undisturbed.returncode == 0, undisturbed.stderr
    assert values_of(tmp_path / "out.parquet") == values_of(tmp_path / "whole.parquet")
    assert len(values_of(tmp_path / "out.parquet")) == SAMPLES


def test_a_finished_run_is_resumed_without_a_request(tmp_path: Path) -> None:
    source = write_many(tmp_path, 5)
    with running_server("llamacpp") as server:
        assert rollout(source, *at(server), *SETTINGS, cwd=tmp_path).returncode == 0
        sent = sent_by(server)
        again = rollout(source, *at(server), *SETTINGS, "--resume", "--json", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert sent_by(server) == sent
    summary = json.loads(again.stdout)
    assert (summary["recorded"], summary["settled_earlier"], summary["rows_on_disk"]) == (5, 5, 5)


def test_a_reordered_and_extended_input_owes_only_what_is_new(tmp_path: Path) -> None:
    lines = [{"prompt": f"Count to {i % 4}."} for i in range(6)]  # two contents stand twice
    first = write_prompts(tmp_path / "first.jsonl", lines)
    second = write_prompts(tmp_path / "second.jsonl", [*reversed(lines), {"prompt": "Something new."}])
    with running_server("llamacpp") as server:
        assert rollout(first, *at(server), *SETTINGS, cwd=tmp_path).returncode == 0
        sent = sent_by(server)
        assert rollout(second, *at(server), *SETTINGS, "--resume", cwd=tmp_path).returncode == 0
        assert sent_by(server) == sent + 1
    ids = [row["sample_id"] for row in rows_of(tmp_path / "out.parquet")]
    assert len(ids) == len(set(ids)) == 7


def test_without_a_seed_the_run_goes_on_with_the_one_it_began_with(tmp_path: Path) -> None:
    settings = [value for value in SETTINGS if value not in ("--seed", 5)]
    with running_server("llamacpp") as server:
        first = rollout(write_many(tmp_path, 3), *at(server), *settings, "--json", cwd=tmp_path)
        second = rollout(write_many(tmp_path, 6), *at(server), *settings, "--json", "--resume", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert json.loads(first.stdout)["seed"] == json.loads(second.stdout)["seed"]


@pytest.mark.parametrize("change", [("--temperature", 0.5), ("--max-tokens", 9), ("--stop", "x"), ("--seed", 6)])
def test_other_settings_are_refused_by_name_before_the_server_is_asked(
    tmp_path: Path, change: tuple[object, ...]
) -> None:
    source = write_many(tmp_path, 2)
    with running_server("llamacpp") as server:
        assert rollout(source, *at(server), *SETTINGS, cwd=tmp_path).returncode == 0
        asked = server.stats()["requests"]
        refused = rollout(source, *at(server), *SETTINGS, "--resume", *change, cwd=tmp_path)
        assert server.stats()["requests"] == asked
    assert refused.returncode == 6
    assert str(change[0]).strip("-").replace("-", "_") in refused.stderr
    assert len(rows_of(tmp_path / "out.parquet")) == 2


def test_what_failed_is_left_alone_until_it_is_to_be_tried_again(tmp_path: Path) -> None:
    source = write_many(tmp_path, 12)
    failures = tmp_path / "out.parquet.failures.jsonl"
    with running_server("vllm", "--mutate", "short_logprobs", "--mutate-fraction", 0.4) as broken:
        first = rollout(source, *at(broken), *SETTINGS, cwd=tmp_path)
        assert first.returncode == 3, first.stderr
        failed = len(failures.read_text(encoding="utf-8").splitlines())
        assert 0 < failed < 12
        sent = len(sent_to(broken))
        left = rollout(source, *at(broken), *SETTINGS, "--resume", cwd=tmp_path)
        assert (left.returncode, len(sent_to(broken))) == (3, sent)
        tried = rollout(source, *at(broken), *SETTINGS, "--resume", "--retry-failed", cwd=tmp_path)
        assert (tried.returncode, len(sent_to(broken))) == (3, sent + failed)
    assert len(rows_of(tmp_path / "out.parquet")) + failed == 12


def test_token_id_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    ids = [1, 298, 17, 40]
    source = write_prompts(tmp_path / "ids.jsonl", [{"id": "a", "input_ids": ids}])
    with running_server("llamacpp") as server:
        run = rollout(source, *at(server), *SETTINGS, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert server.records()[0]["body"]["prompt"] == ids
    row = rows_of(tmp_path / "out.parquet")[0]
    assert row["tokens"][: len(ids)] == ids


def test_several_inputs_are_one_run_and_a_bad_line_can_be_a_failure(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", [{"id": "a", "prompt": "Count to 1."}])
    write_prompts(tmp_path / "b.jsonl", [{"id": "b", "prompt": "Count to 2."}, {"id": "c", "prompt": 7}])
    with running_server("llamacpp") as server:
        refused = rollout("*.jsonl", *at(server), *SETTINGS, cwd=tmp_path)
        run = rollout("*.jsonl", *at(server), *SETTINGS, "--on-bad-line", "skip", "--json", cwd=tmp_path)
    assert refused.returncode == 5
    assert "b.jsonl:2" in refused.stderr
    assert run.returncode == 3, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["recorded"], summary["failed"], summary["samples"]) == (2, 1, 3)
    assert sorted(pq.read_table(tmp_path / "out.parquet")["sample_id"].to_pylist()) == ["a", "b"]
    failure = json.loads((tmp_path / "out.parquet.failures.jsonl").read_text(encoding="utf-8"))
    assert (failure["sample_id"], failure["source"]) == ("c", "b.jsonl:2")


def test_a_run_goes_on_at_another_address_of_the_same_model(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"id": f"s{i}", "prompt": f"Say {i}."} for i in range(6)])
    settings = ("--max-tokens", 2, "--seed", 1, "--out", "rows/")
    for options in (("--limit", 3), ("--resume",)):
        with running_server("llamacpp") as server:
            done = rollout(source, *at(server), *settings, *options, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    assert [row["sample_id"] for row in rows_of(tmp_path / "rows")] == [f"s{i}" for i in range(6)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_input_is_checked_leaves_a_finished_output_finished(
    tmp_path: Path, number: signal.Signals
) -> None:
    settings = [*SETTINGS[:-1], "many/"]
    with running_server("llamacpp") as server:
        assert rollout(write_many(tmp_path, 3), *at(server), *settings, cwd=tmp_path).returncode == 0
        lock = tmp_path / "many" / LOCK_NAME
        assert not lock.exists()
        with started_rollout(write_many(tmp_path, 400_000), *at(server), *settings, "--resume", cwd=tmp_path) as run:
            eventually(lock.exists, run)
            run.send_signal(number)
            assert run.wait(timeout=60) == 128 + number
            assert run.stderr is not None
            told = run.stderr.read().strip()  # click ends the line in which a terminal shows ^C
            assert told.startswith("interrupted"), told
            assert "\n" not in told, told
    assert not lock.exists()
    assert len(rows_of(tmp_path / "many")) == 3
