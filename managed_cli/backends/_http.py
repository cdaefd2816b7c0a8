"""One HTTP client per server, and the only place that knows aiohttp and httpx.

Sent again: no connection, a connection lost before the reply was whole, and the statuses in `RETRIED_STATUSES`.
Everything else is final. There is no time limit for a reply unless one is asked for, since cutting long generations
would skew what is recorded; TCP keepalive tells a server that is gone from one that is thinking.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ipaddress
import random
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

import aiohttp
import httpx
import msgspec
from aiohttp.http_exceptions import ContentEncodingError

from managed_cli.backends import in_turn
from managed_cli.backends._connections import Connections, kept_alive_socket, whole_body
from managed_cli.backends.secrecy import WHERE_KEYS_COME_FROM, refuse_credentials, without_key
from managed_cli.errors import ConfigError, RequestTimedOut, ServerContractError, ServerRefused, ServerUnreachable

RETRIED_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that say "not now": request timeout, too early, too many, bad gateway, unavailable, gateway timeout."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})

DEFAULT_ATTEMPTS = 6
"""Sends of one request before it counts as failed: about 30 s of back-off."""

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 15.0
LONGEST_RETRY_AFTER_SECONDS = 60.0
"""A server's own Retry-After is honoured up to here."""

CONNECT_TIMEOUT_SECONDS = 8.0
"""A host that does not accept a connection in this time counts as down; less than a question may take, so that a
question that ran out of time did reach the host."""

QUESTION_TIMEOUT_SECONDS = 10.0
"""What is asked with GET (health, models, version) needs no generation: a server silent for so long is none."""

TOKENIZE_TIMEOUT_SECONDS = 60.0
"""Tokenising and rendering need no generation either, but may wait behind one on a busy server."""

LARGEST_REPLY_BYTES = 2**30
"""A reply does not end beyond it: 64 choices of 128,000 tokens take half of it."""

SHOWN_BODY_CHARACTERS = 300
"""How much of a strange reply an error message quotes."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading a reply as JSON can raise; the last for one that is nested without end."""

NO_LIMIT = contextlib.nullcontext()
"""In place of a time limit."""

T = TypeVar("T")


class Reply(msgspec.Struct, frozen=True):
    """A 2xx reply: its bytes, and how many sends it took."""

    body: bytes
    attempts: int


class CountedSends:
    """Counts what the current task sends inside the block.

    Attributes:
        count: how often something was sent, retries included.
    """

    __slots__ = ("_before", "count")

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = _counted_sends.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _counted_sends.reset(self._before)


_counted_sends: contextvars.ContextVar[CountedSends | None] = contextvars.ContextVar("counted_sends", default=None)


