"""A file of settings is checked as a whole: a slip in it is told with its name and its key or line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from managed_cli.cli.rollout_settings import (
    setting_name,
    toml_value,
)
from tests.cli.settings import by_name, companions, sample_of, write_toml
from tests.servers.process import REPOSITORY


@by_name
@pytest.mark.parametrize("dash", ["-", "_"])
@pytest.mark.parametrize("table", ["", "[rollout]\n"])
def test_every_option_can_stand_in_a_file(option: click.Parameter, dash: str, table: str, resolved: Any) -> None:
    name = setting_name(option)
    write_toml(f"{table}{name.replace('-', dash)} = {toml_value(sample_of(option))}\n")
    values, places = resolved("--config", "run.toml", *companions(option))
    assert (values[name], places[name]) == (sample_of(option), "run.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-tokns = 1", ["`max-tokns` in run.toml is no setting", "did you mean `max-tokens`?"]),
        ("wholly-else = 1", ["`wholly-else` in run.toml is no setting", "--print-config"]),
        ("[rollout]\nmax-tokns = 1", ["`max-tokns` in run.toml", "`max-tokens`"]),
        ("seed = 1\n[rollout]\nn = 1", ["`seed` in run.toml stands outside of the table [rollout]"]),
        ("max-tokens = 1\nmax_tokens = 2", ["`max_tokens` in run.toml is there twice"]),
        ('n = "4"', ["`n` in run.toml: expected an integer, came a string"]),
        ("n = true", ["`n` in run.toml: expected an integer, came true or false"]),
        ("n = 4.0", ["`n` in run.toml: expected an integer, came a number"]),
        ("n = 0", ["`n` in run.toml: 0 is not in the range x>=1"]),
        ("temperature = [1]", ["`temperature` in run.toml: expected a number, came a list"]),
        ("temperature = -1", ["`temperature` in run.toml: -1.0 is not in the range x>=0"]),
        ("temperature = nan", ["temperature is nan", "--temperature is set by run.toml"]),
        ("model = 2024-01-01", ["`model` in run.toml: expected a string, came a date"]),
        ("stop = [1]", ["`stop` in run.toml: expected a string or a list of them, came a list"]),
        ("stop-token-id = 'a'", ["`stop-token-id` in run.toml: expected an integer or a list of them, came a string"]),
        ("quiet = 1", ["`quiet` in run.toml: expected true or false, came an integer"]),
        ("server-type = 'vlm'", ["`server-type` in run.toml: 'vlm' is not one of"]),
        ("inputs = [1]", ["`inputs` in run.toml: expected a string or a list of them"]),
        ("top-p = 1.5", ["top_p is 1.5", "--top-p is set by run.toml"]),
        ("n = 2\ntemperature = 0", ["-n is set by run.toml", "--temperature is set by run.toml"]),
        ("dry-run = true", ["`dry-run` in run.toml", "--dry-run belongs on the command line"]),
        ("n = 1\nx = \n", ["run.toml is not valid TOML", "line 2"]),
        ("n = 1\nstop = [\n", ["run.toml is not valid TOML", "line 2, the end of the file"]),
        ("n = 1\nn = 2\n", ["run.toml is not valid TOML", "line 2"]),
        ("[[[[", ["run.toml is not valid TOML"]),
        ("'a\tb' = 1", ["`a b` in run.toml is no setting"]),
    ],
)
def test_a_wrong_file_is_told_with_its_name_and_the_key_or_line(text: str, expected: Sequence[str], told: Any) -> None:
    write_toml(text)
    for arguments in (["--print-config"], ["in.jsonl"]):
        code, out, err = told("--config", "run.toml", *arguments)
        assert (code, out) == (2, "")
        assert err.count("error: ") == 1
        for part in expected:
            assert part in err


@pytest.mark.parametrize("key", ["api-key", "api_key", "apikey", "API_KEY", "token", "password", "openai-api-key"])
def test_a_key_in_a_file_is_refused_and_not_shown(key: str, told: Any) -> None:
    write_toml(f'{key} = "sk-never-shown"')
    code, out, err = told("--config", "run.toml", "--print-config")
    assert (code, out) == (2, "")
    assert "a key does not belong in a settings file" in err
    assert "api-key-env" in err
    assert "never-shown" not in err


def test_a_file_that_cannot_be_read_is_told(told: Any) -> None:
    Path("directory").mkdir()
    Path("latin.toml").write_bytes(b'n = 1\nmodel = "\xe9"\n')
    assert "--config no-such.toml: No such file" in told("--config", "no-such.toml", "--print-config")[2]
    assert "--config directory: Is a directory" in told("--config", "directory", "--print-config")[2]
    assert "latin.toml is not valid TOML: line 2 is not UTF-8" in told("--config", "latin.toml", "--print-config")[2]
    assert told("--config", "no-such.toml", "in.jsonl")[0] == 2


def test_a_file_with_a_byte_order_mark_is_read(resolved: Any) -> None:
    Path("run.toml").write_bytes(b"\xef\xbb\xbfn = 3\r\n")
    assert resolved("--config", "run.toml")[0]["n"] == 3


def test_a_flag_takes_the_place_of_a_list_as_a_whole(resolved: Any) -> None:
    write_toml('stop = ["a", "b"]\ninputs = ["a.jsonl"]')
    values, places = resolved("c.jsonl", "--config", "run.toml", "--stop", "c")
    assert (values["stop"], values["inputs"]) == (["c"], ["c.jsonl"])
    assert (places["stop"], places["inputs"]) == ("--stop", "INPUT")


def test_without_inputs_a_run_is_refused(told: Any) -> None:
    write_toml("n = 1")
    code, _, err = told("--config", "run.toml")
    assert code == 2
    assert "Missing argument 'INPUT...'" in err


def test_the_example_file_is_one(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    values, places = resolved("--config", "examples/run.toml")
    assert places["n"] == "examples/run.toml"
    assert all(Path(name).exists() for name in values["inputs"])
