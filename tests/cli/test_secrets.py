"""An API key is in nothing that a command writes, prints or lets others see, whatever the server does with it."""

from __future__ import annotations

import base64
import html
import http.server
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from managed_cli.backends._http import SyncHttpClient
from managed_cli.backends.secrecy import without_key
from managed_cli.errors import ServerRefused
from tests.backends.replay import Answer, as_json, replaying
from tests.cli.rollout_command import (
    at,
    command,
    environment,
    eventually,
    failures_of,
    many_rollouts,
    rollout,
    rows_of,
    started_rollout,
    write_prompts,
)
from tests.cli.secret_key import (
    BY_ENVIRONMENT,
    FROM_ENVIRONMENT,
    KEY,
    assert_no_leak_in,
    key_file,
    leaks_in,
    lines,
)
from tests.servers.process import REPOSITORY, RunningServer, running_server

KINDS = ["vllm", "sglang", "trl", "llamacpp", "openai"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def options_for(kind: str, server: RunningServer) -> list[object]:
    needed: dict[str, list[object]] = {
        "trl": ["--tokenizer", server.tokenizer_dir, "--context-length", 2048],
        "openai": ["--model", "gpt-fake"],
    }
    return [*at(server), *needed.get(kind, [])]


def test_the_search_finds_the_key_in_every_form() -> None:
    spellings = [
        KEY,
        json.dumps(KEY),
        repr(KEY),
        urllib.parse.quote(KEY, safe=""),
        html.escape(KEY),
        KEY.encode().hex(),
    ]
    spellings += [base64.b64encode(f"{prefix}{KEY}".encode()).decode() for prefix in ("", ":", "x:", "Bearer ")]
    assert all(leaks_in(spelling.encode()) for spelling in spellings)
    assert not leaks_in(b"nothing of it")


@each_kind
def test_the_right_key_is_in_nothing_that_is_written_or_shown(kind: str, tmp_path: Path) -> None:
    source, secret = write_prompts(tmp_path / "in.jsonl", lines(4)), key_file(tmp_path)
    shown: list[str] = []
    with running_server(kind, "--api-key", KEY, record=False) as server:
        options = [source, *options_for(kind, server), "--max-tokens", 4, "--seed", 1]
        runs = [
            [*options, *FROM_ENVIRONMENT, "--out", "one.parquet", "--json"],
            [*options, "--api-key-file", secret, "--out", "two.parquet", "--part", "1/2"],
            [*options, "--api-key-file", secret, "--out", "three/", "--part", "2/2"],
            [*options, *FROM_ENVIRONMENT, "--dry-run"],
            [*options, "--api-key-file", secret, "--dry-run", "--json"],
            [*options, *FROM_ENVIRONMENT, "--print-config"],
            [*options, "--api-key-file", secret, "--print-config"],
        ]
        for done in many_rollouts(runs, cwd=tmp_path, **BY_ENVIRONMENT):
            assert done.returncode == 0, done.stderr
            shown += [done.stdout, done.stderr]
    for arguments in (
        ["inspect", "one.parquet"],
        ["inspect", "one.parquet", "--row", 0],
        ["inspect", "one.parquet", "--head", 9, "--json"],
        ["inspect", "one.parquet", "--check"],
        ["inputs", source],
        ["merge", "two.parquet", "three/", "--out", "both.parquet"],
    ):
        read = subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env=environment(**BY_ENVIRONMENT),
        )
        shown += [read.stdout, read.stderr]
    assert len(rows_of(tmp_path / "both.parquet")) == 4
    assert_no_leak_in(tmp_path, *shown, but=secret)


ECHOES = {
    "plain": lambda key: Answer(f"Bearer {key} is not known".encode(), 401, "text/plain"),
    "json": lambda key: as_json({"error": {"message": f"Incorrect API key provided: {key}"}}, 401),
    "json in json": lambda key: as_json({"error": json.dumps({"authorization": f"Bearer {key}"})}, 403),
    "repr": lambda key: as_json({"detail": repr({"authorization": f"Bearer {key}".encode()})}, 500),
    "url": lambda key: Answer(f"/login?key={urllib.parse.quote(key, safe='')}".encode(), 401, "text/plain"),
    "html": lambda key: Answer(f"<html>{html.escape(key)}</html>".encode(), content_type="text/html"),
    "base64": lambda key: Answer(base64.b64encode(f"Bearer {key}".encode()), 401, "text/plain"),
    "base64 of user:key": lambda key: Answer(base64.b64encode(f":{key}".encode()), 401, "text/plain"),
    "cut": lambda key: Answer(b"x" * 290 + key.encode(), 401, "text/plain"),
}


