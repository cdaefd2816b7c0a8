"""Rollouts recorded as rows that a trainer can trust: tokens, masks and logprobs, aligned.

The names below load on first use, so that `managed-cli --help` and `inspect` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from managed_cli.errors import ManagedCliError as ManagedCliError
    from managed_cli.node import SequenceNode as SequenceNode
    from managed_cli.types import SamplingParams as SamplingParams

_HOMES = {
    "ManagedCliError": "managed_cli.errors",
    "SamplingParams": "managed_cli.types",
    "SequenceNode": "managed_cli.node",
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
