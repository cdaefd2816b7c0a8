from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_cli.cli.app import run
from tests.cli.rollout_command import write_prompts
from tests.servers.process import RunningServer, running_server


@pytest.fixture(scope="session")
def vllm() -> Iterator[RunningServer]:
    """A vLLM server without faults; what it recorded is of many tests."""
    with running_server("vllm") as server:
        yield server


@pytest.fixture(scope="session")
def llamacpp() -> Iterator[RunningServer]:
    """A llama.cpp server without faults: its tokenizer is its own, so a run need not load one."""
    with running_server("llamacpp") as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three text prompts with ids."""
    return write_prompts(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": f"Count to {i}."} for i in range(3)])


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a key file in it, and no variable of ours but what the test sets."""
    for name in [name for name in os.environ if name.startswith("MANAGED_CLI_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("some api-key-file").write_text("k")
    Path("some api-key-file").chmod(0o600)


@pytest.fixture
def told(alone: None, capsys: pytest.CaptureFixture[str]) -> Any:  # Any: called as below
    """`rollout ARGUMENTS` in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["rollout", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def resolved(told: Any) -> Any:  # Any: called as below
    """What `--print-config` says: the values, and the comment behind each."""

    def call(*arguments: object) -> tuple[dict[str, Any], dict[str, str]]:
        code, out, err = told(*arguments, "--print-config")
        assert code == 0, err
        lines = [line.removeprefix("# ") for line in out.splitlines()]
        places = {line.partition(" = ")[0]: line.rpartition("  # ")[2] for line in lines}
        return tomllib.loads(out), places

    return call
