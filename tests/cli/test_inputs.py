from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.rollout_command import environment
from tests.rollout.inputs_on_disk import json_lines
from tests.servers.tokenizer import shared_tokenizer_directory

RUN_SECONDS = 60.0
"""Bounds a hang; a run takes a second or two."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the command runs."""
    return tmp_path


def write(path: Path, *records: object) -> None:
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json_lines([r]) for r in records))


def inputs(*arguments: object, cwd: Path, stdin: bytes = b"", **changes: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "managed_cli", "inputs", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        check=False,
        cwd=cwd,
        env=environment(**changes),
        timeout=RUN_SECONDS,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def document(*arguments: object, cwd: Path, code: int = 0) -> dict[str, Any]:  # Any: JSON values
    done = inputs(*arguments, "--json", cwd=cwd)
    assert done.returncode == code, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)  # Any: as above
    return value


def test_a_mixture_is_shown_kind_by_kind(folder: Path) -> None:
    write(folder / "a.jsonl", {"prompt": "Name a fruit.", "topic": "food"}, {"prompt": "And another."})
    write(folder / "b.jsonl", {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]})
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "Hello!"}]]}), folder / "c.parquet")
    done = inputs("*.jsonl", "c.parquet", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert lines == [
        ["a.jsonl", "and", "2", "other", "files:", "4", "samples"],
        ["kind", "samples", "first", "at,", "and", "other", "fields"],
        ["prompt", "2", "a.jsonl:1"],
        ["Name", "a", "fruit."],
        ["kept:", "topic", "(1)"],
        ["sharegpt", "1", "b.jsonl:1"],
        ["Who?"],
        ["kept:", "dropped_turns"],
        ["messages", "1", "c.parquet:row", "1"],
        ["Hello!"],
    ]


def test_bad_lines_are_listed_and_the_exit_code_is_that_of_bad_input(folder: Path) -> None:
    write(folder / "a.jsonl", {"prompt": "good"}, b"no json\n", {"question": "q"}, *[{"prompt": i} for i in range(9)])
    done = inputs("a.jsonl", cwd=folder)
    assert done.returncode == 5
    assert "11 lines cannot be used\n  a.jsonl:2: invalid JSON at column 1: expecting value\n" in done.stdout
    assert "  … and 1 more\n  hint: `--prompt-field question` takes the prompt from `question`\n" in done.stdout
    assert done.stderr == "error: 11 of 12 samples in a.jsonl cannot be used\n"
    assert inputs("a.jsonl", "--on-bad-line", "skip", cwd=folder).returncode == 0


def test_a_script_gets_every_bad_line(folder: Path) -> None:
    write(
        folder / "a.jsonl",
        {"prompt": "good", "id": "x"},
        *[{"prompt": i} for i in range(30)],
        {"prompt": "b", "id": "x"},
    )
    shown = document("a.jsonl", cwd=folder, code=5)
    assert (shown["samples"], shown["bad_lines"], len(shown["first_bad_lines"])) == (32, 31, 31)
    assert shown["first_bad_lines"][-1]["error"] == '`id`: expected an id of its own, came "x", as in line 1'
    assert shown["first_bad_lines"][-1]["place"] == "a.jsonl:32"


def test_lengths_are_counted_with_the_tokenizer(folder: Path) -> None:
    write(folder / "a.jsonl", *[{"id": f"s{n}", "prompt": [7] * n} for n in range(1, 101)], {"turns": ["a", "b"]})
    options = ("--tokenizer", shared_tokenizer_directory(), "--context-length", 96)
    tokens = document("a.jsonl", *options, cwd=folder)["tokens"]
    assert (tokens["samples"], tokens["min"], tokens["max"], tokens["first_turns"]) == (101, 1, 100, 1)
    assert tokens["p95"] in (95, 96)
    assert (tokens["budget"], tokens["over_budget"]) == (96, 5)
    assert tokens["first_over_budget"][0] == {"sample_id": "s96", "source": "a.jsonl:96", "length": 96}
    assert sum(bin_["samples"] for bin_ in tokens["histogram"]) == 101
    text = inputs("a.jsonl", *options, cwd=folder).stdout
    assert "5 prompts without room for an answer in 96 tokens\n  a.jsonl:96: 96 tokens (sample s96)\n" in text
    assert "  of 1 conversation in turns only the first is counted\n" in text
    assert " 64 – 127  ████████████████████████████████████████ 37\n" in text


def test_a_budget_that_all_keep_to_is_said(folder: Path) -> None:
    write(folder / "a.jsonl", {"prompt": "short"})
    done = inputs("a.jsonl", "--tokenizer", shared_tokenizer_directory(), "--max-total-tokens", 512, cwd=folder)
    assert "  every prompt leaves room for an answer within 512 tokens\n" in done.stdout


def test_text_of_the_input_cannot_steer_the_terminal(folder: Path) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J [red]x[/red] \u202egnp.exe \x9b31m\nnext"
    write(folder / "a.jsonl", {"prompt": hostile, hostile: 1}, {"prompt": "b", "sampling": {hostile: 1}}, {hostile: 1})
    shown = inputs("a.jsonl", cwd=folder).stdout
    assert "[red]x[/red]" in shown
    assert shown.replace("\n", "").isprintable()


def test_options_change_how_lines_are_understood(folder: Path) -> None:
    conversation = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    write(folder / "a.jsonl", {"q": "p", "conversations": conversation, "uid": "u"})
    kinds = document("a.jsonl", "--input-format", "sharegpt", "--keep-last-assistant", cwd=folder)["kinds"]
    assert kinds["sharegpt"]["continued"] == 1
    assert kinds["sharegpt"]["fields"] == {"q": 1, "uid": 1}
    prompt = ("--input-format", "prompt", "--prompt-field", "q", "--id-field", "uid", "--limit", 1)
    assert document("a.jsonl", *prompt, cwd=folder)["kinds"]["prompt"]["fields"] == {"conversations": 1}


def test_stdin_can_be_looked_through(folder: Path) -> None:
    done = inputs("-", cwd=folder, stdin=b'{"prompt": "a"}\n')
    assert done.stdout.startswith("<stdin>: 1 sample\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument 'FILE...'"),
        (["a.jsonl", "--context-length", "5"], 2, "a number of tokens needs --tokenizer, which counts them"),
        (
            ["a.jsonl", "--context-length", "5", "--max-total-tokens", "5", "--tokenizer", "x"],
            2,
            "--max-total-tokens and --context-length cannot be given together",
        ),
        (["a.jsonl", "--prompt-field", "messages"], 2, "--prompt-field messages: `messages` has a meaning of its own"),
        (["a.jsonl", "--tokenizer", "./none"], 4, "the tokenizer './none' cannot be loaded here"),
        (["a.jsonl", "--system", "x"], 5, "a.jsonl:1: --system applies to chats only, and this line is a text prompt"),
        (["b.jsonl"], 5, "b.jsonl: there is no such file"),
        (["*.parquet"], 5, "*.parquet: no file matches"),
        (["empty.jsonl"], 5, "empty.jsonl holds no samples"),
    ],
)
def test_what_cannot_be_meant_or_read_is_told(folder: Path, arguments: list[str], code: int, message: str) -> None:
    write(folder / "a.jsonl", {"prompt": "a"})
    write(folder / "empty.jsonl")
    done = inputs(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_looking_without_a_tokenizer_imports_none(folder: Path) -> None:
    write(folder / "a.jsonl", {"prompt": "a"})
    program = (
        "import sys; from managed_cli.cli.app import run; assert run(['inputs', 'a.jsonl']) == 0; "
        "print(sorted({'transformers', 'tokenizers', 'torch', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder, env=environment()
    )
    assert done.stdout.splitlines()[-1] == "[]"
