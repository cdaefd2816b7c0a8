"""The command line against a stock `vllm serve`: every recorded number is held against the wire and the model."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from . import checks, servers
from .recording_proxy import Exchange, recording

pytestmark = pytest.mark.real_server("vllm")

CHOICES = 4
MAX_TOKENS = 64
VERIFIED_MEAN_NATS = 5e-5  # measured: 6e-6; the tolerance of `verify` bounds the largest difference

# What an unset field would be filled with from the model's generation_config.json.
ALWAYS_SENT = {"n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """One finished run, and what was said on the wire during it."""

    path: Path
    rows: list[checks.Row]
    exchanges: list[Exchange]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """The vLLM under test, and a rollout that was started before it."""

    base_url: str
    early: subprocess.Popen[str]
    early_out: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def vllm(environment: Path, log_folder: Path, folder: Path) -> Iterator[Server]:
    port = servers.free_port()
    base_url = f"http://127.0.0.1:{port}"
    out = folder / "early.parquet"
    arguments = ("--server-type", "vllm", "--base-url", base_url, "--out", out, "--limit", 2, "--max-tokens", 8)
    early = subprocess.Popen(
        checks.command("rollout", checks.EXAMPLES / "prompts.jsonl", *arguments, "--quiet", "--wait-for-server", 300),
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        with servers.running("vllm", environment=environment, log_folder=log_folder, port=port) as server:
            yield Server(base_url=server.base_url, early=early, early_out=out)
    finally:
        early.kill()
        early.wait()


@pytest.fixture(scope="module")
def recorded(vllm: Server, folder: Path) -> functools._lru_cache_wrapper[Recorded]:
    """Name of a data set → the run over it, made when a test first asks."""

    @functools.cache
    def run(name: str) -> Recorded:
        out = folder / f"{name}.parquet"
        sampling = ("-n", CHOICES, "--temperature", 1, "--max-tokens", MAX_TOKENS)
        with recording(vllm.base_url, folder / f"{name}.wire.jsonl") as proxy:
            where = ("--server-type", "vllm", "--base-url", proxy.base_url, "--out", out)
            checks.managed_cli("rollout", *checks.datasets()[name].arguments, *sampling, *where)
            exchanges = proxy.exchanges()
        return Recorded(path=out, rows=checks.read_rows(out), exchanges=exchanges)

    return run


every_dataset = pytest.mark.parametrize("name", list(checks.datasets()))


@every_dataset
def test_every_input_has_a_row_for_each_choice(recorded, name):
    checks.assert_every_input_has_its_choices(recorded(name).rows, checks.datasets()[name], CHOICES)


@every_dataset
def test_tokens_and_logprobs_are_those_on_the_wire(recorded, name):
    run = recorded(name)
    checks.assert_rows_are_what_was_on_the_wire(run.rows, run.exchanges)


@every_dataset
def test_every_logprob_is_that_of_an_independent_forward_pass(recorded, name, environment, folder):
    run = recorded(name)
    report = checks.forward_report(run.path, environment=environment, report=folder / f"{name}.truth.json")
    checks.assert_true(report, len(run.rows))


@every_dataset
def test_no_sampling_parameter_is_left_to_the_server(recorded, name):
    requests = checks.generation_requests(recorded(name).exchanges)
    assert requests
    assert all(request.keys() >= ALWAYS_SENT for request in requests)
    if not any("sampling" in item for item in checks.datasets()[name].inputs()):
        sent = {(request["temperature"], request["top_p"], request["top_k"]) for request in requests}
        assert sent == {(1, 1, -1)}


@every_dataset
def test_inspect_finds_no_fault(recorded, name):
    checks.managed_cli("inspect", recorded(name).path, "--check")


@every_dataset
def test_the_server_that_sampled_them_verifies_the_rows(recorded, vllm, name):
    path = recorded(name).path
    where = ("--server-type", "vllm", "--base-url", vllm.base_url)
    report = json.loads(checks.managed_cli("verify", path, *where, "--sample", 40, "--json").stdout)
    assert_verified(report, rows=min(40, len(recorded(name).rows)))


@every_dataset
def test_a_forward_pass_in_process_verifies_the_rows(recorded, environment, name):
    weights = ("--server-type", "transformers", "--model", environment / "models" / "smollm2-135m")
    arguments = (recorded(name).path, *weights, "--sample", 40, "--json")
    report = json.loads(checks.managed_cli("verify", *arguments, variables=checks.with_torch(environment)).stdout)
    assert_verified(report, rows=min(40, len(recorded(name).rows)))


def assert_verified(report, *, rows):
    """Every chosen row was compared, and no logprob differs by more than an honest one does."""
    print(f"{report['compared_positions']} positions: at most {report['max_difference']:.2e} nats, {report['scorer']}")
    assert report["ok"]
    assert report["compared_rows"] == report["verified_rows"] == rows
    assert report["mean_difference"] <= VERIFIED_MEAN_NATS
    assert report["token_ratios"]["effective_sample_size"] > 0.999


def test_temperature_that_is_not_recorded_is_found_by_a_forward_pass(vllm, environment, tmp_path):
    out, false = tmp_path / "cold.parquet", tmp_path / "false.parquet"
    sampling = ("-n", 2, "--temperature", 0.5, "--max-tokens", 32, "--limit", 4, "--seed", 7)
    where = ("--server-type", "vllm", "--base-url", vllm.base_url, "--out", out)
    checks.managed_cli("rollout", checks.EXAMPLES / "prompts.jsonl", *sampling, *where)
    table = pq.read_table(out)
    claims = [
        text.replace('"logprobs_mode":"raw"', '"logprobs_mode":"temperature"') for text in table["metadata"].to_pylist()
    ]
    column = pa.chunked_array([claims], type=pa.string())
    pq.write_table(
        table.set_column(table.schema.get_field_index("metadata"), table.schema.field("metadata"), column), false
    )
    weights = ("--server-type", "transformers", "--model", environment / "models" / "smollm2-135m", "--json")
    variables = checks.with_torch(environment)
    assert json.loads(checks.managed_cli("verify", out, *weights, variables=variables).stdout)["ok"]
    report = json.loads(checks.managed_cli("verify", false, *weights, variables=variables, exit_code=6).stdout)
    (diagnosis,) = report["diagnoses"]
    assert diagnosis["kind"] == "no_temperature"
    assert diagnosis["rows"] + report["undiagnosed_rows"] == report["beyond_tolerance"]["rows"] == table.num_rows
    # A short row whose tokens are all but certain hardly depends on the temperature.
    assert diagnosis["rows"] >= table.num_rows // 2


def test_choices_of_a_prompt_differ(recorded):
    choices: dict[str, list[tuple[int, ...]]] = {}
    for row in recorded("example chats").rows:
        choices.setdefault(row["sample_id"], []).append(tuple(row["tokens"]))
    several = [rows for rows in choices.values() if len(rows) > 1]
    assert len(several) > 10
    assert sum(len(set(rows)) > 1 for rows in several) > len(several) // 2


def test_a_run_started_before_its_server_waits_for_it(vllm):
    assert vllm.early.wait(timeout=120) == 0
    assert len(checks.read_rows(vllm.early_out)) == 2


def test_a_wrong_model_name_is_refused_before_anything_is_recorded(vllm, tmp_path):
    out = tmp_path / "out.parquet"
    where = ("--server-type", "vllm", "--base-url", vllm.base_url, "--model", "no-such-model", "--out", out)
    ended = checks.managed_cli("rollout", checks.EXAMPLES / "prompts.jsonl", *where, exit_code=4)
    assert "no-such-model" in ended.stderr
    assert servers.SERVED_NAME in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()


def test_a_server_that_is_not_there_is_named(tmp_path):
    base_url = f"http://127.0.0.1:{servers.free_port()}"
    where = ("--server-type", "vllm", "--base-url", base_url, "--out", tmp_path / "out.parquet")
    ended = checks.managed_cli("rollout", checks.EXAMPLES / "prompts.jsonl", *where, exit_code=4)
    assert re.search(re.escape(base_url), ended.stderr)
    assert "Traceback" not in ended.stderr


def test_a_temperature_is_recorded_with_logprobs_from_before_it(vllm, environment, tmp_path):
    out = tmp_path / "cold.parquet"
    sampling = ("-n", 2, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 20, "--max-tokens", 32, "--limit", 4)
    where = ("--server-type", "vllm", "--base-url", vllm.base_url, "--out", out)
    checks.managed_cli("rollout", checks.EXAMPLES / "prompts.jsonl", *sampling, *where)
    rows = checks.read_rows(out)
    report = checks.forward_report(out, environment=environment, report=tmp_path / "truth.json")
    checks.assert_true(report, len(rows))
    metadata = json.loads(rows[0]["metadata"])
    assert "raw" in json.dumps(metadata)
