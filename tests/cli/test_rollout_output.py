"""What a run shows, and where: data on stdout, the rest on stderr; and how little it loads to say how it is used."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from managed_cli.backends.embedded import DEFAULT_SLOTS
from managed_cli.rollout.config import DEFAULT_CONCURRENCY
from tests.cli.rollout_command import (
    RUN_SECONDS,
    at,
    command,
    environment,
    rollout,
    rows_of,
    sent_to,
    write_prompts,
)
from tests.cli.terminal import all_written_to
from tests.servers.process import RunningServer, running_server

HELP_SECONDS = 0.25
HELP_TRIES = 7
"""The best of several says what the program costs; the others what else the machine was doing."""

HEAVY = ("transformers", "torch", "pyarrow", "pydantic", "httpx", "aiohttp", "rich")
HELPS = [["--help"], ["rollout", "--help"], ["inspect", "--help"], ["verify", "--help"], ["logprobs", "--help"]]


def loaded_modules(*arguments: object) -> set[str]:
    """The packages that a command has loaded when it ends."""
    program = (
        "import sys\n"
        "from managed_cli.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "print('\\n@', code, *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    code, *names = done.stdout.rpartition("\n@ ")[2].split()
    assert code == "0", done.stderr
    return set(names)


def best_seconds(*arguments: str) -> float:
    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run(command(*arguments), check=True, capture_output=True, env=environment())
        return time.perf_counter() - started

    return min(seconds() for _ in range(HELP_TRIES))


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_is_there_before_one_looks_up(arguments: list[str]) -> None:
    assert best_seconds(*arguments) <= HELP_SECONDS


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    assert not loaded_modules(*arguments) & set(HEAVY)


def test_help_of_rollout_lists_every_option_once_under_a_heading() -> None:
    done = subprocess.run(command("rollout", "--help"), capture_output=True, text=True, check=True, env=environment())
    headings = re.findall(r"^(\w+):$", done.stdout, re.MULTILINE)
    assert headings == ["Output", "Server", "Sampling", "Input", "Run"]
    options = re.findall(r"^  (-[-\w]+)", done.stdout, re.MULTILINE)
    assert len(options) == len(set(options))
    assert f"(default: {DEFAULT_CONCURRENCY} per server; local: {DEFAULT_SLOTS})" in " ".join(done.stdout.split())
    assert {"--out", "--server-type", "-n", "--seed", "--limit", "--dry-run", "-h"} <= set(options)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, llamacpp: RunningServer) -> Path:
    directory = tmp_path_factory.mktemp("recording")
    source = write_prompts(directory / "in.jsonl", [{"prompt": "Hello"}])
    assert rollout(source, *at(llamacpp), "--max-tokens", 4, "--out", "out.parquet", cwd=directory).returncode == 0
    return directory / "out.parquet"


@pytest.mark.parametrize("options", [[], ["--row", "0"], ["--check"]], ids=" ".join)
def test_inspect_loads_neither_transformers_nor_torch(recording: Path, options: list[str]) -> None:
    assert not loaded_modules("inspect", recording, *options) & {"transformers", "torch"}


def test_arrow_keeps_no_memory_that_a_command_has_done_with(recording: Path) -> None:
    """Its own allocator would; which one it takes is decided when it is imported."""
    program = (
        "import contextlib\n"
        "from managed_cli.cli.app import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "import pyarrow\n"
        "print('\\n@', pyarrow.default_memory_pool().backend_name)\n"
    )
    without = {name: value for name, value in environment().items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", recording], capture_output=True, text=True, check=True, env=without
    )
    assert done.stdout.rpartition("\n@ ")[2].strip() == "system"


def test_a_run_says_what_it_does_and_where_the_rows_are_and_nothing_on_stdout(
    tmp_path: Path, prompts: Path, vllm: RunningServer
) -> None:
    options = ("-n", 2, "--seed", 12345, "--max-tokens", 4, "--out", "out.parquet")
    done = rollout("prompts.jsonl", *at(vllm), *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    first, second, third, last = done.stderr.splitlines()
    assert first == "prompts.jsonl: 3 samples, 6 rows to record in out.parquet"
    assert second == f"vllm at {vllm.url}: {vllm.tokenizer_dir}, up to 64 samples at once, seed 12345"
    assert re.fullmatch(r"\d+ tokens sampled in [\d.]+s \([\d,]+ tok/s\)", third)
    assert last == ("recorded 6 rows of 3 samples in out.parquet; look at them with: managed-cli inspect out.parquet")


def test_quiet_says_nothing_when_all_went_well(tmp_path: Path, prompts: Path, llamacpp: RunningServer) -> None:
    done = rollout(prompts, *at(llamacpp), "--quiet", "--max-tokens", 4, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_is_one_document_that_counts_what_is_on_disk(
    tmp_path: Path, prompts: Path, llamacpp: RunningServer
) -> None:
    options = ("-n", 2, "--seed", 5, "--max-tokens", 4, "--json", "--out", "out.parquet")
    done = rollout(prompts, *at(llamacpp), *options, cwd=tmp_path)
    document = json.loads(done.stdout)
    rows = rows_of(tmp_path / "out.parquet")
    assert (document["state"], document["exit_code"], document["error"]) == ("finished", 0, None)
    assert (document["out"], document["failures"]) == ("out.parquet", None)
    assert (document["samples"], document["recorded"], document["failed"]) == (3, 3, 0)
    assert document["rows"] == document["rows_on_disk"] == len(rows) == 6
    assert document["completion_tokens"] == sum(row["completion_length"] for row in rows)
    assert document["prompt_tokens"] == sum(row["prompt_length"] for row in rows)
    assert sum(document["finish_reasons"].values()) == 6
    assert (document["server"], document["model"], document["seed"]) == (
        llamacpp.url,
        f"{llamacpp.tokenizer_dir}/model.gguf",
        5,
    )
    assert "recorded 6 rows" in done.stderr


def test_json_and_the_last_line_count_what_failed(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": "short"}, {"prompt": "x" * 5000}])
    with running_server("llamacpp", "--max-model-len", 100) as server:
        done = rollout(source, *at(server), "--json", "--quiet", "--out", "out.parquet", cwd=tmp_path)
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert (document["recorded"], document["failed"]) == (1, 1)
    assert document["failure_classes"] == {"PromptRejected": 1}
    assert document["failures"] == "out.parquet.failures.jsonl"
    assert "1 of 2 samples failed (1 PromptRejected); see out.parquet.failures.jsonl" in done.stderr
    assert "the first: the prompt has " in done.stderr


def test_breaches_of_the_contract_name_the_command_that_looks_into_them(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with running_server("vllm", "--mutate", "short_logprobs") as server:
        done = rollout(source, *at(server), "--quiet", "--out", "out.parquet", cwd=tmp_path)
    assert done.returncode == 3
    assert "  `managed-cli doctor` shows what this server returns" in done.stderr
    with running_server("vllm", "--garbage") as server:
        done = rollout(source, *at(server), "--out", "other.parquet", cwd=tmp_path)
    assert done.returncode == 4
    assert "hint: " in done.stderr


def test_a_reader_of_stderr_that_has_gone_does_not_end_a_run(
    tmp_path: Path, prompts: Path, llamacpp: RunningServer
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("rollout", prompts, *at(llamacpp), "--max-tokens", "4", "--out", "out.parquet"),
        stderr=writing,
        check=False,
        cwd=tmp_path,
        env=environment(),
        timeout=RUN_SECONDS,
    )
    os.close(writing)
    assert done.returncode == 0
    assert len(rows_of(tmp_path / "out.parquet")) == 3


def test_slow_generations_are_waited_for_while_progress_is_told_line_by_line(tmp_path: Path) -> None:
    """A reply slower than any time-out of the questions before: generation has none."""
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": "Take your time."}])
    with running_server("llamacpp", "--delay-ms", 11_500) as server:
        done = rollout(source, *at(server), "--max-tokens", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    progress = [line for line in done.stderr.splitlines() if line.startswith("progress: ")]
    assert progress[0] == "progress: 0/1 samples, oldest 10s"


def on_a_terminal(*arguments: object, cwd: Path, columns: int = 80, **changes: str) -> tuple[int, str]:
    """Exit code, and what the run writes to a pseudo-terminal of that width as its stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("rollout", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=cwd,
        env=environment(COLUMNS=str(columns), TERM="xterm-256color", **changes),
    )
    os.close(theirs)
    written = all_written_to(ours)
    return process.wait(RUN_SECONDS), written.decode().replace("\r\n", "\n")