def test_a_wrong_key_that_the_server_quotes_is_not_shown_in_any_form(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", lines(2))
    with ExitStack() as stack:
        servers = [stack.enter_context(replaying({"*": echo(KEY)})) for echo in ECHOES.values()]
        runs = [
            ["in.jsonl", "--server-type", kind, "--base-url", server.base_url, *FROM_ENVIRONMENT, "--json"]
            for server in servers
            for kind in KINDS
        ]
        done = many_rollouts(runs, cwd=tmp_path, **BY_ENVIRONMENT)
    for of_run in done:
        assert of_run.returncode == 4, of_run.stderr
        assert "error: " in of_run.stderr
    assert_no_leak_in(tmp_path, *(text for of_run in done for text in (of_run.stdout, of_run.stderr)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trl"])  # whose own server asks for no key
def test_a_wrong_key_ends_the_run_with_where_keys_come_from(kind: str, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines(2))
    with running_server(kind, "--api-key", "another", record=False) as server:
        done = rollout(source, *options_for(kind, server), *FROM_ENVIRONMENT, cwd=tmp_path, **BY_ENVIRONMENT)
    assert done.returncode == 4
    assert "--api-key-env" in done.stderr
    assert "--api-key-file" in done.stderr
    assert_no_leak_in(tmp_path, done.stdout, done.stderr)


LET_THROUGH = 8
"""Generation requests that are answered before the first that is refused: the probes among them."""


@contextmanager
def quoting(server: RunningServer) -> Iterator[str]:
    """The address of a gateway to `server` that refuses later generations, quoting their headers."""
    generations: list[str] = []

    class Gateway(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {"authorization": self.headers["authorization"], "content-type": "application/json"}
            if self.path.startswith(("/v1/c", "/generate", "/completion")):
                generations.append(self.path)
            if len(generations) > LET_THROUGH:
                said = json.dumps({"error": {"message": f"no: {headers!r}", "code": 400}}).encode()
                return self.reply(400, said)
            request = urllib.request.Request(
                server.url + self.path, data=body or None, headers=headers, method=self.command
            )
            try:
                with urllib.request.urlopen(request) as answer:
                    return self.reply(answer.status, answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return self.reply(error.code, error.read())

        do_POST = do_GET  # noqa: N815 (the name is the standard library's)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        gateway.daemon_threads = True
        thread = threading.Thread(target=gateway.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{gateway.server_address[1]}"
        gateway.shutdown()
        thread.join()


@each_kind
def test_a_key_that_is_quoted_in_mid_run_is_in_no_failure(kind: str, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines(30))
    with running_server(kind, "--api-key", KEY, record=False) as server, quoting(server) as url:
        options = ["--server-type", kind, "--base-url", url, *options_for(kind, server)[4:], *FROM_ENVIRONMENT]
        done = rollout(
            source, *options, "--max-tokens", 2, "--concurrency", 2, "--json", cwd=tmp_path, **BY_ENVIRONMENT
        )
    assert done.returncode == 3, done.stderr
    failures = failures_of(tmp_path / "out.parquet")
    assert failures
    assert all("[the API key]" in failure["message"] + str(failure) for failure in failures)
    assert len(failures) + len(rows_of(tmp_path / "out.parquet")) == 30
    assert_no_leak_in(tmp_path, done.stdout, done.stderr)


def test_a_run_shows_the_key_to_no_other_process_and_a_kill_leaves_none(tmp_path: Path) -> None:
    source, secret = write_prompts(tmp_path / "in.jsonl", lines(40)), key_file(tmp_path)
    growing = tmp_path / "out.parquet.partial"
    with running_server("vllm", "--api-key", KEY, "--delay-ms", 50, record=False) as server:
        options = [source, *at(server), "--max-tokens", 2, "--seed", 1, "--concurrency", 2, "--rows-per-shard", 2]
        with started_rollout(*options, "--api-key-file", secret, cwd=tmp_path) as process:
            eventually(lambda: any(growing.glob("*.parquet")), process)
            arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            names = Path(f"/proc/{process.pid}/comm").read_bytes()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            out, err = process.communicate()
        assert str(secret).encode() in arguments
        assert_no_leak_in(tmp_path, arguments.decode(), names.decode(), out, err, but=secret)
        done = rollout(*options, *FROM_ENVIRONMENT, "--resume", "--json", cwd=tmp_path, **BY_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert_no_leak_in(tmp_path, done.stdout, done.stderr, but=secret)


@pytest.mark.parametrize(
    "patched",
    ["managed_cli.rollout.runner:Runner.run", "managed_cli.backends._http:HttpClient.get", "json:dumps"],
)
def test_the_traceback_of_a_bug_does_not_show_the_key(patched: str, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", lines(2))
    module, _, name = patched.partition(":")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "sitecustomize.py").write_text(
        "import importlib, operator, sys\n"
        "def broken(*arguments, **named):\n"
        "    raise RuntimeError(f'broken with {arguments!r} and {named!r}')\n"
        "from managed_cli.cli import app\n"
        "def run(arguments, run=app.run):\n"
        f"    place, _, name = {name!r}.rpartition('.')\n"
        f"    owner = importlib.import_module({module!r})\n"
        "    owner = operator.attrgetter(place)(owner) if place else owner\n"
        "    setattr(owner, name, broken)\n"
        "    return run(arguments)\n"
        "app.run = run\n"
    )
    with running_server("vllm", "--api-key", KEY, record=False) as server:
        path = f"{tmp_path / 'patches'}:{REPOSITORY}"
        changes = {**BY_ENVIRONMENT, "PYTHONPATH": path}
        done = rollout(source, *at(server), *FROM_ENVIRONMENT, "--json", cwd=tmp_path, **changes)
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr
    assert "RuntimeError: broken with" in done.stderr
    assert_no_leak_in(tmp_path, done.stdout, done.stderr)


def test_a_tokenizer_behind_endpoints_does_not_show_the_key() -> None:
    with replaying({"*": ECHOES["json"](KEY)}) as server:
        client = SyncHttpClient(server.base_url, label="it", api_key=KEY)
        with pytest.raises(ServerRefused) as caught:
            client.post("/tokenize", {})
        client.close()
    assert "[the API key]" in caught.value.report()
    assert not leaks_in(caught.value.report().encode())


def test_what_is_no_key_stays_in_a_message() -> None:
    assert without_key(b"sk-other and %41", KEY) == b"sk-other and %41"
    assert without_key(b"anything", None) == b"anything"
