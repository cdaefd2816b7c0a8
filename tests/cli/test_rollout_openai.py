"""OpenAI endpoints through the command line: refused, or opted into and marked."""

from __future__ import annotations

from pathlib import Path

from tests.cli.rollout_command import at, one_message, rollout, rows_of, sent_to_any
from tests.servers.process import running_server

OPT_IN = {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}


def test_without_the_opt_in_the_limitation_is_explained(tmp_path: Path, prompts: Path) -> None:
    with running_server("openai") as server:
        run = rollout(prompts, *at(server), cwd=tmp_path, ATROPOS_ALLOW_DUMMY_MANAGED_SERVER="")
        assert sent_to_any(server) == 0
    assert run.returncode == 2
    assert "no token ids" in one_message(run.stderr)
    assert "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1" in run.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_with_the_opt_in_every_row_is_a_marked_placeholder_and_every_run_says_so(tmp_path: Path, prompts: Path) -> None:
    with running_server("openai") as server:
        run = rollout(prompts, *at(server), "-n", 2, "--max-tokens", 8, "--quiet", cwd=tmp_path, **OPT_IN)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("placeholder tokens and cannot be trained on") == 1
    rows = rows_of(tmp_path / "out.parquet")
    assert len(rows) == 6
    assert all(row["metadata"]["dummy_tokens"] is True for row in rows)
    assert {tuple(row["tokens"]) for row in rows} == {tuple(range(128))}
