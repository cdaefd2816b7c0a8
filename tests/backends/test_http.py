import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from managed_cli.backends import _http
from managed_cli.backends._connections import KEEPALIVE_IDLE_SECONDS
from managed_cli.backends._http import CountedSends, HttpClient, error_message_in, normalised_base_url, shown_body
from managed_cli.backends.base import Backend, BackendConfig, refusal_is_final
from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.backends.openai import OpenAIBackend
from managed_cli.backends.sglang import SGLangBackend
from managed_cli.backends.trl import TRLBackend
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import (
    ConfigError,
    ManagedCliError,
    RequestTimedOut,
    ServerContractError,
    ServerRefused,
    ServerUnreachable,
)
from tests.backends.replay import Answer, as_json, ask, recorded, replaying

KEY = "sk-very-secret"
HTML = Answer(b"<html><body>It works!</body></html>", content_type="text/html")
EVERY_BACKEND = [VLLMBackend, SGLangBackend, TRLBackend, LlamaCppBackend, OpenAIBackend]
RECORDING_BACKENDS = [VLLMBackend, SGLangBackend, TRLBackend, LlamaCppBackend]
BUSY = Answer(b"", 503, headers={"retry-after": "0"})
"""Asks for no wait, so that a test of retries takes none."""


def on_client(base_url: str, action: Callable[[HttpClient], Awaitable[Any]], **settings: Any) -> Any:
    """What `action` gives on a client of its own."""

    async def main() -> Any:  # Any: whatever the action gives
        client = HttpClient(base_url, label=f"server at {base_url}", **settings)
        try:
            return await action(client)
        finally:
            await client.aclose()

    return asyncio.run(main())


