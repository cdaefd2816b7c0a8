"""Stands in for SGLang's compiled kernels, which have no CPU build to install.

SGLang imports names of it at start and, with torch's own attention on a Llama model, calls none. Any name can be
imported, from here or from any module below; calling one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"  # SGLang 0.5.23 refuses older ones
__path__: list[str] = []


class _Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise RuntimeError(f"{self.__name__} is not available: sgl_kernel is a stub here")

    def __getattr__(self, name: str) -> _Missing:
        return _missing(self.__name__, name)


def _missing(owner: str, name: str) -> _Missing:
    # Dunder look-ups are Python asking what an object can do; the answer is nothing.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{owner}.{name}")


class _MissingModule(types.ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        return _missing(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_where: object) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def __getattr__(name: str) -> _Missing:
    return _missing(__name__, name)


sys.meta_path.insert(0, _Finder())
