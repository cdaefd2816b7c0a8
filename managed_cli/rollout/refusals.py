"""Lines that cannot be used: which ids really repeat, and what is said of all bad lines together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from managed_cli.errors import InputError
from managed_cli.rollout.input_files import InputFiles
from managed_cli.rollout.input_options import DEFAULT_ID_FIELD, InputOptions
from managed_cli.rollout.jsonl import quoted
from managed_cli.rollout.openai_requests import BATCH_ID_FIELD
from managed_cli.rollout.samples import BadLine, Origin, RepeatedId, SettledIds, SettledLine, Task, parsed_samples

MAX_BAD_LINES_SHOWN = 10
"""Enough to see a pattern, few enough for a terminal; the rest is counted."""

FirstPlaces = Mapping[str, tuple[Origin, int]]
"""Sample id → the first line that has it."""


@overload
def settled(files: InputFiles, options: InputOptions) -> Iterator[Task | BadLine]: ...
@overload
def settled(
    files: InputFiles, options: InputOptions, *, earlier: SettledIds | None
) -> Iterator[Task | BadLine | SettledLine]: ...
def settled(
    files: InputFiles, options: InputOptions, *, earlier: SettledIds | None = None
) -> Iterator[Task | BadLine | SettledLine]:
    """The samples in the order of their lines; each line that cannot be used is a bad one.

    An input with repeated ids is read twice more to find them: their first places are then kept in memory, unless bad
    lines end the run anyway.

    Args:
        earlier: finds lines that earlier sessions have settled.
    """
    first: FirstPlaces | None = None
    for origin, number, outcome in parsed_samples(files, options, settled=earlier):
        if isinstance(outcome, RepeatedId):
            if options.on_bad_line == "fail":
                first = _first_places(files, options, {outcome.task.sample_id})
            elif first is None:
                first = _first_places(files, options, _repeated_ids(files, options))
            yield _resolved(outcome, first, origin, number, options)
        else:
            yield outcome


def _resolved(
    repeat: RepeatedId, first: FirstPlaces, origin: Origin, number: int, options: InputOptions
) -> Task | BadLine:
    """The sample where no other line has its id, whose hash only met another's; else what is wrong with it."""
    task = repeat.task
    there, line = first[task.sample_id]
    if (there, line) == (origin, number):
        return task
    as_in = there.place_seen_from(origin, line)
    is_batch = task.kind == "openai-batch" and options.id_field == DEFAULT_ID_FIELD
    field = BATCH_ID_FIELD if is_batch else options.id_field
    return BadLine(
        sample_id=repeat.spare_id,
        source=task.source,
        line=number,
        place=origin.place(number),
        error=InputError(f"`{field}`: expected an id of its own, came {quoted(task.sample_id)}, as in {as_in}"),
    )


def _repeated_ids(files: InputFiles, options: InputOptions) -> set[str]:
    outcomes = (outcome for _, _, outcome in parsed_samples(files, options))
    return {outcome.task.sample_id for outcome in outcomes if isinstance(outcome, RepeatedId)}


def _first_places(files: InputFiles, options: InputOptions, wanted: set[str]) -> FirstPlaces:
    """Where the wanted ids stand first; a pass of its own, which only an input with repeated ids costs."""
    first: dict[str, tuple[Origin, int]] = {}
    for origin, number, outcome in parsed_samples(files, options) if wanted else ():
        sample_id = outcome.task.sample_id if isinstance(outcome, RepeatedId) else outcome.sample_id
        if sample_id in wanted:
            first.setdefault(sample_id, (origin, number))
            if len(first) == len(wanted):
                break
    return first


class Refusals:
    """Lines that cannot be used: the first few in words, all of them counted."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[tuple[Origin, int, BadLine | RepeatedId]] = []

    @property
    def first(self) -> tuple[BadLine, ...]:
        """The first bad lines; of repeated ids, those that are resolved."""
        return tuple(outcome for _, _, outcome in self._first if isinstance(outcome, BadLine))

    def add(self, origin: Origin, number: int, outcome: BadLine | RepeatedId) -> None:
        """One more line that seems bad."""
        self.count += 1
        if len(self._first) < MAX_BAD_LINES_SHOWN:
            self._first.append((origin, number, outcome))

    def resolve_repeats(self, files: InputFiles, options: InputOptions) -> list[Task]:
        """Name the first line of each repeated id; samples whose id no other line has are given back, not refused."""
        wanted = {outcome.task.sample_id for _, _, outcome in self._first if isinstance(outcome, RepeatedId)}
        places = _first_places(files, options, wanted)
        acquitted: list[Task] = []
        seen, self._first = self._first, []
        for origin, number, outcome in seen:
            resolved = (
                _resolved(outcome, places, origin, number, options) if isinstance(outcome, RepeatedId) else outcome
            )
            if isinstance(resolved, Task):
                acquitted.append(resolved)
            else:
                self._first.append((origin, number, resolved))
        self.count -= len(acquitted)
        return acquitted

    def error(self, files: InputFiles, *, checked: int) -> InputError:
        """All of it as one error; `checked` is how many lines there were, good and bad."""
        return error_about(self.first, files, count=self.count, checked=checked)


def error_about(bad_lines: Sequence[BadLine], files: InputFiles, *, count: int, checked: int) -> InputError:
    """What is said of `count` bad lines, of which some are at hand."""
    lines = [str(bad) for bad in bad_lines]
    hints = [bad.error.hint for bad in bad_lines if bad.error.hint]
    if count > len(lines):
        lines.append(f"… and {count - len(lines)} more")
    return InputError(
        f"{count} of {checked} samples in {files.name} cannot be used; no request was sent",
        details=lines,
        hint=hints[0] if hints else None,
    )
