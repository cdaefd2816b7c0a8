"""Servers as users of the Python API hold them: made from a config, prepared once, opened as managed contexts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from managed_cli.backends.base import Backend
from managed_cli.backends.embedded import EmbeddedBackend
from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.backends.registry import make_backend
from managed_cli.errors import ConfigError, ServerChanged, ServerUnreachable, TokenizerError
from managed_cli.managed.config import APIServerConfig, ServerType
from managed_cli.managed.server import History, ManagedServer
from managed_cli.tokenizer_disagreement import first_disagreement
from managed_cli.tokenizers import (
    PROBE_TEXTS,
    HuggingFaceTokenizer,
    LlamaCppTokenizer,
    load_tokenizer,
)
from managed_cli.types import UNNAMED_MODEL, ServerInfo, Tokenizer

ANSWERS_SECONDS = 60.0
"""All questions before the first sample, one-token probes on a busy server included, are answered in this time."""


@contextlib.asynccontextmanager
async def expecting_answers(backend: Backend, seconds: float = ANSWERS_SECONDS) -> AsyncIterator[None]:
    """Bounds what is asked before the first sample; generation itself is never bounded.

    Raises:
        ServerUnreachable: the block took longer than `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ServerUnreachable(
            f"the {backend.server_type} server at {backend.base_url} accepts requests but does not answer them",
            details=[f"nothing came in {seconds:.0f} s"],
            hint="is it overloaded, or not an inference server?",
        ) from error


class TokenizerShelf:
    """Tokenizers by name, each loaded once: servers of one model share it."""

    def __init__(self) -> None:
        self._loaded: dict[str, HuggingFaceTokenizer] = {}
        self._loading = threading.Lock()

    def loaded(self, name: str) -> HuggingFaceTokenizer:
        """The tokenizer of that name; takes seconds the first time, so it is called in a thread.

        Raises:
            TokenizerError: it does not load here.
        """
        with self._loading:
            if name not in self._loaded:
                self._loaded[name] = load_tokenizer(name)
            return self._loaded[name]


class Server:
    """One inference server; the first use connects, checks it and loads its tokenizer.

    Args:
        config: how to reach it; a subclass for one server type may be given keywords instead.

    Raises (on first use):
        ServerUnreachable, ServerRefused, ServerContractError: it is down, says no, or is something else.
        TokenizerError: no tokenizer, or one whose ids are not the server's.
    """

    server_type: ClassVar[ServerType | None] = None

    def __init__(self, config: APIServerConfig | None = None, **settings: Any) -> None:  # Any: fields of the config
        if config is None:
            config = APIServerConfig(**{"server_type": self.server_type or "local", **settings})
        elif settings:
            raise ConfigError("give either a config or its fields, not both")
        if self.server_type is not None and config.server_type != self.server_type:
            raise ConfigError(f"{type(self).__name__} cannot take a config for {config.server_type!r}")
        self.config = config
        self.outstanding = 0
        self.shelf = TokenizerShelf()
        self._backend: Backend | None = None
        self._tokenizer: Tokenizer | None = None
        self._preparing = asyncio.Lock()

    @property
    def backend(self) -> Backend:
        """The wire side of it, once prepared."""
        assert self._backend is not None, "prepare() comes first"
        return self._backend

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, once prepared."""
        assert self._tokenizer is not None, "prepare() comes first"
        return self._tokenizer

    @property
    def info(self) -> ServerInfo:
        """What it says of itself, once prepared."""
        return self.backend.info

    async def prepare(self) -> Self:
        """Connect, wait for readiness, learn model and context, load the tokenizer, compare ids. Once."""
        if not self.is_prepared:
            async with self._preparing:
                if not self.is_prepared:
                    await self._prepare()
        return self

    @property
    def is_prepared(self) -> bool:
        """Whether the server has been checked and its tokenizer loaded."""
        return self._tokenizer is not None

    async def _prepare(self) -> None:
        if self._backend is None:
            self._backend = await self.connected()
        await self._backend.wait_until_ready(self.config.wait_for_server)
        async with expecting_answers(self._backend):
            info = await self._backend.probe()
        tokenizer = await asyncio.to_thread(self.loaded_tokenizer, self._backend, info)
        async with expecting_answers(self._backend):
            await check_tokenizer(self._backend, tokenizer)
        self._backend.limit_vocabulary(tokenizer.vocab_size)
        self._backend.know_end_tokens(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer

    async def look_again(self, *, sample: bool) -> None:
        """Return when a server that is prepared answers, and is still the one that it was.

        Args:
            sample: it may have been started anew, so that its logprobs mode and its tokenizer are looked at too.

        Raises:
            ServerUnreachable, ServerRefused: it does not answer.
            ServerChanged: another model is served there now.
        """
        backend = self.backend
        await backend.wait_until_ready(0)
        async with expecting_answers(backend):
            found = await backend.look_again(sample=sample)
            changed = differences(backend.info, found)
            if changed:
                raise ServerChanged(
                    f"the {backend.server_type} server at {backend.base_url} is not what it was when the run began",
                    details=changed,
                    hint="a run has one model: start the server as it was, or begin another run",
                )
            if sample:
                await check_tokenizer(backend, self.tokenizer)

    async def connected(self) -> Backend:
        """A backend for the server, started where it is the embedded engine; nothing is asked yet."""
        if self.config.server_type == "local":
            return await EmbeddedBackend.start(self.config.engine_config())
        return make_backend(self.config.server_type, self.config.backend_config())

    def loaded_tokenizer(self, backend: Backend, info: ServerInfo) -> Tokenizer:
        """The configured tokenizer, else the server's own; takes seconds, so it is called in a thread.

        Raises:
            TokenizerError: none loads here.
        """
        if self.config.tokenizer_name is not None:
            return self.shelf.loaded(self.config.tokenizer_name)
        if isinstance(backend, LlamaCppBackend):
            return llamacpp_tokenizer(backend)
        names = list(dict.fromkeys(n for n in (info.tokenizer_name, info.model) if n and n != UNNAMED_MODEL))
        return first_loadable(names, backend, self.shelf)

    def managed_server(
        self,
        tokenizer: Any = None,  # Any: one of ours, or a transformers tokenizer
        track_tree: bool = False,
        history: History = "template",
        metadata: Mapping[str, Any] | None = None,  # Any: JSON values
    ) -> contextlib.AbstractAsyncContextManager[ManagedServer]:
        """A fresh context on this server; leaving the block ends it."""
        return _OpenContext(self, lambda: self._context(tokenizer, track_tree, history, metadata))

    def _context(
        self, tokenizer: Any, track_tree: bool, history: History, metadata: Mapping[str, Any] | None
    ) -> ManagedServer:  # Any: as in `managed_server`
        return ManagedServer(self, tokenizer, track_tree, history=history, metadata=metadata)

    async def aclose(self) -> None:
        """Close the connections, and end an embedded engine."""
        backend, self._backend = self._backend, None
        tokenizer, self._tokenizer = self._tokenizer, None
        if isinstance(tokenizer, LlamaCppTokenizer):
            tokenizer.close()
        if backend is not None:
            await backend.aclose()

    async def __aenter__(self) -> Self:
        try:
            return await self.prepare()
        except BaseException:
            await self.aclose()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class _OpenContext(contextlib.AbstractAsyncContextManager[ManagedServer]):
    """A context on a server for as long as a block lasts; in half a generator's time, as there is one per sample."""

    def __init__(self, server: Server, opened: Callable[[], ManagedServer]) -> None:
        self._server = server
        self._opened = opened

    async def __aenter__(self) -> ManagedServer:
        await self._server.prepare()
        self._managed = self._opened()
        self._server.outstanding += 1
        return self._managed

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.outstanding -= 1
        self._managed.close()


class VLLMServer(Server):
    """A `vllm serve`."""

    server_type = "vllm"


class SGLangServer(Server):
    """An SGLang server."""

    server_type = "sglang"


class TrlVllmServer(Server):
    """A `trl vllm-serve`, in either of its dialects."""

    server_type = "trl"


class LlamaCppServer(Server):
    """A llama.cpp server that runs elsewhere."""

    server_type = "llamacpp"


class LocalServer(Server):
    """The embedded engine."""

    server_type = "local"


SERVER_CLASSES: dict[str, str] = {
    "vllm": "managed_cli.managed.servers:VLLMServer",
    "sglang": "managed_cli.managed.servers:SGLangServer",
    "trl": "managed_cli.managed.servers:TrlVllmServer",
    "llamacpp": "managed_cli.managed.servers:LlamaCppServer",
    "local": "managed_cli.managed.servers:LocalServer",
    "openai": "managed_cli.managed.dummy:OpenAIServer",
}
"""Server type → `module:Class`, imported on use: the dummy stands on this module."""


def server_for(config: APIServerConfig) -> Server:
    """The server of the class that belongs to `config.server_type`."""
    module, _, name = SERVER_CLASSES[config.server_type].partition(":")
    server: Server = getattr(importlib.import_module(module), name)(config)
    return server


class ServerManager:
    """Several servers of one model; each context goes to the one with the fewest open and stays there."""

    def __init__(self, configs: APIServerConfig | Sequence[APIServerConfig]) -> None:
        given = [configs] if isinstance(configs, APIServerConfig) else list(configs)
        if not given:
            raise ConfigError("a ServerManager needs at least one server")
        self.servers = [server_for(config) for config in given]

    @contextlib.asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,  # Any: one of ours, or a transformers tokenizer
        track_tree: bool = False,
        history: History = "template",
        metadata: Mapping[str, Any] | None = None,  # Any: JSON values
    ) -> AsyncIterator[ManagedServer]:
        """A fresh context on the least busy server; leaving the block ends it."""
        server = min(self.servers, key=lambda candidate: candidate.outstanding)
        async with server.managed_server(tokenizer, track_tree, history, metadata) as managed:
            yield managed

    async def aclose(self) -> None:
        """Close every server."""
        for server in self.servers:
            await server.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def llamacpp_tokenizer(backend: LlamaCppBackend) -> LlamaCppTokenizer:
    """The tokenizer inside the llama.cpp server behind `backend`."""
    vocab_size = backend.info.vocab_size
    if vocab_size is None:
        raise TokenizerError(f"{backend.label} does not say how large its vocabulary is")
    return LlamaCppTokenizer(
        backend.base_url,
        label=backend.label,
        name=f"llama.cpp's own, of {backend.info.model}",
        api_key=backend.config.api_key,
        vocab_size=vocab_size,
        chat_template=backend.chat_template,
        bos_token=backend.bos_token,
        eos_token=backend.eos_token,
    )


def first_loadable(names: Sequence[str], backend: Backend, shelf: TokenizerShelf) -> HuggingFaceTokenizer:
    """The first of `names` that loads here.

    Raises:
        TokenizerError: none does; it says what was tried.
    """
    failures = []
    for name in names:
        try:
            return shelf.loaded(name)
        except TokenizerError as error:
            failures.append(f"{name}: {error.details[0] if error.details else error}")
    tried = failures or ["the server does not name its tokenizer"]
    raise TokenizerError(
        f"no tokenizer for the {backend.server_type} server at {backend.base_url}",
        details=tried,
        hint="name one that this machine can load with --tokenizer: a directory, or a Hugging Face name",
    )


def differences(one: ServerInfo, other: ServerInfo) -> list[str]:
    """What two servers say of themselves that one run cannot have in two ways, in words."""
    pairs = {
        "model": (one.model, other.model),
        "tokenizer": (one.tokenizer_name, other.tokenizer_name),
        "context length": (one.context_length, other.context_length),
        "logprobs": (one.logprobs_mode, other.logprobs_mode),
    }
    return [f"{name}: {first} and {second}" for name, (first, second) in pairs.items() if first != second]


async def check_tokenizer(backend: Backend, tokenizer: Tokenizer) -> None:
    """Return when the server's ids of some telling texts are ours, or when it has no way to tell.

    Raises:
        TokenizerError: they differ; the first difference is shown.
    """
    if tokenizer.over_network:
        return  # it is the server's own
    for text in PROBE_TEXTS:
        theirs = await backend.tokenize(text, add_special_tokens=False)
        if theirs is None:
            return
        difference = first_disagreement(tokenizer, text, theirs)
        if difference is not None:
            raise TokenizerError(
                f"the tokenizer {tokenizer.name} is not the one of the {backend.server_type} server "
                f"at {backend.base_url}",
                details=[difference],
                hint="name the model's own tokenizer with --tokenizer",
            )
