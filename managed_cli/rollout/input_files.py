"""The files of one run: arguments and globs as files, each named so that a row tells where its prompt came from."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import STDIN_ARGUMENT, InputSource, input_source

GLOB_CHARACTERS = frozenset("*?[")
"""What makes an argument a pattern, where no file has that very name."""


@dataclasses.dataclass(frozen=True, slots=True)
class InputFiles:
    """Files that are read one after the other, as one input.

    Attributes:
        labels: one per file, for rows: its name, with as many of its folders as it takes to tell the files apart.
    """

    files: tuple[InputSource, ...]
    labels: tuple[str, ...]

    @classmethod
    def of(cls, given: Path | InputSource | InputFiles) -> InputFiles:
        """One file as an input of its own; several as they are."""
        if isinstance(given, InputFiles):
            return given
        source = InputSource.of(given)
        return cls((source,), (source.label,))

    @property
    def name(self) -> str:
        """The input in a message: the only file's name, or the first one's and how many others there are."""
        first, others = self.files[0].name, len(self.files) - 1
        if not others:
            return first
        return f"{first} and {others} other file{'s' if others > 1 else ''}"


@contextlib.contextmanager
def input_files(arguments: Sequence[str]) -> Iterator[InputFiles]:
    """The input that command-line arguments name: files, globs, pipes, and once `-` for stdin.

    Raises:
        InputError: a glob matches nothing, a file is named twice, or a stream cannot be kept.
    """
    names = expanded(arguments)
    with contextlib.ExitStack() as stack:
        files = tuple(stack.enter_context(input_source(name)) for name in names)
        yield InputFiles(files, distinct_labels([file.name for file in files]))


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with globs replaced by the files they match, sorted by name.

    Raises:
        InputError: a glob matches nothing, or two arguments mean the same file.
    """
    named_by: dict[object, str] = {}
    names: list[str] = []
    for argument in arguments:
        for name in _matches(argument):
            identity = _identity(name)
            if identity in named_by and name == STDIN_ARGUMENT:
                raise InputError("`-` is named twice: stdin can be read only once")
            if identity in named_by:
                arguments_shown = " and ".join(f"`{each}`" for each in dict.fromkeys((named_by[identity], argument)))
                raise InputError(
                    f"{name} is named twice, by {arguments_shown}", hint="each file is read once; name it once"
                )
            named_by[identity] = argument
            names.append(name)
    return names


def _matches(argument: str) -> list[str]:
    if argument == STDIN_ARGUMENT or GLOB_CHARACTERS.isdisjoint(argument) or _exists(argument):
        return [argument]
    found = glob.glob(argument, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    matches = sorted(name for name in found if not Path(name).is_dir())
    if not matches:
        raise InputError(f"{argument}: no file matches", hint="`*` stays inside a folder, `**` goes through all below")
    return matches


def _exists(argument: str) -> bool:
    try:
        return Path(argument).exists()
    except OSError:
        return False  # too long for a name; opening it says so


def _identity(name: str) -> object:
    """What two names of one file share; of anything else than a file, the name itself."""
    if name == STDIN_ARGUMENT:
        return name
    try:
        status = Path(name).stat()
    except (OSError, ValueError):
        return name
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else name


def distinct_labels(names: Sequence[str]) -> tuple[str, ...]:
    """For each name its last part, with just as many folders before it as it takes that no two are the same."""
    parts = [Path(name).parts or (name,) for name in names]
    depths = [1] * len(names)
    while True:
        labels = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        count = collections.Counter(labels)
        deeper = [
            min(depth + (count[label] > 1), len(part)) for depth, label, part in zip(depths, labels, parts, strict=True)
        ]
        if deeper == depths:
            return tuple(labels)
        depths = deeper
