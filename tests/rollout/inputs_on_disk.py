"""Inputs as files, and what is said about bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from managed_cli.errors import InputError
from managed_cli.rollout.tasks import InputOptions, Task, read_tasks, validate_input

WriteInput = Callable[..., Path]


def json_lines(records: Iterable[object]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def tasks_of(path: Path, **options: object) -> list[Task]:
    """The tasks, after the whole input has been checked, as a run does it."""
    chosen = InputOptions(**options)  # type: ignore[arg-type]  # tests pass options by name
    validate_input(path, chosen)
    return list(read_tasks(path, chosen))


def refusal(path: Path, **options: object) -> InputError:
    with pytest.raises(InputError) as caught:
        validate_input(path, InputOptions(**options))  # type: ignore[arg-type]  # as above
    return caught.value


def fault_of_line(path: Path, **options: object) -> str:
    """What is said about the only bad line, and that reading says the same."""
    error = refusal(path, **options)
    assert len(error.details) == 1, error.report()
    with pytest.raises(InputError) as caught:
        list(read_tasks(path, InputOptions(**options)))  # type: ignore[arg-type]  # as above
    assert caught.value.details == error.details
    return error.details[0].removeprefix(f"{path}:")
