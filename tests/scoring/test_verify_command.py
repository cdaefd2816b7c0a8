"""`managed-cli verify` of honest recordings, and of those that cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.rollout_command import at, one_message
from tests.scoring.recordings import (
    Row,
    damaged,
    record,
    report,
    rows_at,
    sampled,
    verify,
    verify_here,
    write_rows,
)
from tests.servers.process import RunningServer, running_server


@pytest.fixture(scope="module")
def vllm() -> Iterator[RunningServer]:
    with running_server("vllm") as server:
        yield server


@pytest.fixture(scope="module")
def honest(vllm: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(vllm, tmp_path_factory.mktemp("honest"))


def own_options(server: RunningServer) -> list[object]:
    """What must be said of a server that says nothing of itself."""
    own = ["--tokenizer", server.tokenizer_dir, "--context-length", 2048] if server.kind == "trl" else []
    return [*at(server), *own]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trl"])
def test_honest_rows_agree_with_every_server_that_scores_prompts(kind: str, tmp_path: Path) -> None:
    with running_server(kind) as server:
        options = own_options(server)
        path = record(server, tmp_path, *options[4:])
        done = verify(path, "--json", *options)
    assert done.returncode == 0, done.stderr
    found = report(done)
    assert found["ok"]
    assert found["compared_rows"] == len(rows_at(path))
    assert found["compared_positions"] == sum(len(sampled(row)) for row in rows_at(path)) > 100
    assert found["max_difference"] < 1e-6
    for ratios in (found["token_ratios"], found["sequence_ratios"]):
        assert [ratios[name] for name in ("mean", "p99", "max", "effective_sample_size")] == pytest.approx([1] * 4)


def test_all_turns_of_a_conversation_are_compared(vllm: RunningServer, tmp_path: Path) -> None:
    path = record(vllm, tmp_path, chats=True)
    found = report(verify_here(path, "--json", *at(vllm)))
    assert found["ok"]
    assert found["compared_positions"] == sum(len(sampled(row)) for row in rows_at(path))
    assert any(len(row["metadata"]["turns"]) == 3 for row in rows_at(path))


def test_a_row_that_fills_the_context_is_compared_but_for_its_last_token(tmp_path: Path) -> None:
    with running_server("vllm", "--max-model-len", 40) as server:
        path = record(server, tmp_path)
        found = report(verify_here(path, "--json", *at(server)))
    full = [row for row in rows_at(path) if len(row["tokens"]) == 40]
    assert found["ok"]
    assert found["unscored_positions"] == len(full) > 0


def test_rows_of_another_stage_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    with running_server("vllm", "--logprobs-mode", "processed") as server:
        path = record(server, tmp_path, "--temperature", 0.6, "--top-k", 5)
        done = verify_here(path, *at(server))
        assert done.returncode == 2
        message = one_message(done.stderr)
        assert "none of the 12 rows" in message
        assert "12: taken after temperature or filters, and a server scores prompts before them" in message
        assert "12 rows: taken after temperature" in done.stdout
        assert not report(verify_here(path, "--json", *at(server)))["ok"]

        half = rows_at(path)
        neutral = record(server, tmp_path, "--overwrite")
        mixed = write_rows(tmp_path / "mixed.parquet", half + rows_at(neutral), neutral)
        found = report(verify_here(mixed, "--json", *at(server)))
    assert found["ok"]
    assert (found["verified_rows"], found["compared_rows"]) == (24, 12)
    assert list(found["not_compared"].values()) == [12]


@pytest.mark.parametrize("server_type", ["llamacpp", "local", "openai"])
def test_servers_without_prompt_logprobs_are_refused_with_a_way_out(server_type: str, honest: Path) -> None:
    done = verify_here(honest, "--server-type", server_type)
    assert done.returncode == 2
    assert "no logprobs of prompt tokens" in done.stderr
    assert "--server-type transformers" in done.stderr


def test_a_missing_pytorch_is_told_with_the_command_that_installs_it(
    honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    done = verify_here(honest, "--server-type", "transformers")
    assert done.returncode == 2
    assert "needs PyTorch" in one_message(done.stderr)
    assert "pip install 'managed-cli[transformers]'" in done.stderr


def test_a_sample_is_drawn_by_its_seed(vllm: RunningServer, honest: Path, tmp_path: Path) -> None:
    def drawn(*options: object) -> list[int]:
        lines = tmp_path / "rows.jsonl"
        assert verify_here(honest, *at(vllm), "--rows-to", lines, *options).returncode == 0
        return [json.loads(line)["row"] for line in lines.read_text("utf-8").splitlines()]

    everything = drawn()
    assert everything == list(range(12))
    assert drawn("--limit", 3) == [0, 1, 2]
    assert drawn("--sample", 99) == everything
    once = drawn("--sample", 4)
    assert once == sorted(set(once)) == drawn("--sample", 4)
    assert len(once) == 4
    assert any(drawn("--sample", 4, "--seed", seed) != once for seed in (1, 2, 3))


def test_each_row_has_a_line_of_its_own(vllm: RunningServer, honest: Path, tmp_path: Path) -> None:
    def changed(_: list[Row], row: Row) -> None:
        row["logprobs"][sampled(row)[3]] -= 2.0

    path, lines = damaged(honest, tmp_path / "damaged.parquet", changed), tmp_path / "rows.jsonl"
    verify_here(path, *at(vllm), "--rows-to", lines)
    reports = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    recorded = rows_at(path)
    assert [line["sample_id"] for line in reports] == [row["sample_id"] for row in recorded]
    assert [line["compared"] for line in reports] == [len(sampled(row)) for row in recorded]
    assert [line["row"] for line in reports if line["max_difference"] > 5e-4] == [4]
    assert reports[4]["max_difference"] == pytest.approx(2.0)
    assert reports[4]["mean_difference"] == pytest.approx(2.0 / len(sampled(recorded[4])))
    assert reports[4]["log_ratio"] == pytest.approx(2.0, abs=1e-5)
    assert reports[4]["worst_position"] == sampled(recorded[4])[3]


def test_the_worst_token_stands_in_its_text(vllm: RunningServer, honest: Path, tmp_path: Path) -> None:
    def changed(_: list[Row], row: Row) -> None:
        row["logprobs"][sampled(row)[3]] -= 2.0

    done = verify_here(damaged(honest, tmp_path / "damaged.parquet", changed), *at(vllm))
    assert done.returncode == 6
    place = sampled(rows_at(honest)[4])[3]
    assert f"sample p2, choice 0, position {place}: recorded" in done.stdout
    assert "off by +2" in done.stdout
    assert "⟦" in done.stdout
    assert "house number 4." in done.stdout
    assert "logprobs_changed" in done.stdout
    assert one_message(done.stderr).rstrip().endswith("logprobs beyond 0.0005 in 1")


def test_names_and_texts_of_a_recording_cannot_reach_the_terminal(
    vllm: RunningServer, honest: Path, tmp_path: Path
) -> None:
    def hostile(_: list[Row], row: Row) -> None:
        row["sample_id"] = "\x1b[2J[red]\u202e"
        row["full_text"] = "\x1b]0;title\x07" + row["full_text"]
        row["logprobs"][sampled(row)[3]] -= 2.0

    for options in ([], ["--json"]):
        done = verify_here(damaged(honest, tmp_path / "damaged.parquet", hostile), *at(vllm), *options)
        assert done.returncode == 6
        assert "[red]" in done.stdout
        assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr)


def test_a_tolerance_decides(vllm: RunningServer, honest: Path, tmp_path: Path) -> None:
    def off(_: list[Row], row: Row) -> None:
        row["logprobs"][sampled(row)[3]] -= 0.125

    path = damaged(honest, tmp_path / "damaged.parquet", off)
    rows = rows_at(path)
    for row in rows:  # the mean too, so that only the logprob is wrong
        row["mean_logprob"] = sum(row["logprobs"][p] for p in sampled(row)) / len(sampled(row))
    path = write_rows(path, rows, honest)
    assert verify_here(path, *at(vllm), "--tolerance", 0.2).returncode == 0
    assert verify_here(path, *at(vllm), "--tolerance", 0.1).returncode == 6


def test_a_server_that_is_not_there_is_named(honest: Path) -> None:
    done = verify_here(honest, "--server-type", "vllm", "--base-url", "http://127.0.0.1:1")
    assert done.returncode == 4
    assert "http://127.0.0.1:1" in one_message(done.stderr)


def test_a_server_that_goes_away_ends_it_and_names_the_row(honest: Path) -> None:
    with running_server("vllm", "--die-after", 3) as server:
        done = verify_here(honest, *at(server), "--concurrency", 1)
    assert done.returncode == 4
    assert "was scored" in one_message(done.stderr)
    assert done.stdout == ""


def test_a_key_stays_out_of_everything(honest: Path, tmp_path: Path) -> None:
    with running_server("vllm", "--api-key", "sk-verify-1234") as server:
        options = ("--api-key-env", "VERIFY_KEY", "--json", *at(server))
        done = verify(honest, *options, VERIFY_KEY="sk-verify-1234")
        refused = verify(honest, *options, VERIFY_KEY="sk-wrong-9876")
    assert (done.returncode, refused.returncode) == (0, 4)
    for text in (done.stdout, done.stderr, refused.stdout, refused.stderr):
        assert "sk-" not in text


def test_nothing_there_and_contradictions_are_told(honest: Path, tmp_path: Path) -> None:
    assert verify_here(tmp_path / "nothing.parquet", "--server-type", "vllm").returncode == 6
    assert verify_here(honest).returncode == 2
    both = verify_here(honest, "--server-type", "vllm", "--sample", 2, "--limit", 3)
    assert both.returncode == 2
    assert "--sample and --limit cannot be given together" in both.stderr
