"""Rollouts recorded as rows that a trainer can trust: tokens, masks and logprobs, aligned.

The names below load on first use, so that `managed-cli --help` and `inspect` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from managed_cli.errors import ManagedCliError as ManagedCliError
    from managed_cli.managed.config import APIServerConfig as APIServerConfig
    from managed_cli.managed.dummy import DummyManagedServer as DummyManagedServer
    from managed_cli.managed.dummy import OpenAIServer as OpenAIServer
    from managed_cli.managed.responses import ChatCompletion as ChatCompletion
    from managed_cli.managed.responses import Completion as Completion
    from managed_cli.managed.server import ManagedServer as ManagedServer
    from managed_cli.managed.servers import LlamaCppServer as LlamaCppServer
    from managed_cli.managed.servers import LocalServer as LocalServer
    from managed_cli.managed.servers import Server as Server
    from managed_cli.managed.servers import ServerManager as ServerManager
    from managed_cli.managed.servers import SGLangServer as SGLangServer
    from managed_cli.managed.servers import TrlVllmServer as TrlVllmServer
    from managed_cli.managed.servers import VLLMServer as VLLMServer
    from managed_cli.node import SequenceNode as SequenceNode
    from managed_cli.types import SamplingParams as SamplingParams

_HOMES = {
    "APIServerConfig": "managed_cli.managed.config",
    "ChatCompletion": "managed_cli.managed.responses",
    "Completion": "managed_cli.managed.responses",
    "DummyManagedServer": "managed_cli.managed.dummy",
    "LlamaCppServer": "managed_cli.managed.servers",
    "LocalServer": "managed_cli.managed.servers",
    "ManagedCliError": "managed_cli.errors",
    "ManagedServer": "managed_cli.managed.server",
    "OpenAIServer": "managed_cli.managed.dummy",
    "SGLangServer": "managed_cli.managed.servers",
    "SamplingParams": "managed_cli.types",
    "SequenceNode": "managed_cli.node",
    "Server": "managed_cli.managed.servers",
    "ServerManager": "managed_cli.managed.servers",
    "TrlVllmServer": "managed_cli.managed.servers",
    "VLLMServer": "managed_cli.managed.servers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:  # Any: classes of different modules
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
