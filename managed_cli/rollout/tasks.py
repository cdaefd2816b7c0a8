"""Prompts in JSON lines → `Task`s, in two streaming passes: one checks everything, the other hands the tasks out.

What a line may hold stands at the top of `samples`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import InputSource, input_source, spooled_stdin
from managed_cli.rollout.jsonl import quoted
from managed_cli.rollout.sample_ids import canonical_json
from managed_cli.rollout.samples import InputOptions, RepeatedId, Task, parsed_samples

__all__ = [
    "InputOptions",
    "InputReport",
    "InputSource",
    "Task",
    "input_source",
    "read_tasks",
    "spooled_stdin",
    "validate_input",
]

MAX_BAD_LINES_SHOWN = 10
"""Enough to see a pattern, few enough for a terminal; the rest is counted."""

_FINGERPRINT_MODULUS = 2**256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputReport:
    """What an input holds, after every line that is used has been checked.

    Attributes:
        samples: text_prompts + chats + turn_lists.
        with_own_n: samples whose line sets n.
        own_choices: sum of their n.
        fingerprint: hex digest over ids and what is sent. The order of lines and other fields do not change it.
    """

    samples: int
    text_prompts: int
    chats: int
    turn_lists: int
    with_own_n: int
    own_choices: int
    fingerprint: str

    def choices(self, run_n: int) -> int:
        """How many choices a run records when all goes well."""
        return self.own_choices + (self.samples - self.with_own_n) * run_n


def validate_input(path: Path | InputSource, options: InputOptions) -> InputReport:
    """What the input holds; every line that would be used is read and checked.

    Raises:
        InputError: the file cannot be read, holds no samples, or has bad lines: the first
            10 are listed, all are counted.
    """
    source, counts, refused = InputSource.of(path), _Counts(), _Refused()
    for line, outcome in parsed_samples(source, options):
        if isinstance(outcome, Task):
            _refuse_system_with_text(source, options, outcome)
            counts.add(outcome)
        else:
            refused.add(line, outcome)
    for task in refused.resolve_repeats(source, options):
        counts.add(task)
    if refused.count:
        raise refused.error(source, checked=counts.samples + refused.count)
    if not counts.samples:
        raise InputError(f"{source.name} holds no samples, expected one JSON object per line")
    return counts.report()


def read_tasks(path: Path | InputSource, options: InputOptions) -> Iterator[Task]:
    """The samples, one at a time, in the order of their lines.

    Memory grows by the 80 bytes a sample that `SampleIds` needs, and by nothing else.

    Raises:
        InputError: at the first bad line; `validate_input` tells about all of them beforehand.
    """
    source = InputSource.of(path)
    for line, outcome in parsed_samples(source, options):
        if isinstance(outcome, Task):
            _refuse_system_with_text(source, options, outcome)
            yield outcome
        else:
            refused = _Refused()
            refused.add(line, outcome)
            yield from refused.resolve_repeats(source, options)
            if refused.count:
                raise refused.error(source, checked=1)


def _refuse_system_with_text(source: InputSource, options: InputOptions, task: Task) -> None:
    if options.system is not None and task.prompt is not None:
        raise InputError(
            f"{source.name}:{task.line}: --system applies to chats only, and this line is a text prompt",
            details=["no request was sent"],
            hint='`{"messages": [{"role": "user", "content": "…"}]}` makes a prompt a chat',
        )


class _Counts:
    """Running totals of the checked samples."""

    def __init__(self) -> None:
        self.samples = self.text_prompts = self.chats = self.turn_lists = self.with_own_n = self.own_choices = 0
        self._sum = 0

    def add(self, task: Task) -> None:
        self.samples += 1
        self.text_prompts += task.prompt is not None
        self.chats += task.messages is not None
        self.turn_lists += task.turns is not None
        n = task.overrides.get("n")
        if isinstance(n, int):
            self.with_own_n += 1
            self.own_choices += n
        digest = hashlib.sha256(canonical_json((task.sample_id, *_sent(task)))).digest()
        self._sum += int.from_bytes(digest, "big")

    def report(self) -> InputReport:
        return InputReport(
            samples=self.samples,
            text_prompts=self.text_prompts,
            chats=self.chats,
            turn_lists=self.turn_lists,
            with_own_n=self.with_own_n,
            own_choices=self.own_choices,
            fingerprint=f"{self._sum % _FINGERPRINT_MODULUS:064x}",
        )


def _sent(task: Task) -> tuple[object, ...]:
    return task.prompt, task.messages, task.turns, task.system, task.tools, task.overrides


class _Refused:
    """Bad lines: the first few in words, all of them counted."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: dict[int, InputError | RepeatedId] = {}

    def add(self, line: int, outcome: InputError | RepeatedId) -> None:
        self.count += 1
        if len(self._shown) < MAX_BAD_LINES_SHOWN:
            self._shown[line] = outcome

    def resolve_repeats(self, source: InputSource, options: InputOptions) -> list[Task]:
        """Name the first line of each repeated id; samples whose id no other line has are given back, not refused."""
        repeats = {line: item.task for line, item in self._shown.items() if isinstance(item, RepeatedId)}
        first = _first_lines(source, options, {task.sample_id for task in repeats.values()})
        acquitted = []
        for line, task in repeats.items():
            if task.sample_id in first:
                came = f"{quoted(task.sample_id)}, as in line {first[task.sample_id]}"
                self._shown[line] = InputError(f"`{options.id_field}`: expected an id of its own, came {came}")
            else:
                del self._shown[line]
                self.count -= 1
                acquitted.append(task)
        return acquitted

    def error(self, source: InputSource, *, checked: int) -> InputError:
        lines = [f"{source.name}:{line}: {fault}" for line, fault in self._shown.items()]
        hints = [fault.hint for fault in self._shown.values() if isinstance(fault, InputError) and fault.hint]
        if self.count > len(lines):
            lines.append(f"… and {self.count - len(lines)} more")
        return InputError(
            f"{self.count} of {checked} samples in {source.name} cannot be used; no request was sent",
            details=lines,
            hint=hints[0] if hints else None,
        )


def _first_lines(source: InputSource, options: InputOptions, wanted: set[str]) -> dict[str, int]:
    """Sample id → the first line that has it; a further pass, which only an input with repeated ids costs."""
    first: dict[str, int] = {}
    for line, outcome in parsed_samples(source, options) if wanted else ():
        if isinstance(outcome, Task) and outcome.sample_id in wanted:
            first.setdefault(outcome.sample_id, line)
    return first
