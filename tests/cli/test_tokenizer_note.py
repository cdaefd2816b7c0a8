"""A tokenizer that had to be loaded otherwise than usual says so in the run facts."""

from types import SimpleNamespace
from typing import Any, cast

from managed_cli.cli.rollout_run import tokenizer_note


def server(kind: str, note: str | None) -> Any:  # Any: stands for a prepared Server
    return cast(Any, SimpleNamespace(config=SimpleNamespace(server_type=kind), tokenizer=SimpleNamespace(note=note)))


def test_the_note_of_a_tokenizer_is_told() -> None:
    assert tokenizer_note(server("vllm", "the file itself is used")) == "the file itself is used"


def test_a_usual_tokenizer_has_nothing_to_tell() -> None:
    assert tokenizer_note(server("vllm", None)) is None
    assert tokenizer_note(server("openai", "never asked")) is None