def lines_shown(written: str) -> list[str]:
    """Every state of every line, without the sequences that move and colour."""
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", written)]


@pytest.mark.parametrize("no_color", [{}, {"NO_COLOR": "1"}], ids=["coloured", "NO_COLOR"])
def test_a_terminal_gets_a_bar_that_fits_and_goes(tmp_path: Path, no_color: dict[str, str]) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": f"Say {i}."} for i in range(12)])
    options = ("--concurrency", 4, "--max-tokens", 4, "--out", "out.parquet")
    with running_server("llamacpp", "--delay-ms", 700) as server:
        code, written = on_a_terminal(source, *at(server), *options, cwd=tmp_path, **no_color)
    assert code == 0, written
    bars = [line for line in lines_shown(written) if re.match(r"[━╸╺ ]+\d+/12 samples", line)]
    assert any("━" in line for line in bars)
    assert any("0/12 samples" in line for line in bars)
    assert any(re.search(r"\b([1-9]|1[01])/12 samples, [\d.]+s left, [\d,]+ tok/s", line) for line in bars)
    assert all(len(line) <= 80 for line in bars)
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9;]*m", written)) != bool(no_color)
    assert "progress: " not in written
    assert lines_shown(written)[-2].startswith("recorded 12 rows of 12 samples in out.parquet")


