"""`--print-config` shows what holds and from where, as a file that means the same; nothing is run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.cli.rollout_settings import (
    setting_name,
    toml_value,
)
from tests.cli.rollout_command import write_prompts
from tests.cli.settings import PARAMETERS, write_toml
from tests.servers.process import REPOSITORY

HOSTILE = '\x00\x1b[31m\x7f\x9f\u2028\u202e\U0001f600\U000e0001"\\\n\t\'\'\'""" # no comment'


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_reads_back_from_toml_as_it_was(text: str) -> None:
    line = f"x = {toml_value(text)}"
    assert tomllib.loads(line) == {"x": text}
    assert line.isprintable()


@given(st.one_of(st.floats(allow_nan=False), st.integers(), st.booleans(), st.lists(st.text("ab\n\\\"'#", max_size=3))))
def test_any_value_reads_back_from_toml_as_it_was(value: object) -> None:
    read = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert (read, type(read)) == (value, type(value))


def without_places(text: str) -> list[str]:
    return [line.rpartition("  # ")[0] for line in text.splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.jsonl", "b c.jsonl", "-n", "3", "--temperature", "0.1", "--seed", "0", "--quiet"],
        ["--stop", HOSTILE.replace("\0", ""), "--stop", "[INST]", "--system", HOSTILE[1:], "--stop-token-id", "1"],
        ["--server-type", "vllm", "--base-url", "http://a:1/v1", "--base-url", "http://b:2", "--grace", "1e-7"],
        ["--api-key-env", "PATH", "--request-timeout", "1e300", "--part", "1/2", "--seed", "9", "--resume"],
    ],
    ids=["defaults", "inputs", "hostile", "urls", "others"],
)
def test_what_is_printed_is_a_file_that_means_the_same(arguments: list[str], told: Any) -> None:
    code, first, err = told(*arguments, "--print-config")
    assert code == 0, err
    write_toml(first, "printed.toml")
    code, second, err = told("--config", "printed.toml", "--print-config")
    assert (code, without_places(second)) == (0, without_places(first)), err
    assert {line.rpartition("  # ")[2] for line in second.splitlines() if not line.startswith("#")} == {"printed.toml"}


def test_every_setting_is_printed_and_what_is_not_set_is_a_comment(told: Any) -> None:
    _, out, _ = told("--print-config")
    names = [line.removeprefix("# ").partition(" = ")[0] for line in out.splitlines()]
    assert names == [setting_name(parameter) for parameter in PARAMETERS]
    assert "# seed = SEED  # default: drawn for each run" in out.splitlines()
    assert '# model = "NAME"  # default: not set' in out.splitlines()
    tomllib.loads("\n".join(line.removeprefix("# ") for line in out.splitlines() if '"' in line))


def test_printing_reads_no_input_and_asks_no_server(told: Any, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    code, out, err = told(
        "no-such.jsonl", "--server-type", "vllm", "--base-url", "http://127.0.0.1:9", "--print-config"
    )
    assert (code, err, set(tmp_path.iterdir())) == (0, "", before)
    assert 'inputs = ["no-such.jsonl"]  # INPUT' in out.splitlines()


@pytest.mark.parametrize(
    "options",
    [
        ["--top-p", "1.5"],
        ["-n", "2", "--temperature", "0"],
        ["--part", "3/2", "--seed", "1"],
        ["--part", "1/2"],
        ["--base-url", "http://127.0.0.1:1"],
        ["--server-type", "vllm", "--base-url", "nonsense"],
        ["--server-type", "vllm", *["--base-url", "http://127.0.0.1:1"] * 2],
        ["--overwrite", "--resume"],
        ["--retry-failed"],
        ["--prompt-field", "messages"],
        ["--api-key-env", "NO_SUCH_VARIABLE"],
        ["--api-key-env", "PATH", "--api-key-file", "some api-key-file"],
        ["--server-type", "openai"],
    ],
    ids=" ".join,
)
def test_printing_refuses_what_a_run_refuses(options: list[str], told: Any) -> None:
    write_prompts(Path("in.jsonl"), [{"prompt": "x"}])
    printed, ran = told("in.jsonl", *options, "--print-config"), told("in.jsonl", *options)
    assert printed[0] == 2
    assert printed == ran


def test_the_readme_shows_what_is_printed(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("MANAGED_CLI_TOP_P", "0.9")
    _, out, _ = told("--config", "examples/run.toml", "-n", 4, "--print-config")
    shown = "\n".join(line for line in out.splitlines() if "default" not in line)
    assert f"-n 4 --print-config | grep -v default\n{shown}\n```" in Path("README.md").read_text(encoding="utf-8")
