"""Whatever a server does, every sample is recorded as a sound server's would be, failed by name, or still owed."""

from __future__ import annotations

import functools
import json
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import create_ssl_context

from managed_cli.backends import _http, base
from managed_cli.cli.app import run
from managed_cli.rollout import pool
from tests.cli.rollout_command import eventually, failures_of, rollout, rows_of, started_rollout, write_prompts
from tests.rollout.fault_table import CASES, Case, Outcome, readme_table
from tests.servers.core import is_mutated
from tests.servers.faulty import CERTIFICATE, FRACTION, Setting
from tests.servers.process import REPOSITORY, FaultyServers, faulty_servers, running_server
from tests.servers.tokenizer import FakeTokenizer, shared_tokenizer_directory

NUMBERS = (1, 3, 5, 2, 6, 4)
"""What the samples ask about, in this order: the first are none that a fault concerns."""

SAMPLES = len(NUMBERS)
CHOICES = 2
LONGEST_RUN_SECONDS = 40.0
"""A run that takes longer hangs; it is interrupted, so that its test fails."""

LATE_SECONDS = 0.5
"""After so long a server that starts late is up."""

OTHERS = {
    "sound": Setting("html", tries=0),
    "never_answers_untimed": Setting("never_answers"),
    "drips_untimed": Setting("drips"),
    "all_503_again": Setting("status_503", scope="samples"),
    **{f"{name}_of_two": Setting(name) for name in ("status_401", "dies", "resets_from_now_on", "engine_ends")},
}
"""Ports for tests beside the table."""

Told = tuple[int, str, str]
"""Exit code, stdout, stderr."""


def lines() -> list[dict[str, str]]:
    return [{"id": f"s{number}", "prompt": f"How old is number {number}?"} for number in NUMBERS]


def victims() -> set[str]:
    """The samples that a fault in the scope "victims" concerns."""
    tokenizer = FakeTokenizer(shared_tokenizer_directory())
    return {line["id"] for line in lines() if is_mutated(tokenizer.encode(line["prompt"]), FRACTION)}


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], FaultyServers]]:
    """The faulty servers of a wire format, a port for each case, in front of one sound server."""
    started: dict[str, FaultyServers] = {}
    with ExitStack() as stack:

        def of(wire: str) -> FaultyServers:
            if wire not in started:
                server = stack.enter_context(running_server(wire))
                settings = {case.name: case.setting for case in CASES if wire in case.wires}
                started[wire] = stack.enter_context(faulty_servers(server, settings | OTHERS))
            return started[wire]

        yield of


