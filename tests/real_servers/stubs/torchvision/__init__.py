"""Stands in for torchvision: SGLang imports it at start, and uses it for images only."""

from __future__ import annotations

import importlib.machinery
import sys
import types

__version__ = "0.0.0"

_MODULES = (
    "io",
    "models",
    "ops",
    "ops.boxes",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
    "utils",
)


class _Missing:
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Takes anything: classes are made at import time."""

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise RuntimeError("torchvision is a stub here")

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing()


class _Names:
    """Stands in for an enum: each member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class _MissingModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        # Capitalised names are subclassed and checked with isinstance, so they must be classes.
        return type(name, (_Missing,), {}) if name[0].isupper() else _Missing()


def _add_modules() -> None:
    for name in _MODULES:
        full_name = f"{__name__}.{name}"
        module = _MissingModule(full_name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(full_name, None, is_package=True)
        sys.modules[full_name] = module
        parent, _, leaf = full_name.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
    sys.modules[f"{__name__}.transforms"].InterpolationMode = _Names()  # type: ignore[attr-defined] # made up above


_add_modules()
