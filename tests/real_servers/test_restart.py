"""A real vLLM that is killed in mid-run and started again: the run waits for it, and no sample is lost or doubled."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from . import checks, servers

pytestmark = pytest.mark.real_server("vllm")

SAMPLES = 40
RUN_SECONDS = 600


def test_a_run_outlives_a_server_that_is_killed_and_started_again(environment, log_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"s{i:03d}", "prompt": f"Count from {i} on:"}) + "\n" for i in range(SAMPLES)),
        encoding="utf-8",
    )
    out = tmp_path / "out.parquet"
    port = servers.free_port()
    arguments = ("--server-type", "vllm", "--base-url", f"http://127.0.0.1:{port}", "--out", out, "--max-tokens", 48)
    steady = ("--seed", 1, "--concurrency", 4, "--rows-per-shard", 4, "--wait-for-server", 400)
    with servers.running("vllm", environment=environment, log_folder=log_folder / "first", port=port) as first:
        run = subprocess.Popen(
            checks.command("rollout", prompts, *arguments, *steady), stderr=subprocess.PIPE, text=True
        )
        try:
            _wait_for_shards(tmp_path / "out.parquet.partial", run)
            first.kill()
            with servers.running("vllm", environment=environment, log_folder=log_folder / "second", port=port):
                _, stderr = run.communicate(timeout=RUN_SECONDS)
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 0, stderr
    assert "is out: vllm at" in stderr
    assert "is back after" in stderr
    rows = checks.read_rows(out)
    assert sorted(row["sample_id"] for row in rows) == [f"s{i:03d}" for i in range(SAMPLES)]
    checks.managed_cli("inspect", out, "--check")
    report = checks.forward_report(out, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows))


def _wait_for_shards(directory: Path, run: subprocess.Popen[str]) -> None:
    """Return once something is on disk, and most is still to be sampled."""
    deadline = time.monotonic() + RUN_SECONDS
    while len(list(directory.glob("shard-*.parquet"))) < 2:
        assert run.poll() is None, f"the run ended before its server was killed: {run.communicate()}"
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.1)