@functools.cache
def one_ssl_context(*arguments: Any, **options: Any) -> ssl.SSLContext:  # Any: httpx's own, handed on
    return create_ssl_context(*arguments, **options)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """`managed-cli ARGUMENTS` in this process, with shorter waits than a person has."""
    for name in [name for name in os.environ if name.startswith("MANAGED_CLI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for module, name, seconds in (
        (_http, "FIRST_BACKOFF_SECONDS", 0.0),
        (_http, "LONGEST_RETRY_AFTER_SECONDS", 0.05),
        (_http, "QUESTION_TIMEOUT_SECONDS", 2.0),
        (_http, "LARGEST_REPLY_BYTES", 200_000_000),
        (base, "HEALTH_POLL_SECONDS", 0.05),
        (pool, "LOOK_SECONDS", 0.05),
        (pool, "SHORT_OUTAGE_SECONDS", 2.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(httpx, "create_ssl_context", one_ssl_context)  # reading the certificates takes 50 ms a run

    def call(*arguments: object) -> Told:
        watchdog = threading.Timer(LONGEST_RUN_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
        watchdog.start()
        try:
            code = run([str(argument) for argument in arguments])
        finally:
            watchdog.cancel()
        return (code, *capsys.readouterr())

    return call


def arguments(wire: str, url: str, tokenizer: Path) -> list[object]:
    common = ["rollout", "in.jsonl", "--server-type", wire, "--base-url", url, "-n", CHOICES, "--max-tokens", 8]
    tokens = ["--context-length", 2048, "--tokenizer", tokenizer] if wire in ("trl", "llamacpp") else []
    return [*common, *tokens, "--seed", 2, "--concurrency", 3, "--grace", 1, "--json"]


def recorded_rows(path: Path) -> list[dict[str, Any]]:  # Any: columns' values
    """The rows without what may differ between two tries: the server's address and the number of sends."""
    rows = rows_of(path)
    for row in rows:
        del row["metadata"]["server"], row["metadata"]["attempts"]
    return rows


def output_of(out: Path) -> Path:
    """Where the rows are: the file, or the directory that grows until it is one."""
    return out if out.exists() else out.with_name(f"{out.name}.partial")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[dict[str, Any]]]:  # Any: as above
    """The rows of a run without any fault, by wire format, from the first test on that needs them."""
    return {}


@pytest.mark.parametrize(
    ("case", "wire"), [pytest.param(case, wire, id=f"{case.name}-{wire}") for case in CASES for wire in case.wires]
)
def test_a_fault_has_the_outcome_of_the_table_and_no_sample_is_wrong_or_lost(
    case: Case,
    wire: str,
    servers: Callable[[str], FaultyServers],
    told: Callable[..., Told],
    undisturbed: dict[str, list[dict[str, Any]]],  # Any: as above
    tmp_path: Path,
) -> None:
    write_prompts(tmp_path / "in.jsonl", lines())
    faulty, out = servers(wire), tmp_path / "out.parquet"
    sound = arguments(wire, faulty.urls["sound"], faulty.sound.tokenizer_dir)
    if wire not in undisturbed:
        assert told(*sound, "--out", "sound.parquet")[0] == 0
        undisturbed[wire] = recorded_rows(tmp_path / "sound.parquet")
        (tmp_path / "sound.parquet").unlink()

    with starting(case, faulty):
        code, stdout, stderr = told(
            *arguments(wire, url_of(case, faulty), faulty.sound.tokenizer_dir), *case.options, "--out", out
        )

    assert code == case.exit_code or (case.outcome is Outcome.EITHER and code == 0), stderr
    assert "Traceback" not in stderr
    if case.outcome is Outcome.REFUSED:
        assert stderr.count("error: ") == 1
        assert case.said in stderr
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}
        return
    rows, failures = rows_so_far(out), failures_of(out)
    recorded = {row["sample_id"] for row in rows}
    assert_expected(case, recorded, failures, stderr, json.loads(stdout))
    assert rows == [row for row in undisturbed[wire] if row["sample_id"] in recorded]
    if recorded:
        assert told("inspect", "--check", output_of(out))[0] == 0
    assert_sent_as_often(case, out, failures, faulty)

    code, _, stderr = told(*sound, "--out", out, "--resume", "--retry-failed")
    assert code == 0, stderr
    assert recorded_rows(out) == undisturbed[wire]


@contextmanager
def starting(case: Case, faulty: FaultyServers) -> Iterator[None]:
    """The server is down where it is to be, and comes up where it is to."""
    if case.starts == "up":
        yield
        return
    faulty.hits(case.name, "down")
    coming = threading.Timer(LATE_SECONDS, faulty.hits, (case.name, "up"))
    if case.starts == "late":
        coming.start()
    yield
    coming.cancel()


def met_by(case: Case) -> set[str]:
    """The samples that meet the fault."""
    return {"victims": victims(), "samples": {line["id"] for line in lines()}}.get(case.setting.scope, set())


def rows_so_far(out: Path) -> list[dict[str, Any]]:  # Any: as above
    return recorded_rows(output_of(out)) if output_of(out).exists() else []


def assert_expected(
    case: Case,
    recorded: set[str],
    failures: list[dict[str, Any]],  # Any: JSON values
    stderr: str,
    summary: dict[str, Any],  # Any: JSON values
) -> None:
    """Every sample is recorded, failed or owed, as the table says."""
    every, met = {line["id"] for line in lines()}, met_by(case)
    failed = [failure["sample_id"] for failure in failures]
    assert 1 < len(victims()) < SAMPLES - 1
    assert len(failed) == len(set(failed))
    assert (summary["recorded"], summary["failed"]) == (len(recorded), len(failed))
    assert all(failure["error"] == case.error and case.said in failure["message"] for failure in failures)
    if case.outcome is Outcome.ENDED:
        assert (failed, recorded & met) == ([], set())
        assert recorded
        assert case.said in stderr
        assert "--resume" in stderr
        return
    assert not recorded & set(failed)
    assert recorded | set(failed) == every
    if case.outcome is not Outcome.EITHER:
        assert set(failed) == (met if case.outcome is Outcome.FAILED else set())


def assert_sent_as_often(case: Case, out: Path, failures: list[dict[str, Any]], faulty: FaultyServers) -> None:
    """Rows and failures tell how often a sample was sent, and the server has seen it so often."""
    if case.sends is None or case.outcome is Outcome.ENDED or case.setting.tries == 0:
        return
    told = {failure["sample_id"]: failure["attempts"] for failure in failures}
    if output_of(out).exists():
        told |= {row["sample_id"]: row["metadata"]["attempts"] for row in rows_of(output_of(out))}
    met = met_by(case)
    assert told == {line["id"]: case.sends if line["id"] in met else 1 for line in lines()}
    hits = faulty.hits(case.name)
    assert hits if not met else list(hits.values()) == [case.setting.tries or case.sends] * len(met)


def url_of(case: Case, faulty: FaultyServers) -> str:
    if case.name == "http_behind_https":
        return faulty.sound.url.replace("http://", "https://")
    url = faulty.urls[case.name]
    return url.replace("https://", "http://") if case.name == "tls_behind_http" else url


@pytest.mark.parametrize("name", ["status_401", "dies", "resets_from_now_on", "engine_ends"])
def test_what_ends_a_run_leaves_its_samples_to_a_second_server(
    name: str, servers: Callable[[str], FaultyServers], told: Callable[..., Told], tmp_path: Path
) -> None:
    write_prompts(tmp_path / "in.jsonl", lines())
    faulty = servers("vllm")
    run_it = arguments("vllm", faulty.urls[f"{name}_of_two"], faulty.sound.tokenizer_dir)
    code, stdout, stderr = told(*run_it, "--base-url", faulty.urls["sound"], "--out", "out.parquet")
    assert code == 0, stderr
    assert json.loads(stdout)["recorded"] == SAMPLES
    assert told(*arguments("vllm", faulty.urls["sound"], faulty.sound.tokenizer_dir), "--out", "sound.parquet")[0] == 0
    assert recorded_rows(tmp_path / "out.parquet") == recorded_rows(tmp_path / "sound.parquet")
    assert faulty.hits(f"{name}_of_two")


def test_a_server_that_answers_no_generation_ends_a_run_at_max_failures(
    servers: Callable[[str], FaultyServers], told: Callable[..., Told], tmp_path: Path
) -> None:
    write_prompts(tmp_path / "in.jsonl", lines())
    faulty = servers("vllm")
    run_it = arguments("vllm", faulty.urls["all_503_again"], faulty.sound.tokenizer_dir)
    code, stdout, stderr = told(*run_it, "--concurrency", 1, "--max-failures", 2, "--out", "out.parquet")
    assert (code, json.loads(stdout)["failed"], json.loads(stdout)["recorded"]) == (3, 2, 0)
    assert "2 samples have failed, as many as --max-failures allows" in stderr


@pytest.mark.parametrize("fault", ["never_answers_untimed", "drips_untimed"])
def test_without_a_time_limit_a_reply_is_waited_for_and_a_signal_ends_the_wait(
    fault: str, servers: Callable[[str], FaultyServers], tmp_path: Path
) -> None:
    write_prompts(tmp_path / "in.jsonl", lines())
    faulty, out = servers("vllm"), tmp_path / "out.parquet"
    options = arguments("vllm", faulty.urls[fault], faulty.sound.tokenizer_dir)[1:]
    with started_rollout(*options, "--out", out, cwd=tmp_path) as process:
        eventually(lambda: len(faulty.hits(fault)) == len(victims()), process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    rows = rows_so_far(out)
    assert {row["sample_id"] for row in rows} == {line["id"] for line in lines()} - victims()
    assert (json.loads(stdout)["recorded"], json.loads(stdout)["failed"]) == (SAMPLES - len(victims()), 0)
    assert "Traceback" not in stderr
    assert set(faulty.hits(fault).values()) == {1}


def test_a_certificate_that_ssl_cert_file_names_is_trusted(
    servers: Callable[[str], FaultyServers], tmp_path: Path
) -> None:
    write_prompts(tmp_path / "in.jsonl", lines())
    faulty = servers("vllm")
    options = arguments("vllm", faulty.urls["unknown_certificate"], faulty.sound.tokenizer_dir)[1:]
    done = rollout(*options, "--out", "out.parquet", cwd=tmp_path, SSL_CERT_FILE=str(CERTIFICATE))
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "out.parquet")) == SAMPLES * CHOICES


def test_the_table_has_kinds_enough_and_the_readme_shows_it() -> None:
    assert len({case.setting.fault for case in CASES}) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert readme_table() in (REPOSITORY / "README.md").read_text("utf-8")
