"""A row of a chat says which messages were sent, so that an export holds the conversation without guessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from managed_cli.export.export import export_recording
from managed_cli.export.formats import formats
from managed_cli.tokenizers import load_tokenizer
from tests.cli.rollout_command import at, rollout, rows_of, write_prompts
from tests.servers.process import running_server
from tests.servers.tokenizer import shared_tokenizer_directory

Message = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER: Message = {"role": "user", "content": "Name a fruit."}
LINES = [
    {"id": "chat", "messages": [{"role": "system", "content": "Be brief."}, USER]},
    {"id": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tools": TOOLS},
    {"id": "continued", "messages": [USER, {"role": "assistant", "content": "A ripe"}]},
    {"id": "turns", "turns": ["Name a fruit.", "Another one."], "system": "Be brief."},
    {"id": "text", "prompt": "Once upon a time"},
]
CHOICES = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`out.parquet`, recorded from `LINES`."""
    folder = tmp_path_factory.mktemp("chats")
    write_prompts(folder / "prompts.jsonl", LINES)
    with running_server("vllm", record=False) as server:
        done = rollout("prompts.jsonl", *at(server), "-n", CHOICES, "--max-tokens", 12, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def exported(directory: Path) -> list[dict[str, Any]]:
    """The lines of `--to hf`."""
    out = directory / "out.jsonl"
    export_recording(str(directory / "out.parquet"), str(out), formats()["hf"])
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def test_the_messages_of_a_row_are_those_whose_rendering_was_sent(directory: Path) -> None:
    tokenizer = load_tokenizer(str(shared_tokenizer_directory()))
    chats = [row for row in rows_of(directory / "out.parquet") if row["sample_id"] != "text"]
    assert len(chats) == CHOICES * (len(LINES) - 1)
    for row in chats:
        messages, tools = row["metadata"]["messages"], row["metadata"].get("tools")
        sent = row["tokens"][: row["metadata"]["turns"][-1]["start"]]
        if row["sample_id"] != "continued":  # what the template closes, and the recorder opens again
            assert tokenizer.decode(sent) == tokenizer.render_chat(messages, tools=tools)
        else:
            assert tokenizer.decode(sent).endswith("A ripe")
    by_sample = {row["sample_id"]: row["metadata"] for row in chats}
    assert by_sample["chat"]["messages"] == LINES[0]["messages"]
    assert by_sample["parts"]["tools"] == TOOLS
    assert "tools" not in by_sample["chat"]


def test_a_text_prompt_has_no_messages(directory: Path, exported: list[dict[str, Any]]) -> None:
    rows = [row for row in rows_of(directory / "out.parquet") if row["sample_id"] == "text"]
    assert ["messages" in row["metadata"] for row in rows] == [False] * CHOICES
    assert [line["messages"] for line in exported if line["sample_id"] == "text"] == [None] * CHOICES


def test_an_exported_conversation_is_what_was_sent_and_then_the_answer(
    directory: Path, exported: list[dict[str, Any]]
) -> None:
    texts = {
        (row["sample_id"], row["choice_index"]): [turn["text"] for turn in row["metadata"]["turns"]]
        for row in rows_of(directory / "out.parquet")
    }
    found = {(line["sample_id"], line["choice_index"]): line for line in exported}
    assert found.keys() == texts.keys()
    for choice in range(CHOICES):
        answer = {name: texts[name, choice][-1] for name in ("chat", "parts", "continued", "turns")}
        said = {name: {"role": "assistant", "content": answer[name]} for name in answer}
        system: Message = {"role": "system", "content": "Be brief."}
        assert found["chat", choice]["messages"] == [system, USER, said["chat"]]
        assert found["parts", choice]["messages"] == [{"role": "user", "content": "Hi"}, said["parts"]]
        assert json.loads(found["parts", choice]["tools"]) == TOOLS
        continued = {"role": "assistant", "content": "A ripe" + answer["continued"]}
        assert found["continued", choice]["messages"] == [USER, continued]
        first = {"role": "assistant", "content": texts["turns", choice][0]}
        again = {"role": "user", "content": "Another one."}
        assert found["turns", choice]["messages"] == [system, USER, first, again, said["turns"]]


def test_in_a_tree_each_node_has_the_messages_of_its_own_turn(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", [{"id": "s", "turns": ["One?", "Two?"]}])
    with running_server("vllm", record=False) as server:
        options = ("--track-tree", "-n", 1, "--max-tokens", 8)
        done = rollout("prompts.jsonl", *at(server), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(rows_of(tmp_path / "out.parquet"), key=lambda row: len(row["metadata"]["messages"]))
    asked = [{"role": "user", "content": "One?"}]
    assert first["metadata"]["messages"] == asked
    answer = {"role": "assistant", "content": first["metadata"]["turns"][-1]["text"]}
    assert second["metadata"]["messages"] == [*asked, answer, {"role": "user", "content": "Two?"}]
