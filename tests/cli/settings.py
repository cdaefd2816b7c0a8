"""What the tests of `rollout`'s settings share: which there are, and a value for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from managed_cli.cli.rollout import rollout_command
from managed_cli.cli.rollout_settings import (
    INPUTS,
    setting_name,
    settings_of,
)

PARAMETERS = settings_of(rollout_command)
OPTIONS = [parameter for parameter in PARAMETERS if setting_name(parameter) != INPUTS]
by_name = pytest.mark.parametrize("option", OPTIONS, ids=setting_name)

SAMPLES: dict[str, Any] = {
    "server-type": "vllm",
    "base-url": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
    "api-key-env": "PATH",
    "input-format": "turns",
    "nonfinite": "keep",
    "on-bad-line": "skip",
    "history": "verbatim",
    "part": "2/3",
    "stop": ["a", "b c\n"],
    "stop-token-id": [3, 4],
    "top-p": 0.25,
    "min-p": 0.25,
}
"""A value other than the default for options that do not take any."""


def sample_of(option: click.Parameter) -> Any:  # Any: as TOML has it
    name = setting_name(option)
    if name in SAMPLES:
        return SAMPLES[name]
    if isinstance(option, click.Option) and option.is_flag:
        return True
    if isinstance(option.type, click.types.FloatParamType):
        return 2.5
    return 7 if isinstance(option.type, click.types.IntParamType) else f"some {name}"


def companions(option: click.Parameter) -> list[str]:
    """Other options without which this one is refused."""
    needed = {"base-url": ["--server-type", "vllm"], "part": ["--seed", "1"], "retry-failed": ["--resume"]}
    return needed.get(setting_name(option), [])


def write_toml(text: str, name: str = "run.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name
