"""An input → its samples, in two streaming passes: one checks everything, the other hands the samples out.

What a line may hold stands at the top of `dialects`. An input is one file or several, read one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from managed_cli.errors import InputError
from managed_cli.rollout.digest_sum import DigestSum
from managed_cli.rollout.input_files import InputFiles, input_files
from managed_cli.rollout.input_options import InputPart
from managed_cli.rollout.inputs import InputSource, input_source, spooled_stdin
from managed_cli.rollout.refusals import MAX_BAD_LINES_SHOWN, Refusals, error_about, settled
from managed_cli.rollout.sample_ids import LateIds, canonical_json
from managed_cli.rollout.samples import (
    LINES_AT_ONCE,
    BadLine,
    InputOptions,
    Origin,
    PlainLine,
    RepeatedId,
    SettledIds,
    SettledLine,
    Task,
    parsed_samples,
)
from managed_cli.storage.standing import SampleStanding

__all__ = [
    "BadLine",
    "InputFiles",
    "InputOptions",
    "InputReport",
    "InputSource",
    "SettledLine",
    "Task",
    "input_files",
    "input_source",
    "read_owed_samples",
    "read_samples",
    "read_tasks",
    "spooled_stdin",
    "validate_input",
]

Input = Path | InputSource | InputFiles


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputReport:
    """What an input holds, after every line that is used has been checked.

    Attributes:
        samples: text_prompts + token_prompts + chats + turn_lists + bad_lines.
        bad_lines: lines that cannot be used and are failed samples; without `--on-bad-line skip` there are none.
        first_bad_lines: the first ten of them.
        kinds: samples of each dialect, bad lines left out.
        with_own_n: samples whose line sets n.
        own_choices: sum of their n.
        fingerprint: hex digest over ids and what is sent. The order of lines and other fields do not change it.
        recorded_earlier: where earlier sessions have settled all samples, how many of them are recorded; else 0.
        failed_earlier: and how many have failed.
    """

    samples: int
    text_prompts: int
    token_prompts: int = 0
    chats: int
    turn_lists: int
    bad_lines: int = 0
    first_bad_lines: tuple[BadLine, ...] = ()
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    with_own_n: int
    own_choices: int
    fingerprint: str
    recorded_earlier: int = 0
    failed_earlier: int = 0

    @property
    def owes_nothing(self) -> bool:
        """Whether it is known that earlier sessions have settled every sample."""
        return self.samples == self.recorded_earlier + self.failed_earlier

    def choices(self, run_n: int) -> int:
        """How many choices a run records when all goes well."""
        return self.own_choices + (self.samples - self.bad_lines - self.with_own_n) * run_n


Standings = Callable[[Sequence[str]], list[SampleStanding]]
"""What is still to be done for each of some samples."""


def validate_input(given: Input, options: InputOptions, standings: Standings | None = None) -> InputReport:
    """What the input holds; every line that would be used is read and checked.

    Args:
        standings: of an output that is resumed: whether anything is owed is found out too.

    Raises:
        InputError: a file cannot be read, holds no samples, or has bad lines that are not to be skipped (or nothing
            else): the first 10 are listed, all are counted.
    """
    files = InputFiles.of(given)
    counts = _counts_of(files, options, standings)
    if not counts.checked:
        raise InputError(f"{files.name} holds no samples, expected one JSON object per line")
    if counts.bad_lines == counts.samples and options.part is None:
        raise error_about(counts.first_bad_lines, files, count=counts.bad_lines, checked=counts.samples)
    return counts.report()


def _counts_of(files: InputFiles, options: InputOptions, standings: Standings | None) -> _Counts:
    """The counts over all samples; ids are compared while they come only where some seem to repeat.

    Under a system message of the run they always are: of what it has no place in, a repeated id is told first.

    Raises:
        InputError: bad lines that are not to be skipped.
    """
    counts, refusals, ids = _Counts(options.part, standings), Refusals(), LateIds()
    if options.system is None:
        _sort_out(parsed_samples(files, options, late=ids), counts, refusals, options)
    if options.system is not None or not ids.all_differ():
        counts, refusals = _Counts(options.part, standings), Refusals()
        if options.on_bad_line == "skip":
            for sample in settled(files, options):
                counts.add(sample)
        else:
            _sort_out(parsed_samples(files, options), counts, refusals, options)
            for task in refusals.resolve_repeats(files, options):
                counts.add(task)
    if refusals.count:
        raise refusals.error(files, checked=counts.checked + refusals.count)
    return counts


def _sort_out(
    outcomes: Iterable[tuple[Origin, int, Task | RepeatedId | BadLine | PlainLine]],
    counts: _Counts,
    refusals: Refusals,
    options: InputOptions,
) -> None:
    """Samples to the counts, what cannot be one to the refusals."""
    skips = options.on_bad_line == "skip"
    for origin, number, outcome in outcomes:
        if isinstance(outcome, PlainLine):
            counts.add_plain(outcome)
        elif isinstance(outcome, Task) or (skips and isinstance(outcome, BadLine)):
            counts.add(outcome)
        else:
            refusals.add(origin, number, outcome)


def read_samples(given: Input, options: InputOptions) -> Iterator[Task | BadLine]:
    """The samples, one at a time, in the order of their lines; with `on_bad_line` at `skip`, bad lines among them.

    Memory grows by the 9 bytes a sample that `SampleIds` needs, and by nothing else but what `settled` says.

    Raises:
        InputError: at the first bad line that is not skipped; `validate_input` tells about all of them beforehand.
    """
    return (sample for sample in _read(given, options, None) if not isinstance(sample, SettledLine))


def read_owed_samples(
    given: Input, options: InputOptions, standings: Standings | None
) -> Iterator[Task | BadLine | SettledLine]:
    """As `read_samples`; a line whose id says that its sample is settled may be told by that alone.

    Args:
        standings: what is still to be done for each of some samples; None where all are owed.
    """
    if standings is None or options.on_bad_line == "skip":
        return _read(given, options, None)
    return _read(given, options, SettledIds(options, standings))


def _read(given: Input, options: InputOptions, earlier: SettledIds | None) -> Iterator[Task | BadLine | SettledLine]:
    """The samples of the part that is used.

    Raises:
        InputError: at the first bad line that is not skipped; `validate_input` tells about all of them beforehand.
    """
    files = InputFiles.of(given)
    for sample in settled(files, options, earlier=earlier):
        if isinstance(sample, BadLine) and options.on_bad_line == "fail":
            raise error_about([sample], files, count=1, checked=1)
        if options.part is None or options.part.holds(sample.sample_id):
            yield sample


def read_tasks(given: Input, options: InputOptions) -> Iterator[Task]:
    """The samples of `read_samples` that can be rolled out.

    Raises:
        InputError: as `read_samples`.
    """
    return (sample for sample in read_samples(given, options) if isinstance(sample, Task))


class _Earlier:
    """How many samples earlier sessions have recorded, and how many have failed; zeros once one is owed."""

    def __init__(self, standings: Standings | None) -> None:
        self.recorded = self.failed = 0
        self._standings = standings
        self._waiting: list[str] = []

    def add(self, sample_id: str) -> None:
        if self._standings is not None:
            self._waiting.append(sample_id)
            if len(self._waiting) == LINES_AT_ONCE:
                self.look_up()

    def look_up(self) -> None:
        """Count those that were added since the last time."""
        if self._standings is None:
            return
        standings = self._standings(self._waiting)
        self.recorded += standings.count(SampleStanding.RECORDED)
        self.failed += standings.count(SampleStanding.FAILED)
        self._waiting.clear()
        if SampleStanding.OWED in standings:
            self.recorded = self.failed = 0
            self._standings = None


class _Counts:
    """Running totals of the checked samples, and among them of those of one part of the input."""

    def __init__(self, part: InputPart | None, standings: Standings | None) -> None:
        self._part = part
        self.checked = self.samples = self.bad_lines = self.with_own_n = self.own_choices = 0
        self.first_bad_lines: list[BadLine] = []
        self._text_prompts = self._token_prompts = self._chats = self._turn_lists = 0
        self._kinds: dict[str, int] = {}
        self._sum = DigestSum()
        self._earlier = _Earlier(standings)

    def add_plain(self, line: PlainLine) -> None:
        self.checked += 1
        if self._part is not None and not self._part.holds(line.sample_id):
            return
        self.samples += 1
        self._text_prompts += 1
        self._kinds["prompt"] = self._kinds.get("prompt", 0) + 1
        self._sum.add(canonical_json((line.sample_id, line.prompt)))
        self._earlier.add(line.sample_id)

    def add(self, sample: Task | BadLine) -> None:
        self.checked += 1
        if self._part is not None and not self._part.holds(sample.sample_id):
            return
        self.samples += 1
        if isinstance(sample, BadLine):
            self.bad_lines += 1
            if len(self.first_bad_lines) < MAX_BAD_LINES_SHOWN:
                self.first_bad_lines.append(sample)
            digested = canonical_json((sample.sample_id, "bad line"))
        else:
            self._add_task(sample)
            digested = canonical_json((sample.sample_id, *_sent(sample)))
        self._sum.add(digested)
        self._earlier.add(sample.sample_id)

    def _add_task(self, task: Task) -> None:
        if task.prompt is not None:
            self._text_prompts += 1
        elif task.prompt_ids is not None:
            self._token_prompts += 1
        elif task.messages is not None:
            self._chats += 1
        else:
            self._turn_lists += 1
        self._kinds[task.kind] = self._kinds.get(task.kind, 0) + 1
        if task.overrides and isinstance(n := task.overrides.get("n"), int):
            self.with_own_n += 1
            self.own_choices += n

    def report(self) -> InputReport:
        self._earlier.look_up()
        return InputReport(
            samples=self.samples,
            text_prompts=self._text_prompts,
            token_prompts=self._token_prompts,
            chats=self._chats,
            turn_lists=self._turn_lists,
            bad_lines=self.bad_lines,
            first_bad_lines=tuple(self.first_bad_lines),
            kinds=dict(self._kinds),
            with_own_n=self.with_own_n,
            own_choices=self.own_choices,
            fingerprint=self._sum.hex(),
            recorded_earlier=self._earlier.recorded,
            failed_earlier=self._earlier.failed,
        )


def _sent(task: Task) -> tuple[object, ...]:
    """What is sent of a task; nothing else has as few parts as a bare text prompt."""
    if task.prompt is not None and not task.overrides:
        return (task.prompt,)
    prompt = task.prompt if task.prompt_ids is None else {"token_ids": task.prompt_ids}
    return prompt, task.messages, task.turns, task.system, task.tools, task.overrides