def unused_address() -> str:
    """An address where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_server_that_is_busy_is_asked_again_and_the_attempts_are_counted(status: int) -> None:
    busy = Answer(b"", status, headers={"retry-after": "0"})
    with replaying({"POST /x": [busy, busy, as_json({})]}) as server:
        assert on_client(server.base_url, lambda c: c.post("/x", {})).attempts == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500, 501])
def test_a_refusal_is_not_sent_again(status: int) -> None:
    with replaying({"POST /x": as_json({"error": {"message": "no"}}, status)}) as server:
        with pytest.raises(ServerRefused, match=f"HTTP {status}") as caught:
            on_client(server.base_url, lambda c: c.post("/x", {}))
        assert len(server.requests) == 1
    assert caught.value.status == status


def test_a_server_that_stays_busy_is_given_up_after_the_attempts_allowed() -> None:
    with replaying({"POST /x": BUSY}) as server:
        with pytest.raises(ServerRefused, match="HTTP 503"):
            on_client(server.base_url, lambda c: c.post("/x", {}), attempts=3)
        assert len(server.requests) == 3


def test_a_connection_lost_before_the_reply_is_whole_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def served(client: HttpClient) -> Any:  # Any: the bytes of a reply
            loop = asyncio.get_running_loop()
            listener.setblocking(False)
            request = asyncio.ensure_future(client.post("/x", {}, attempts=2))
            for reply in (
                b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{",
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
            ):
                connection, _ = await loop.sock_accept(listener)
                with connection:
                    await loop.sock_recv(connection, 65536)
                    await loop.sock_sendall(connection, reply)
            return await request

        reply = on_client(f"http://127.0.0.1:{listener.getsockname()[1]}", served)
    assert (reply.body, reply.attempts) == (b"{}", 2)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_server_that_is_down_is_named_with_what_to_do(backend: type[Backend]) -> None:
    address = unused_address()

    async def wait() -> None:
        made: Any = backend(BackendConfig(base_url=address, attempts=1))  # type: ignore[call-arg] # a protocol names no __init__
        try:
            await made.wait_until_ready(0.0)
        finally:
            await made.aclose()

    with pytest.raises(ServerUnreachable, match=f"{backend.server_type} at {address} cannot be reached") as caught:
        asyncio.run(wait())
    assert "--base-url" in caught.value.report()
    assert refusal_is_final(caught.value)


@pytest.mark.parametrize("backend", RECORDING_BACKENDS)
def test_a_web_page_in_place_of_a_server_is_a_broken_contract(backend: type[Backend]) -> None:
    with (
        replaying({"*": HTML}) as server,
        pytest.raises(ServerContractError, match=r"sent .* that cannot be read") as caught,
    ):
        ask(backend, server, lambda b: b.probe(), probed=False)
    assert "--server-type" in caught.value.report()


@pytest.mark.parametrize(
    ("backend", "kind", "name", "path"),
    [
        (VLLMBackend, "vllm", "auth_wrong_models", "GET /v1/models"),
        (SGLangBackend, "sglang", "auth_none_model_info", "GET /model_info"),
        (TRLBackend, "vllm", "auth_none_models", "GET /v1/models"),
        (LlamaCppBackend, "vllm", "auth_wrong_models", "GET /props"),
    ],
)
def test_a_recorded_401_is_told_with_where_the_key_comes_from(
    backend: type[Backend], kind: str, name: str, path: str
) -> None:
    with replaying({path: recorded(kind, name).answer}) as server, pytest.raises(ServerRefused) as caught:
        ask(backend, server, lambda b: b.probe(), probed=False)
    assert caught.value.status == 401
    assert "Unauthorized" in caught.value.report()
    assert "--api-key-env" in caught.value.report()
    assert refusal_is_final(caught.value)


def test_the_key_goes_out_as_a_bearer_token() -> None:
    with replaying({"GET /x": as_json({})}) as server:
        on_client(server.base_url, lambda c: c.get("/x"), api_key=KEY)
        (request,) = server.requests
    assert {name.lower(): value for name, value in request.headers.items()}["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    "answer",
    [
        as_json({"error": {"message": f"Incorrect API key provided: {KEY}"}}, 401),
        as_json({"error": f"bad token {KEY}"}, 400),
        Answer(f"Bearer {KEY} is not known".encode(), 500, "text/plain"),
        Answer(f"<html>you sent Bearer {KEY}</html>".encode(), content_type="text/html"),
        Answer(b"x" * 295 + KEY.encode(), content_type="text/html"),  # where the quotation is cut
    ],
)
def test_the_key_is_in_no_message_even_where_the_server_quotes_it(backend: type[Backend], answer: Answer) -> None:
    with replaying({"*": answer}) as server, pytest.raises(ManagedCliError) as caught:
        ask(backend, server, lambda b: b.probe(), probed=False, api_key=KEY)
    assert KEY[:4] not in caught.value.report()
    assert KEY not in repr(caught.value)


def test_the_key_is_in_no_repr() -> None:
    config = BackendConfig(base_url="http://127.0.0.1:8000", api_key=KEY)
    assert KEY not in repr(config)
    assert KEY not in repr(VLLMBackend(config))


def test_a_server_that_is_loading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("managed_cli.backends.base.HEALTH_POLL_SECONDS", 0.0)
    with replaying({"GET /health": [Answer(b"", 503), Answer(b"", 503), Answer()]}) as server:
        ask(VLLMBackend, server, lambda b: b.wait_until_ready(30.0), probed=False)
        assert len(server.requests) == 3


def test_a_server_that_does_not_come_up_in_time_is_an_error() -> None:
    with replaying({"GET /health": Answer(b"", 503)}) as server, pytest.raises(ServerRefused, match="HTTP 503"):
        ask(VLLMBackend, server, lambda b: b.wait_until_ready(0.0), probed=False)


def test_a_health_check_that_waiting_will_not_change_is_not_repeated() -> None:
    with replaying({"GET /health": as_json({"error": "Unauthorized"}, 401)}) as server:
        with pytest.raises(ServerRefused, match="HTTP 401"):
            ask(VLLMBackend, server, lambda b: b.wait_until_ready(30.0), probed=False)
        assert len(server.requests) == 1


def drip(listener: socket.socket) -> None:
    """Accept one connection after the other, and answer each a byte at a time, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.01)


