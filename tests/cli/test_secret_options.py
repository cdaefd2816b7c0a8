"""A key that cannot be sent, and a password in an address, are refused, and the refusal does not show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from managed_cli.backends._http import normalised_base_url
from managed_cli.cli.app import run
from managed_cli.errors import ConfigError
from managed_cli.managed.config import APIServerConfig
from tests.cli.rollout_command import (
    at,
    many_rollouts,
    write_prompts,
)
from tests.cli.secret_key import (
    BY_ENVIRONMENT,
    CORE,
    FROM_ENVIRONMENT,
    KEY,
    key_file,
    leaks_in,
    lines,
)
from tests.servers.process import running_server


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What is said of `rollout OPTIONS`, which is refused as usage, in this process."""
    write_prompts(tmp_path / "in.jsonl", lines(1))
    monkeypatch.chdir(tmp_path)

    def call(*options: object) -> str:
        said = []
        for more in ([], ["--print-config"], ["--dry-run"]):
            code = run(["rollout", "in.jsonl", "--server-type", "vllm", *map(str, options), *more])
            out, err = capsys.readouterr()
            assert (code, out) == (2, ""), err
            assert "Traceback" not in err
            assert not leaks_in(err.encode()), err
            said.append(err)
        assert said[0] == said[1] == said[2]
        return said[0]

    return call


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (f"{CORE}\x1b", "a character that no HTTP header can carry"),
        (f"{CORE}\x00x", "a character that no HTTP header can carry"),
        (f"{CORE}é", "a character that no HTTP header can carry"),
        (f"{CORE}ключ", "a character that no HTTP header can carry"),
        (f"{CORE}\n{CORE}\n", "there are several lines"),
        (" \n", "there is none"),
        ("", "there is none"),
        (CORE * 2000, "the file is longer than 16,384 bytes"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_unseen(
    key: str, complaint: str, tmp_path: Path, refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complaint in refusal("--api-key-file", key_file(tmp_path, key))
    if "\0" not in key and len(key) < 100:
        monkeypatch.setenv("SERVER_KEY", key)
        expected = complaint if key else "SERVER_KEY: that environment variable is not set"
        assert expected in refusal(*FROM_ENVIRONMENT)


def test_a_key_in_the_place_of_its_name_is_not_shown(refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--api-key-env" in refusal("--api-key-env", KEY)
    assert "--api-key-env" in refusal("--api-key-env", CORE)
    assert "--api-key-file" in refusal("--api-key-file", KEY)
    monkeypatch.setenv("MANAGED_CLI_API_KEY_ENV", KEY)
    assert "--api-key-env is set by MANAGED_CLI_API_KEY_ENV" in refusal()


def test_a_key_in_a_settings_file_is_refused_unseen(refusal: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"api-key = '{KEY}'")
    assert "a key does not belong in a settings file" in refusal("--config", "run.toml")
    (tmp_path / "run.toml").write_text(f"n = '{KEY}'")
    assert "expected an integer" in refusal("--config", "run.toml")


def test_two_places_of_a_key_are_refused(refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    said = refusal(*FROM_ENVIRONMENT, "--api-key-file", key_file(tmp_path))
    assert "--api-key-env and --api-key-file cannot be given together" in said


def test_a_key_file_that_is_none_is_told(refusal: Any, tmp_path: Path) -> None:
    assert "there is no file of that name" in refusal("--api-key-file", "no-such-file")
    assert "--api-key-file .: Is a directory" in refusal("--api-key-file", ".")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_may_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = key_file(tmp_path, mode=mode)
    assert run(["rollout", "--server-type", "vllm", "--api-key-file", str(path), "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert ("can be read by other users" in err) == warned
    assert str(path) in out
    assert not leaks_in((out + err).encode())


def test_white_space_around_a_key_is_no_part_of_it(tmp_path: Path) -> None:
    source, secret = write_prompts(tmp_path / "in.jsonl", lines(1)), key_file(tmp_path, f"\t{KEY} \r\n\n")
    with running_server("llamacpp", "--api-key", KEY, record=False) as server:
        options = [source, *at(server), "--max-tokens", 1, "--overwrite"]
        runs = [[*options, "--api-key-file", secret], [*options, *FROM_ENVIRONMENT]]
        done = many_rollouts(runs, cwd=tmp_path, **{**BY_ENVIRONMENT, "SERVER_KEY": f" {KEY}\n"})
    assert [each.returncode for each in done] == [0, 0], done


ADDRESSES_WITH_A_SECRET = [
    f"http://user:{CORE}@127.0.0.1:8000",
    f"http://{CORE}@127.0.0.1",
    f"http://user:{CORE}/x@127.0.0.1",
    f"user:{CORE}@127.0.0.1:8000",
    f"http://user:{CORE}%40127.0.0.1",
    f"http://user:{CORE}＠127.0.0.1",
    f"ftp://user:{CORE}@[::1",
    f"http://127.0.0.1:8000/v1?key={CORE}",
    f"http://127.0.0.1:8000#{CORE}",
]
each_address = pytest.mark.parametrize("url", ADDRESSES_WITH_A_SECRET)


@each_address
def test_a_password_in_an_address_is_refused_unseen(url: str, refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--api-key-env VAR or --api-key-file FILE" in refusal("--base-url", url)
    refusal("--base-url", url, "--base-url", url)
    refusal("--server-type", "local", "--base-url", url)
    monkeypatch.setenv("MANAGED_CLI_BASE_URL", url)
    assert "--base-url is set by MANAGED_CLI_BASE_URL" in refusal()


@each_address
def test_the_python_api_refuses_a_password_in_an_address_unseen(url: str) -> None:
    for make in (normalised_base_url, lambda given: APIServerConfig(server_type="vllm", base_url=given)):
        with pytest.raises(ConfigError) as caught:
            make(url)
        assert CORE not in caught.value.report()


def test_the_python_api_takes_a_key_as_the_command_line_does() -> None:
    for key in (f"{CORE}\n{CORE}", f"{CORE}é"):
        with pytest.raises(ConfigError) as caught:
            APIServerConfig(server_type="vllm", api_key=key)  # type: ignore[arg-type] # pydantic makes it a secret
        assert CORE not in caught.value.report()
    config = APIServerConfig(server_type="vllm", api_key=f" {KEY}\n")  # type: ignore[arg-type] # as above
    assert config.backend_config().api_key == KEY
    assert not leaks_in(f"{config!r} {config} {config.backend_config()!r} {config.model_dump_json()}".encode())
    assert APIServerConfig(server_type="vllm", api_key="").api_key is None  # type: ignore[arg-type] # as above
