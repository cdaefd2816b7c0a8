"""Settings come from flags, variables, a file and defaults, in this order; a slip in any of them is told, not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from managed_cli.cli.rollout import rollout_command
from managed_cli.cli.rollout_settings import (
    COMMAND_LINE_ONLY,
    flag_name,
    setting_name,
    variable_name,
)
from tests.cli.rollout_command import at, rollout, rows_of, sent_to, write_prompts
from tests.cli.settings import OPTIONS, PARAMETERS, by_name, companions, sample_of, write_toml
from tests.servers.process import running_server


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "max-tokens" in resolved()[0]
    assert resolved()[1]["max-tokens"] == "default"
    write_toml("max-tokens = 10")
    values, places = resolved("--config", "run.toml")
    assert (values["max-tokens"], places["max-tokens"]) == (10, "run.toml")
    monkeypatch.setenv("MANAGED_CLI_MAX_TOKENS", "20")
    values, places = resolved("--config", "run.toml")
    assert (values["max-tokens"], places["max-tokens"]) == (20, "MANAGED_CLI_MAX_TOKENS")
    values, places = resolved("--config", "run.toml", "--max-tokens", 30)
    assert (values["max-tokens"], places["max-tokens"]) == (30, "--max-tokens")


@by_name
def test_every_option_has_a_variable(option: click.Parameter, resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = sample_of(option)
    text = json.dumps(value) if not isinstance(value, str) else value
    monkeypatch.setenv(variable_name(option), text)
    values, places = resolved(*companions(option))
    name = setting_name(option)
    assert (values[name], places[name]) == (value, variable_name(option))


def test_every_option_but_those_of_one_look_is_a_setting() -> None:
    options = {setting_name(parameter) for parameter in rollout_command.params}
    assert options - {setting_name(parameter) for parameter in PARAMETERS} == COMMAND_LINE_ONLY - {"help"}


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MAX_TOKENS", "many", "MANAGED_CLI_MAX_TOKENS: 'many' is not a valid integer"),
        ("MAX_TOKENS", "0", "MANAGED_CLI_MAX_TOKENS: 0 is not in the range x>=1"),
        ("TEMPERATURE", "warm", "MANAGED_CLI_TEMPERATURE: 'warm' is not a valid float"),
        ("SERVER_TYPE", "vlm", "MANAGED_CLI_SERVER_TYPE: 'vlm' is not one of"),
        ("QUIET", "maybe", "MANAGED_CLI_QUIET: 'maybe' is not a valid boolean"),
        ("STOP", '["a", ', "MANAGED_CLI_STOP: expected a JSON list"),
        ("STOP", "[1]", "MANAGED_CLI_STOP: expected a JSON list"),
        ("STOP_TOKEN_ID", "1 2", "MANAGED_CLI_STOP_TOKEN_ID: '1 2' is not a valid integer"),
        ("STOP_TOKEN_ID", "[1, true]", "MANAGED_CLI_STOP_TOKEN_ID: expected a JSON list as in [1, 2]"),
        ("TOP_P", "7", "MANAGED_CLI_TOP_P"),
        ("PART", "9/3", "MANAGED_CLI_PART"),
        ("PROMPT_FIELD", "messages", "MANAGED_CLI_PROMPT_FIELD"),
        ("BASE_URL", "http://a:1", "MANAGED_CLI_BASE_URL"),
        ("CONFIG", "no-such.toml", "MANAGED_CLI_CONFIG no-such.toml: No such file"),
    ],
)
def test_a_wrong_value_is_told_with_its_variable(
    variable: str, value: str, expected: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MANAGED_CLI_{variable}", value)
    for arguments in (["--seed", 1, "--print-config"], ["in.jsonl", "--seed", 1]):
        code, out, err = told(*arguments)
        assert (code, out) == (2, "")
        assert expected in err
        assert err.count("error: ") == 1


@pytest.mark.parametrize(
    ("variable", "text", "values"),
    [
        ("stop", "a b", ["a b"]),
        ("stop", "\n", ["\n"]),
        ("stop", "[INST]", ["[INST]"]),
        ("stop", '["[INST]", " "]', ["[INST]", " "]),
        ("stop", '"quoted"', ['"quoted"']),
        ("stop-token-id", "7", [7]),
        ("stop-token-id", "[7, 8]", [7, 8]),
        ("base-url", " http://a:1\nhttp://b:2 ", ["http://a:1", "http://b:2"]),
        ("base-url", '["http://a:1"]', ["http://a:1"]),
        ("system", "  kept as it is\n", "  kept as it is\n"),
    ],
)
def test_a_variable_holds_one_value_or_a_json_list(
    variable: str, text: str, values: object, resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MANAGED_CLI_{variable.replace('-', '_').upper()}", text)
    assert resolved("--server-type", "vllm")[0][variable] == values


@pytest.mark.parametrize(
    ("word", "means"), [("1", True), ("true", True), ("YES", True), ("0", False), ("false", False), ("no", False)]
)
def test_a_flag_is_set_by_yes_and_unset_by_no(
    word: str, means: bool, resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_toml("quiet = true")
    monkeypatch.setenv("MANAGED_CLI_QUIET", word)
    assert resolved("--config", "run.toml")[0]["quiet"] is means


def test_an_empty_variable_is_none(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(variable_name(option), "")
    monkeypatch.setenv("MANAGED_CLI_CONFIG", "")
    assert all(place.startswith("default") for place in resolved()[1].values())


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MANAGED_CLI_MAX_TOKNS", "MANAGED_CLI_MAX_TOKENS"),
        ("MANAGED_CLI_TEMPERATURES", "MANAGED_CLI_TEMPERATURE"),
        ("MANAGED_CLI_top_p", "MANAGED_CLI_TOP_P"),
        ("MANAGED_CLI_config", "MANAGED_CLI_CONFIG"),
        ("MANAGED_CLI_CONFG", "MANAGED_CLI_CONFIG"),
        ("MANAGED_CLI_API_KEY", "MANAGED_CLI_API_KEY_ENV"),
        ("MANAGED_CLI_DRY_RUN", "--dry-run belongs on the command line"),
    ],
)
def test_a_variable_that_is_almost_known_is_warned_of_in_one_line(
    variable: str, meant: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sk-never-shown")
    code, _, err = told("--print-config")
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith(f"warning: the environment variable {variable} is not used; ")
    assert meant in line
    assert "sk-never-shown" not in err


def test_other_variables_of_the_prefix_are_ignored(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REAL_ALL", "SERVER_LOGS", "TEST_VENV", "SERVERS_VENV", "CONVERSATIONS", "HOME"):
        monkeypatch.setenv(f"MANAGED_CLI_{name}", "x")
    assert told("--print-config")[2] == ""


def test_the_places_of_a_key_are_one_setting(resolved: Any, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml("api-key-env = 'PATH'")
    values, places = resolved("--config", "run.toml", "--api-key-file", "some api-key-file")
    assert (values["api-key-file"], places["api-key-env"]) == ("some api-key-file", "default: not set")
    monkeypatch.setenv("MANAGED_CLI_API_KEY_FILE", "some api-key-file")
    assert resolved("--config", "run.toml")[1]["api-key-file"] == "MANAGED_CLI_API_KEY_FILE"
    write_toml("api-key-env = 'PATH'\napi-key-file = 'some api-key-file'", "both.toml")
    monkeypatch.delenv("MANAGED_CLI_API_KEY_FILE")
    code, _, err = told("--config", "both.toml", "--print-config")
    assert code == 2
    assert "--api-key-env is set by both.toml\n  --api-key-file is set by both.toml" in err


def test_a_run_sends_what_was_resolved(alone: None, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Count."}])
    with running_server("vllm") as server:
        write_toml(
            f'inputs = "in.jsonl"\nmax-tokens = 9\ntemperature = 0.5\nn = 2\nstop = ["\\n\\n", "é"]\n'
            f'server-type = "vllm"\nbase-url = "{server.url}"\nquiet = true\nout = "rows.parquet"\n'
        )
        variables = {"MANAGED_CLI_CONFIG": "run.toml", "MANAGED_CLI_MAX_TOKENS": "5", "MANAGED_CLI_TOP_P": "0.75"}
        done = rollout("--max-tokens", 3, cwd=tmp_path, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        (sent,) = sent_to(server)
    body = sent["body"]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["n"]) == (3, 0.5, 0.75, 2)
    assert body["stop"] == ["\n\n", "é"]
    assert len(rows_of(tmp_path / "rows.parquet")) == 2


def test_help_says_where_settings_come_from(told: Any) -> None:
    _, out, _ = told("--help")
    shown = " ".join(out.split())
    assert "MANAGED_CLI_MAX_TOKENS" in shown
    assert "flag, environment, file, default" in shown
    run_section = out.partition("\nRun:\n")[2]
    assert "--config FILE" in run_section
    assert "--print-config" in run_section


def test_help_looks_at_neither_variables_nor_files(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANAGED_CLI_CONFIG", "no-such.toml")
    monkeypatch.setenv("MANAGED_CLI_MAX_TOKENS", "many")
    code, _, err = told("--help")
    assert (code, err) == (0, "")


def test_settings_are_named_after_their_options() -> None:
    assert [variable_name(option) for option in OPTIONS if flag_name(option) == "-n"] == ["MANAGED_CLI_N"]
    assert all(variable_name(option)[12:].lower().replace("_", "-") == setting_name(option) for option in OPTIONS)


def test_an_unreachable_server_is_no_fault_of_a_setting(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with running_server("vllm", "--api-key", "secret") as server:
        done = rollout("in.jsonl", *at(server), cwd=tmp_path, MANAGED_CLI_MODEL="some")
    assert done.returncode == 4
    assert "is set by" not in done.stderr