def test_a_dry_run_shows_prompts_as_they_would_be_sent_and_samples_nothing(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"id": "text", "prompt": "Hello \x1b[31mred\x1b[0m [bold]world[/bold]"},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
        {"id": "turns", "turns": ["One?", "Two?"], "system": "Count."},
        {"id": "more", "prompt": "not shown"},
    ]
    source = write_prompts(tmp_path / "in.jsonl", lines)
    with running_server("vllm") as server:
        shown = rollout(source, *at(server), "--dry-run", cwd=tmp_path)
        as_json = rollout(source, *at(server), "--dry-run", "--json", cwd=tmp_path)
        assert server.stats()["generations"] == 0
        assert (shown.returncode, as_json.returncode) == (0, 0), shown.stderr + as_json.stderr
        assert list(tmp_path.iterdir()) == [source]
        document = json.loads(as_json.stdout)
        assert document["samples"] == 4
        done = rollout(source, *at(server), "--max-tokens", 1, "--out", "out.parquet", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        sent = [entry["body"]["prompt"] for entry in sent_to(server)]
    for prompt in document["prompts"]:
        assert prompt["token_ids"] in sent
        assert prompt["length"] == len(prompt["token_ids"])
        assert f"sample {prompt['sample_id']} ({prompt['source']}): {prompt['length']} tokens" in shown.stdout
    assert "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nOne?" in shown.stdout
    assert "Hello \\x1b[31mred\\x1b[0m [bold]world[/bold]" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "nothing was sampled; the 3 samples above and 1 more would be sent" in shown.stdout


def test_as_many_samples_are_in_flight_as_asked_for_and_never_more(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": f"Say {i}."} for i in range(60)])
    with running_server("llamacpp", "--delay-ms", 200) as server:
        done = rollout(source, *at(server), "--concurrency", 20, "--max-tokens", 2, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert server.stats()["max_in_flight"] == 20
