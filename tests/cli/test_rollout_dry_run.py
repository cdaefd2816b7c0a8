"""A dry run tells how long all prompts are, which do not fit, and for how many the answer would be cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from managed_cli.cli import rollout_dry_run
from managed_cli.cli.app import run
from tests.cli.rollout_command import at, environment, rollout, write_prompts
from tests.servers.process import RunningServer, running_server

CONTEXT = 100


def by_length(lengths: range) -> list[dict[str, Any]]:
    return [{"id": f"s{length}", "prompt_token_ids": [7] * length} for length in lengths]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Prompts of 1 to 120 tokens, each on the line of its length."""
    return write_prompts(tmp_path / "in.jsonl", by_length(range(1, 121)))


def tokens_of(*arguments: object, cwd: Path) -> dict[str, Any]:
    done = rollout(*arguments, "--dry-run", "--json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    tokens: dict[str, Any] = json.loads(done.stdout)["tokens"]
    return tokens


@pytest.fixture(scope="module", params=["vllm", "llamacpp"])
def small_server(request: pytest.FixtureRequest) -> Any:
    """A server with a short context; of llama.cpp, whose tokenizer is behind its endpoints, too."""
    with running_server(request.param, "--max-model-len", CONTEXT) as server:
        yield server


def test_lengths_are_told_against_the_context(small_server: RunningServer, source: Path, tmp_path: Path) -> None:
    sampled = small_server.stats()["generations"]
    tokens = tokens_of(source, *at(small_server), "--max-tokens", 20, cwd=tmp_path)
    assert [tokens[name] for name in ("samples", "min", "median", "p99", "max")] == [120, 1, 60, 119, 120]
    assert (tokens["budget"], tokens["complete"], tokens["cannot_be_used"]) == (CONTEXT, True, 0)
    assert (tokens["over_budget"], tokens["shortened"]) == (21, 19)  # from 100 on; from 81 to 99
    assert tokens["first_over_budget"][0] == {"sample_id": "s100", "source": "in.jsonl:100", "length": 100}
    assert small_server.stats()["generations"] == sampled


def test_lengths_are_told_in_words_after_the_first_prompts(
    small_server: RunningServer, source: Path, tmp_path: Path
) -> None:
    done = rollout(source, *at(small_server), "--max-tokens", 20, "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    prompts, found, lengths = done.stdout.partition("\nprompt tokens (")
    assert found
    assert prompts.count("sample s") == 3
    assert "  min 1, median 60, p95 114, p99 119, max 120\n" in lengths
    assert "  19 prompts with room for a part of max_tokens only: prompt + answer are at most 100 tokens\n" in lengths
    assert (
        "\n21 prompts without room for an answer in 100 tokens\n  in.jsonl:100: 100 tokens (sample s100)\n" in lengths
    )
    assert "\n  … and 11 more\n" in lengths
    assert done.stdout.endswith("dry run: nothing was sampled; the 3 samples above and 117 more would be sent\n")


def test_max_total_tokens_is_the_budget_where_it_is_smaller(
    small_server: RunningServer, source: Path, tmp_path: Path
) -> None:
    tokens = tokens_of(source, *at(small_server), "--max-total-tokens", 50, "--max-tokens", 1, cwd=tmp_path)
    assert (tokens["budget"], tokens["over_budget"], tokens["shortened"]) == (50, 71, 0)
    tokens = tokens_of(source, *at(small_server), "--max-total-tokens", 500, "--context-length", 30, cwd=tmp_path)
    assert (tokens["budget"], tokens["over_budget"]) == (30, 91)


def test_what_does_not_fit_is_what_a_run_fails(small_server: RunningServer, source: Path, tmp_path: Path) -> None:
    options = (*at(small_server), "--max-tokens", 1, "--max-total-tokens", 90)
    tokens = tokens_of(source, *options, cwd=tmp_path)
    done = rollout(source, *options, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["failed"] == tokens["over_budget"] == 31


def test_a_lines_own_max_tokens_counts(vllm: RunningServer, tmp_path: Path) -> None:
    records = by_length(range(10, 20))
    records[3]["sampling"] = {"max_tokens": 60}
    source = write_prompts(tmp_path / "in.jsonl", records)
    tokens = tokens_of(source, *at(vllm), "--max-tokens", 1, "--max-total-tokens", 50, cwd=tmp_path)
    assert (tokens["over_budget"], tokens["shortened"]) == (0, 1)


def test_only_the_part_and_the_limit_are_counted(vllm: RunningServer, source: Path, tmp_path: Path) -> None:
    assert tokens_of(source, *at(vllm), "--limit", 30, cwd=tmp_path)["samples"] == 30
    parts = [tokens_of(source, *at(vllm), "--seed", 1, "--part", f"{i}/2", cwd=tmp_path)["samples"] for i in (1, 2)]
    assert sum(parts) == 120
    assert all(parts)


def test_prompts_with_ids_that_the_vocabulary_lacks_are_named(vllm: RunningServer, tmp_path: Path) -> None:
    records = [*by_length(range(1, 5)), {"id": "odd", "prompt_token_ids": [10**6]}]
    source = write_prompts(tmp_path / "in.jsonl", records)
    assert tokens_of(source, *at(vllm), cwd=tmp_path)["cannot_be_used"] == 1
    done = rollout(source, *at(vllm), "--dry-run", cwd=tmp_path)
    assert "1 line cannot be used\n  in.jsonl:5: the token id 1000000 is outside the vocabulary" in done.stdout


def test_counting_over_the_network_ends_after_a_while_and_says_so(
    llamacpp: RunningServer,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rollout_dry_run, "OVER_NETWORK_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    arguments = ["rollout", str(source), *at(llamacpp), "--dry-run"]
    assert run(arguments) == 0
    out, _ = capsys.readouterr()
    assert "only the first 0 of 120 samples were counted, in 0.0s: the server counts them; --tokenizer NAME" in out
    assert run([*arguments, "--json"]) == 0
    out, _ = capsys.readouterr()
    tokens = json.loads(out)["tokens"]
    assert (tokens["complete"], tokens["samples"], tokens["max"]) == (False, 0, None)


def test_an_endpoint_without_token_ids_has_no_lengths(tmp_path: Path, source: Path) -> None:
    write_prompts(source, [{"prompt": "a"}])
    with running_server("openai") as server:
        arguments = (source, *at(server), "--model", "gpt-fake", "--dry-run", "--json")
        done = rollout(*arguments, cwd=tmp_path, ATROPOS_ALLOW_DUMMY_MANAGED_SERVER="1")
    assert done.returncode == 0
    assert json.loads(done.stdout)["tokens"] is None
    assert done.stderr.startswith("warning: an OpenAI endpoint gives no token ids")
    assert done.stderr.count("\n") == 1


MANY, LONG = 6_000, 1_000
ROOM_KB = 16_000
"""80 bytes a sample for their ids, and what an allocator keeps; the ids of the larger input alone are 48 MB."""


def peak_kb(source: Path, server: RunningServer) -> int:
    """The most memory that a dry run has held, by its own word: what `wait` says includes this process before it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from managed_cli.cli.app import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "print([line.split()[1] for line in Path('/proc/self/status').open() if line.startswith('VmHWM')][0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "rollout", str(source), *at(server), "--dry-run", "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=source.parent,
        env=environment(),
    )
    return int(done.stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_input(vllm: RunningServer, tmp_path: Path) -> None:
    records = [{"id": f"s{index}", "prompt_token_ids": [7] * LONG} for index in range(MANY)]
    few, many = write_prompts(tmp_path / "few.jsonl", records[:200]), write_prompts(tmp_path / "many.jsonl", records)
    assert peak_kb(many, vllm) - peak_kb(few, vllm) < ROOM_KB
