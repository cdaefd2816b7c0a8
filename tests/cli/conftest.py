from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
