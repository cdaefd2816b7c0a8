"""A real HTTP server that gives prepared answers, and the recorded replies of real servers to give.

A recording is one JSON file in `tests/wire/KIND/`: `request` (method, path, body), `status`, `response` or
`response_text`, as a real server sent it.
"""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from managed_cli.backends.base import Backend, BackendConfig

WIRE = Path(__file__).parent.parent / "wire"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answer:
    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclasses.dataclass(frozen=True)
class Recording:
    name: str
    request: Mapping[str, Any]
    status: int | None
    response: Any
    text: str | None

    @property
    def body(self) -> Any:
        """The request's body."""
        return self.request["body"]

    @property
    def answer(self) -> Answer:
        assert self.status is not None, f"{self.name}: the server never answered"
        if self.response is None:
            return Answer((self.text or "").encode(), self.status, "text/plain")
        return as_json(self.response, self.status)


def as_json(value: object, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status)


def recorded(kind: str, name: str) -> Recording:
    value = json.loads((WIRE / kind / f"{name}.json").read_text(encoding="utf-8"))
    return Recording(name, value["request"], value["status"], value["response"], value.get("response_text"))


def all_recorded(kind: str, path: str) -> list[Recording]:
    """Every whole JSON reply with status 200 to POST `path`, in order of its name."""
    found = [recorded(kind, file.stem) for file in sorted((WIRE / kind).glob("*.json"))]
    return [r for r in found if r.request["path"] == path and r.status == 200 and r.response is not None and r.body]


class Replay:
    """What a test sees of its server: where it listens, and what it was asked."""

    def __init__(self, routes: Mapping[str, Answer | Sequence[Answer]]) -> None:
        self.requests: list[Request] = []
        self._routes = {
            key: [answers] if isinstance(answers, Answer) else list(answers) for key, answers in routes.items()
        }
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.replay = self
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: Request) -> Answer:
        """The next answer of the route; the last one is given again and again."""
        with self._lock:
            self.requests.append(request)
            answers = self._routes.get(f"{request.method} {request.path}") or self._routes.get("*")
            if not answers:
                return as_json({"detail": "Not Found"}, 404)
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def asked(self, path: str) -> list[Any]:
        """Bodies of the requests to `path`, in order."""
        return [request.body for request in self.requests if request.path == path]

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    replay: Replay


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else headers and body, sent apart, wait 40 ms for each other
    server: _Server

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._reply(json.loads(body))

    def _reply(self, body: Any) -> None:
        answer = self.server.replay.answer(Request(self.command, self.path, dict(self.headers.items()), body))
        self.send_response(answer.status)
        self.send_header("content-type", answer.content_type)
        self.send_header("content-length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is pytest's."""


@contextlib.contextmanager
def replaying(routes: Mapping[str, Answer | Sequence[Answer]]) -> Iterator[Replay]:
    """A server on a loopback port; routes are `METHOD /path`, or `*` for all others."""
    replay = Replay(routes)
    thread = threading.Thread(target=replay.serve, daemon=True)
    thread.start()
    try:
        yield replay
    finally:
        replay.close()
        thread.join()


def ask(
    make: Callable[[BackendConfig], Backend],
    replay: Replay,
    action: Callable[[Any], Awaitable[T]],  # Any: the backend that `make` makes
    *,
    probed: bool = True,
    **config: Any,
) -> T:
    """What `action` gives, run on a backend that speaks to `replay` and has been probed."""

    async def main() -> T:
        backend = make(BackendConfig(base_url=replay.base_url, **{"attempts": 1, **config}))
        try:
            if probed:
                await backend.probe()
            return await action(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())
