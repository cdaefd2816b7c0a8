"""Server type → the class that speaks to it. A module is imported only when a server of its type is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import cast

from managed_cli.backends.base import Backend, BackendConfig
from managed_cli.errors import ConfigError

EMBEDDED = "local"
"""The engine that runs inside this process: it is started (`EmbeddedBackend.start`), not connected to."""

SERVER_TYPES: dict[str, str] = {
    "vllm": "managed_cli.backends.vllm:VLLMBackend",
    "sglang": "managed_cli.backends.sglang:SGLangBackend",
    "trl": "managed_cli.backends.trl:TRLBackend",
    "llamacpp": "managed_cli.backends.llamacpp:LlamaCppBackend",
    EMBEDDED: "managed_cli.backends.embedded:EmbeddedBackend",
    "openai": "managed_cli.backends.openai:OpenAIBackend",
}
"""Name → `module:Class`."""

DEFAULT_BASE_URLS: dict[str, str] = {
    "vllm": "http://127.0.0.1:8000",
    "sglang": "http://127.0.0.1:30000",
    "trl": "http://127.0.0.1:8000",
    "llamacpp": "http://127.0.0.1:8080",
    "openai": "https://api.openai.com",
}
"""Where a server of each type listens unless it is told otherwise."""


def backend_class(server_type: str) -> type:
    """The class for `server_type`, its module imported.

    Raises:
        ConfigError: there is no such type; similar names are hinted at.
    """
    place = SERVER_TYPES.get(server_type)
    if place is None:
        near = difflib.get_close_matches(server_type.lower(), SERVER_TYPES, n=2)
        raise ConfigError(
            f"--server-type {server_type!r} is not known",
            details=[f"known are: {', '.join(SERVER_TYPES)}"],
            hint=f"did you mean {' or '.join(near)}?" if near else None,
        )
    module, _, name = place.partition(":")
    return cast(type, getattr(importlib.import_module(module), name))


def make_backend(server_type: str, config: BackendConfig) -> Backend:
    """A backend for the server at `config.base_url`; nothing is sent yet.

    Raises:
        ConfigError: there is no such type, or it is the embedded engine, which has no address.
    """
    if server_type == EMBEDDED:
        raise ConfigError("the embedded engine has no address; it is started with EmbeddedBackend.start")
    return cast(Backend, backend_class(server_type)(config))
