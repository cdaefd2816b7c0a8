"""`managed-cli logprobs`: top-k alternatives at every position, recorded whole, resumable, or not at all."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.cli.app import run
from tests.cli.rollout_command import (
    RUN_SECONDS,
    at,
    command,
    environment,
    eventually,
    failures_of,
    one_message,
    write_prompts,
)
from tests.scoring.recordings import record
from tests.servers.model import Model
from tests.servers.process import RunningServer, running_server
from tests.servers.tokenizer import FakeTokenizer

LINES: list[dict[str, object]] = [
    {"id": "text", "prompt": "Tell me about the house."},
    {"id": "ids", "prompt_token_ids": [5, 6, 7, 300, 12]},
    {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
    {
        "id": "answered",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}],
        "difficulty": 3,
    },
]


@pytest.fixture(scope="module")
def vllm() -> Iterator[RunningServer]:
    with running_server("vllm") as server:
        yield server


def logprobs(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("logprobs", *arguments),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        cwd=cwd,
        env=environment(),
        timeout=RUN_SECONDS,
    )


def rows_at(path: Path) -> list[dict[str, Any]]:  # Any: columns' values
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [{**row, "metadata": json.loads(row["metadata"])} for row in rows]


def assert_true(row: dict[str, Any], model: Model, top_k: int) -> None:
    """The row holds what the fake model says, at every position."""
    ids = row["prompt_tokens"]
    assert row["prompt_length"] == len(ids) == len(row["prompt_topk_token_ids"]) == len(row["prompt_topk_logprobs"])
    assert row["prompt_topk_token_ids"][0] == row["prompt_topk_logprobs"][0] == []
    for position, (context, last) in enumerate(model.prompt_positions(ids), start=1):
        expected = model.top(context, last, top_k)
        assert row["prompt_topk_token_ids"][position] == [token for token, _ in expected]
        assert row["prompt_topk_logprobs"][position] == [logprob for _, logprob in expected]


def model_of(server: RunningServer) -> Model:
    return Model(FakeTokenizer(server.tokenizer_dir))


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trl"])
def test_every_kind_of_prompt_is_recorded_with_its_alternatives(kind: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", LINES)
    with running_server(kind) as server:
        own = ["--tokenizer", server.tokenizer_dir, "--context-length", 2048] if kind == "trl" else []
        done = logprobs(prompts, "--top-k", 4, "--json", *at(server), *own, cwd=tmp_path)
        model, tokenizer = model_of(server), FakeTokenizer(server.tokenizer_dir)
    assert done.returncode == 0, done.stderr
    rows = {row["sample_id"]: row for row in rows_at(tmp_path / "logprobs.parquet")}
    assert rows.keys() == {line["id"] for line in LINES}
    for row in rows.values():
        assert_true(row, model, 4)
        assert (row["choice_index"], row["node_id"]) == (None, None)
        assert row["metadata"]["server_type"] == kind
    assert rows["ids"]["prompt_tokens"] == [5, 6, 7, 300, 12]
    assert tokenizer.decode(rows["answered"]["prompt_tokens"]).endswith("Hello you")
    assert rows["answered"]["metadata"]["fields"] == {"difficulty": 3}
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["recorded"], summary["rows_on_disk"]) == ("finished", 4, 4)
    assert summary["tokens"] == sum(row["prompt_length"] for row in rows.values())


def test_the_columns_have_exactly_their_types(vllm: RunningServer, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", LINES[:1])
    assert run(["logprobs", str(prompts), "--out", str(tmp_path / "out.parquet"), "--quiet", *at(vllm)]) == 0
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert {name: schema.field(name).type for name in schema.names} == {
        "sample_id": pa.string(),
        "choice_index": pa.int32(),
        "node_id": pa.string(),
        "prompt_length": pa.int32(),
        "prompt_tokens": pa.list_(pa.int32()),
        "prompt_topk_token_ids": pa.list_(pa.list_(pa.int32())),
        "prompt_topk_logprobs": pa.list_(pa.list_(pa.float32())),
        "metadata": pa.string(),
    }
    keys = pq.read_metadata(tmp_path / "out.parquet").metadata
    assert json.loads(keys[b"managed_cli.run"])["top_k"] == 20
    assert json.loads(keys[b"managed_cli.summary"])["rows"] == 1


def test_recorded_rows_are_scored_whole_and_keep_their_identity(vllm: RunningServer, tmp_path: Path) -> None:
    recording = record(vllm, tmp_path)
    out = tmp_path / "rows.parquet"
    done = logprobs(recording, "--rows", "--top-k", 3, "--out", out, *at(vllm), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    identity = ("sample_id", "choice_index", "node_id")
    scored = {tuple(row[name] for name in identity): row for row in rows_at(out)}
    recorded = {tuple(row[name] for name in identity): row for row in pq.read_table(recording).to_pylist()}
    assert scored.keys() == recorded.keys()
    assert len(scored) == 12
    for key, row in scored.items():
        assert row["prompt_tokens"] == recorded[key]["tokens"]
        assert_true(row, model_of(vllm), 3)


def test_a_killed_run_is_resumed_without_a_doubled_row(vllm: RunningServer, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": f"Say {i}."} for i in range(60)])
    out = tmp_path / "out.parquet"
    with running_server("vllm", "--delay-ms", 30) as slow:
        options = ["--out", out, "--rows-per-shard", 5, "--top-k", 2, "--concurrency", 2]
        process = subprocess.Popen(
            command("logprobs", prompts, *options, *at(slow)), env=environment(), stderr=subprocess.PIPE
        )
        try:
            growing = tmp_path / "out.parquet.partial"
            eventually(lambda: len(list(growing.glob("*.parquet"))) >= 2)
            process.send_signal(signal.SIGKILL)
            assert process.wait(RUN_SECONDS) == -signal.SIGKILL
        finally:
            process.kill()
            process.communicate()
        refused = logprobs(prompts, *options, *at(slow), cwd=tmp_path)
        assert (refused.returncode, "`--resume`" in refused.stderr) == (6, True)
        other = logprobs(prompts, *options, "--resume", "--top-k", 3, *at(slow), cwd=tmp_path)
        assert other.returncode == 6
        assert "top_k: recorded 2, now 3" in other.stderr
    # The same model at another address goes on.
    done = logprobs(prompts, *options, "--resume", "--json", *at(vllm), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settled_earlier"] >= 10
    assert sorted(row["sample_id"] for row in rows_at(out)) == sorted(f"p{i}" for i in range(60))
    for row in rows_at(out):
        assert_true(row, model_of(vllm), 2)


def test_a_signal_leaves_whole_rows_and_its_exit_code(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": f"Say {i}."} for i in range(200)])
    with running_server("vllm", "--delay-ms", 40) as slow:
        options = ["--out", tmp_path / "out.parquet", "--top-k", 2, "--concurrency", 2, "--rows-per-shard", 3]
        process = subprocess.Popen(
            command("logprobs", prompts, *options, *at(slow)), env=environment(), stderr=subprocess.PIPE, text=True
        )
        growing = tmp_path / "out.parquet.partial"
        eventually(lambda: any(growing.glob("*.parquet")))
        process.terminate()
        _, stderr = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 143
    assert stderr.rstrip().endswith("continue with the same command and --resume")
    assert 0 < len(rows_at(growing)) < 200


def test_what_cannot_be_scored_fails_alone_and_is_listed(vllm: RunningServer, tmp_path: Path) -> None:
    lines = [*LINES, {"id": "turns", "turns": ["Hi", "And?"]}, {"id": "long", "prompt_token_ids": [5] * 3000}]
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", lines), tmp_path / "out.parquet"
    done = logprobs(prompts, "--out", out, *at(vllm), cwd=tmp_path)
    assert done.returncode == 3
    assert "2 of 6 samples failed" in done.stderr
    failures = {failure["sample_id"]: failure for failure in failures_of(out)}
    assert failures.keys() == {"turns", "long"}
    assert "cannot be scored" in failures["turns"]["message"]
    assert len(rows_at(out)) == 4


def test_more_alternatives_than_the_server_gives_are_refused_before_the_run(
    vllm: RunningServer, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", LINES)
    done = logprobs(prompts, "--top-k", 21, *at(vllm), cwd=tmp_path)
    assert done.returncode == 4
    assert "20" in one_message(done.stderr)
    assert "hint: a smaller --top-k" in done.stderr
    assert not list(tmp_path.glob("logprobs*"))


def test_what_is_not_of_its_kind_is_not_resumed_or_scored(vllm: RunningServer, tmp_path: Path) -> None:
    recording = record(vllm, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    onto = logprobs(prompts, "--out", recording, "--resume", *at(vllm), cwd=tmp_path)
    assert onto.returncode == 6
    assert "not an output of prompt logprobs" in one_message(onto.stderr)
    scored = tmp_path / "scored.parquet"
    assert logprobs(prompts, "--out", scored, "--quiet", *at(vllm), cwd=tmp_path).returncode == 0
    again = logprobs(scored, "--rows", "--out", tmp_path / "x.parquet", *at(vllm), cwd=tmp_path)
    assert again.returncode == 6
    assert "not a recording" in one_message(again.stderr)
    assert "it holds prompt logprobs" in again.stderr
    for server_type in ("llamacpp", "local", "openai"):
        refused = logprobs(prompts, "--server-type", server_type, cwd=tmp_path)
        assert (refused.returncode, "no logprobs of prompt tokens" in refused.stderr) == (2, True)
        assert "hint: vllm, sglang and trl score prompts" in refused.stderr