@pytest.mark.parametrize("drips", [False, True])
def test_a_slow_reply_is_cut_where_a_timeout_was_asked_for_and_is_not_asked_for_again(drips: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers, or never to the end
        if drips:
            threading.Thread(target=drip, args=(listener,), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with CountedSends() as sends, pytest.raises(RequestTimedOut, match=r"took longer than 0\.2 s") as caught:
            on_client(address, lambda c: c.post("/x", {}), timeout=0.2)
    assert sends.count == 1
    assert "--request-timeout" in caught.value.report()


def test_a_question_that_is_answered_byte_by_byte_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_http, "QUESTION_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match="cannot be reached") as caught:
            on_client(address, lambda c: c.get("/x", attempts=1))
    assert "no answer in time" in caught.value.report()


def test_connections_are_kept_alive_while_a_server_thinks() -> None:
    options = {}

    async def look(client: HttpClient) -> None:
        made: list[socket.socket] = []
        keep = _http.kept_alive_socket

        def noted(address: Any) -> socket.socket:  # Any: as `getaddrinfo` gives it
            made.append(keep(address))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_http, "kept_alive_socket", noted)
            await client.get("/x")
        (connection,) = made
        options["on"] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options["idle"] = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    with replaying({"GET /x": as_json({})}) as server:
        on_client(server.base_url, look)
    assert options == {"on": 1, "idle": KEEPALIVE_IDLE_SECONDS}


def test_a_reply_that_cannot_be_decompressed_is_a_broken_contract() -> None:
    garbage = Answer(b"not gzip", headers={"content-encoding": "gzip"})
    with replaying({"POST /x": garbage}) as server:
        with pytest.raises(ServerContractError, match="cannot be decompressed"):
            on_client(server.base_url, lambda c: c.post("/x", {}))
        assert len(server.requests) == 1


def test_a_request_is_not_sent_again_to_a_server_that_is_known_to_be_lost() -> None:
    async def lost() -> bool:
        return True

    async def send(client: HttpClient) -> None:
        client.is_lost = lost
        await client.post("/x", {})

    with CountedSends() as sends, pytest.raises(ServerUnreachable):
        on_client(unused_address(), send)
    assert sends.count == 1


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({"http_proxy": "http://proxy:3128"}, "http://gpu-7:8000", "http://proxy:3128"),
        ({"http_proxy": "http://proxy:3128"}, "http://127.0.0.1:8000", None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "gpu-7"}, "http://gpu-7:8000", None),
        ({"http_proxy": "http://proxy:3128"}, "https://gpu-7", None),
        ({"all_proxy": "http://proxy:3128"}, "https://gpu-7", "http://proxy:3128"),
        ({}, "http://gpu-7:8000", None),
    ],
)
def test_a_proxy_of_the_environment_is_for_other_hosts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _http.proxy_for(url) == proxy


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://host:1/", "http://host:1"),
        ("http://host:1/v1", "http://host:1"),
        ("https://host/v1/", "https://host"),
        ("http://host/proxy", "http://host/proxy"),
    ],
)
def test_a_base_url_may_end_in_a_slash_or_v1(url: str, normal: str) -> None:
    assert normalised_base_url(url) == normal


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", ""])
def test_an_address_that_is_none_is_a_usage_error(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an http"):
        normalised_base_url(url)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"object": "error", "message": "1 validation error:\\n  bad"}', "1 validation error: bad"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "(an empty reply)"),
        (b"\xff\x1b[31mred", "��[31mred"),
    ],
)
def test_each_servers_shape_of_an_error_is_understood(body: bytes, message: str) -> None:
    assert error_message_in(body) == message


def test_a_strange_reply_is_shown_shortened_and_without_control_characters() -> None:
    shown = shown_body(b"\x1b[2J" + b"x" * 10_000)
    assert len(shown) == 300
    assert shown.isprintable()
