"""`managed-cli doctor` as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.rollout_command import at, command, environment
from tests.cli.terminal import written_to_a_terminal
from tests.cli.test_rollout_output import HEAVY, loaded_modules
from tests.servers.process import running_server
from tests.servers.tokenizer import make_tokenizer_directory, shared_tokenizer_directory

COLUMNS = 80


def doctor(*arguments: object, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("doctor", *arguments), capture_output=True, text=True, check=False, cwd=cwd, env=environment(**changes)
    )


def test_a_right_server_is_told_line_by_line_and_ends_with_0(tmp_path: Path) -> None:
    with running_server("vllm", record=False) as server:
        done = doctor(*at(server), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"vllm at {server.url}"
    assert "ok       reachable          it answers" in lines
    assert "note     logprobs           raw: before temperature and filters (probed at two temperatures)" in lines
    assert lines[-1].startswith("recording is safe: ")
    after = lines[
        lines.index("note     logprobs           raw: before temperature and filters (probed at two temperatures)") + 1
    ]
    assert after.strip().startswith("→ ")


def test_a_wrong_server_ends_with_4_and_says_what_to_do(tmp_path: Path) -> None:
    with running_server("vllm", "--mutate", "wrong_tokenizer", record=False) as server:
        done = doctor(*at(server), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (4, "")
    assert "unsafe   tokenizer" in done.stdout
    assert "→ name the model's own tokenizer with --tokenizer" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("recording is NOT safe: ")


def test_json_is_one_document_that_says_the_same(tmp_path: Path) -> None:
    with running_server("sglang", record=False) as server:
        done = doctor(*at(server), "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["server_type"], document["safe"]) == ("sglang", True)
    assert {finding["level"] for finding in document["findings"]} <= {"ok", "note", "unknown"}
    assert all(set(finding) == {"check", "level", "said", "advice"} for finding in document["findings"])
    assert [finding["check"] for finding in document["findings"]][:3] == ["reachable", "server", "model"]


def test_a_tokenizer_alone_is_looked_at_without_a_server(tmp_path: Path) -> None:
    done = doctor("--tokenizer", shared_tokenizer_directory(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok       history: think     kept" in done.stdout
    assert "reachable" not in done.stdout


def test_a_tokenizer_that_does_not_load_ends_with_4(tmp_path: Path) -> None:
    done = doctor("--tokenizer", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: the tokenizer ")


def test_the_key_is_taken_from_the_environment_and_never_shown(tmp_path: Path) -> None:
    with running_server("vllm", "--api-key", "sesame-opens", record=False) as server:
        done = doctor(*at(server), "--api-key-env", "MY_KEY", cwd=tmp_path, MY_KEY="sesame-opens")
        locked = doctor(*at(server), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert locked.returncode == 4
    assert "--api-key-env" in locked.stdout
    assert "sesame" not in done.stdout + done.stderr + locked.stdout + locked.stderr


def test_text_of_a_server_cannot_reach_the_terminal_as_an_escape(tmp_path: Path) -> None:
    with running_server("vllm", "--served-model-name", "evil\x1b[2Jname", record=False) as server:
        done = doctor(*at(server), "--tokenizer", shared_tokenizer_directory(), cwd=tmp_path)
    assert "\x1b" not in done.stdout
    assert "evil\\x1b[2Jname" in done.stdout


def test_lines_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    directory = make_tokenizer_directory(tmp_path / "a directory with a name that is long enough to need a second line")
    shown = written_to_a_terminal(
        command("doctor", "--tokenizer", directory),
        environment(COLUMNS=str(COLUMNS), TERM="xterm-256color", NO_COLOR="1"),
    )
    body = shown.splitlines()[1:]  # the first line names the tokenizer, whole
    assert max(map(len, body)) <= COLUMNS
    assert any(line.startswith("ok       end of turn") for line in body)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing option '--server-type'"),
        (["--tokenizer", "x", "--base-url", "http://h"], 2, "--base-url belongs to --server-type"),
        (["--server-type", "local", "--base-url", "http://h"], 2, "the embedded engine has no address"),
        (["--server-type", "vllm", "--base-url", "nonsense"], 2, "is not an http:// or https:// address"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = doctor(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_modules("doctor", "--help") & set(HEAVY)