class HttpClient:
    """Requests to one server, with its key, its retries and its error messages.

    Args:
        label: how messages name the server, e.g. `vllm at http://127.0.0.1:8000`.
        api_key: sent as a bearer token; never shown.
        timeout: seconds that a reply may take as a whole; None waits as long as the server generates.
        attempts: sends of one request before it fails.
        max_connections: connections kept open at once.

    Attributes:
        is_lost: asked after a connection was lost; when it says yes, the request is not sent again.
    """

    def __init__(
        self,
        base_url: str,
        *,
        label: str,
        api_key: str | None = None,
        timeout: float | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
        max_connections: int = 1024,
    ) -> None:
        self.base_url = normalised_base_url(base_url)
        self.label = label
        self._attempts = attempts
        self._api_key = api_key
        self._headers = {"content-type": "application/json", "user-agent": "managed-cli"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._proxy = proxy_for(self.base_url)
        self.is_lost: Callable[[], Awaitable[bool]] | None = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            tls = httpx.create_ssl_context() if self.base_url.startswith("https:") else True
            self._session = aiohttp.ClientSession(
                connector=Connections(limit=self._max_connections, ssl=tls, socket_factory=kept_alive_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
            )
        return self._session

    async def get(self, path: str, *, attempts: int | None = None) -> Reply:
        """The 2xx reply to GET `path`. Errors as `post`."""
        return await self._request("GET", path, None, attempts=attempts)

    async def post(self, path: str, payload: object, *, attempts: int | None = None) -> Reply:
        """The 2xx reply to POST `path` with `payload` as JSON.

        Raises:
            ServerUnreachable: no connection, or it was lost, at every attempt.
            RequestTimedOut: the reply took longer than is allowed for one.
            ServerRefused: any other status than 2xx, after retries where they are due.
        """
        return await self._request("POST", path, msgspec.json.encode(payload), attempts=attempts)

    async def _request(self, method: str, path: str, content: bytes | None, *, attempts: int | None) -> Reply:
        await in_turn.after_others()
        session, url = self._open_session(), self.base_url + path
        last_attempt = attempts or self._attempts
        is_question = content is None
        seconds = QUESTION_TIMEOUT_SECONDS if is_question else self._timeout
        for attempt in range(1, last_attempt + 1):
            wait: float | None = None
            if (sends := _counted_sends.get()) is not None:
                sends.count += 1
            try:
                async with NO_LIMIT if seconds is None else asyncio.timeout(seconds) as limit:
                    response = await session.request(
                        method, url, data=content, allow_redirects=False, proxy=self._proxy
                    )
                    body = await whole_body(response, most=LARGEST_REPLY_BYTES)
            except aiohttp.ClientResponseError as error:
                if isinstance(error, aiohttp.ClientHttpProxyError):
                    raise self._unreachable(error, path) from error
                raise self._no_http(error, path) from error
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                if isinstance(error.__cause__, ContentEncodingError):
                    raise self._not_decompressed(error.__cause__, path) from error
                if limit is not None and limit.expired() and not is_question:
                    raise self._timed_out(path) from error
                if attempt == last_attempt or (not is_question and await self._is_lost()):
                    unreachable = self._unreachable(error, path)
                    unreachable.is_silent = limit is not None and limit.expired()
                    raise unreachable from error
            else:
                if body is None:
                    raise self._too_large(path)
                await in_turn.turn(len(body))
                if 200 <= response.status < 300:
                    return Reply(body, attempt)
                if response.status not in RETRIED_STATUSES or attempt == last_attempt:
                    raise self._refusal(response, body, path)
                wait = _retry_after(response.headers)
            await asyncio.sleep(wait if wait is not None else _backoff(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _is_lost(self) -> bool:
        return self.is_lost is not None and await self.is_lost()

    def _timed_out(self, path: str) -> RequestTimedOut:
        return RequestTimedOut(
            f"{self.label} took longer than {self._timeout:g} s to answer",
            details=[f"{path}: given up, and not asked for again: its answers may just be long"],
            hint="a larger --request-timeout, or none, waits for long answers; a limit leaves them out of the data",
        )

    def _unreachable(self, error: Exception, path: str) -> ServerUnreachable:
        reason, cause = str(error) or type(error).__name__, error.__cause__
        for noise in (" ssl:default", " ssl:True"):  # aiohttp says it of plain HTTP too
            reason = reason.replace(noise, "")
        if isinstance(error, TimeoutError) or isinstance(cause, TimeoutError):
            reason = f"no answer in time ({reason})"
        if isinstance(error, aiohttp.ClientSSLError):
            hint = "is it http:// or https://? SSL_CERT_FILE names the certificates that are trusted"
        else:
            hint = "start it, or name another with --base-url; --wait-for-server SECONDS waits for one that is loading"
        return ServerUnreachable(
            f"{self.label} cannot be reached",
            details=[f"{path}: {reason}"],
            hint=hint,
        )

    def _no_http(self, error: aiohttp.ClientResponseError, path: str) -> ServerContractError:
        return ServerContractError(
            f"{self.label} does not speak HTTP",
            details=[f"{path}: {' '.join(error.message.split())[:SHOWN_BODY_CHARACTERS]}"],
            hint="is this the address of an inference server?",
        )

    def _not_decompressed(self, error: Exception, path: str) -> ServerContractError:
        return ServerContractError(
            f"{self.label} sent a reply that cannot be decompressed", details=[f"{path}: {error}"]
        )

    def _too_large(self, path: str) -> ServerContractError:
        return ServerContractError(
            f"{self.label} sent a reply of more than {LARGEST_REPLY_BYTES:,} bytes",
            details=[f"{path}: nothing of it was kept"],
        )

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes, path: str) -> ServerRefused:
        status, hint = response.status, None
        if status in (401, 403):
            hint = WHERE_KEYS_COME_FROM
        elif status in REDIRECTS and "location" in response.headers:
            location = response.headers["location"].partition("?")[0]  # what a query holds may be secret
            elsewhere = shown_body(self._without_key(location.encode()))
            hint = f"it points to {elsewhere}, and is not followed there; --base-url names the server itself"
        return ServerRefused(
            f"{self.label} answered {path} with HTTP {status}",
            status=status,
            details=[error_message_in(self._without_key(body))],
            hint=hint,
        )

    def _without_key(self, body: bytes) -> bytes:
        return without_key(body, self._api_key)

    def decode(self, body: bytes, type: type[T], *, what: str, quoted: bool = True) -> T:
        """`body` as JSON of the given type; `quoted=False` keeps a body that may hold secrets out of the message.

        Raises:
            ServerContractError: it is not JSON, or a field is missing or of another type.
        """
        try:
            return msgspec.json.decode(body, type=type)
        except UNREADABLE as error:
            raise ServerContractError(
                f"{self.label} sent {what} that cannot be read: {error}",
                details=[f"the reply begins: {shown_body(self._without_key(body))}"] if quoted else [],
                hint="is --server-type right for the server at this address?",
            ) from error

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class SyncHttpClient:
    """Small blocking requests to one server, for code that runs in a thread (a tokenizer behind endpoints)."""

    def __init__(self, base_url: str, *, label: str, api_key: str | None = None) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self.label = label
        self._api_key = api_key
        self._client = httpx.Client(
            base_url=normalised_base_url(base_url),
            headers=headers,
            timeout=httpx.Timeout(TOKENIZE_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            trust_env=not is_loopback(base_url),
        )

    def post(self, path: str, payload: Mapping[str, object]) -> Any:  # Any: JSON of any shape
        """The JSON reply to POST `path`.

        Raises:
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        try:
            response = self._client.post(path, content=msgspec.json.encode(payload))
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self.label} cannot be reached", details=[f"{path}: {error}"]) from error
        if not response.is_success:
            raise ServerRefused(
                f"{self.label} answered {path} with HTTP {response.status_code}",
                status=response.status_code,
                details=[error_message_in(without_key(response.content, self._api_key))],
            )
        try:
            return msgspec.json.decode(response.content)
        except UNREADABLE as error:
            raise ServerContractError(f"{self.label} answered {path} with something that is not JSON") from error

    def close(self) -> None:
        """Close every connection."""
        self._client.close()


def normalised_base_url(base_url: str) -> str:
    """`base_url` without a trailing slash or a trailing `/v1`, which the endpoints add themselves.

    Raises:
        ConfigError: it is not an http(s) URL with a host, or it holds a user name, a password or a query.
    """
    refuse_credentials(base_url)
    try:
        parts = urllib.parse.urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        usable = False
    if not usable:
        raise ConfigError(
            f"--base-url {base_url!r} is not an http:// or https:// address", hint="write it as http://HOST:PORT"
        )
    return base_url.rstrip("/").removesuffix("/v1")


def proxy_for(base_url: str) -> str | None:
    """The proxy that the environment names for this host; None without, and always for this machine."""
    parts = urllib.parse.urlsplit(base_url)
    if is_loopback(base_url) or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def is_loopback(base_url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = urllib.parse.urlsplit(base_url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_message_in(body: bytes) -> str:
    """What an error body says, in one line, whichever of the servers' shapes it has."""
    try:
        value = msgspec.json.decode(body)
    except UNREADABLE:
        return shown_body(body) or "(an empty reply)"
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return " ".join(str(value).split())[: 2 * SHOWN_BODY_CHARACTERS]


def shown_body(body: bytes) -> str:
    """The beginning of a reply as printable text on one line."""
    text = " ".join(body[: 2 * SHOWN_BODY_CHARACTERS].decode("utf-8", "replace").split())
    return "".join(character if character.isprintable() else "�" for character in text)[:SHOWN_BODY_CHARACTERS]


def _backoff(attempt: int) -> float:
    """Seconds before the next send: doubling, capped, jittered so that clients do not return in step."""
    ceiling = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** (attempt - 1))
    return random.uniform(0.5, 1.0) * ceiling


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the server asks to wait, capped; None when it does not say in seconds."""
    value = headers.get("retry-after", "")
    return min(float(value), LONGEST_RETRY_AFTER_SECONDS) if value.isascii() and value.isdigit() else None
