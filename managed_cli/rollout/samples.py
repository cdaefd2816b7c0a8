"""The records of an input → samples, or what is wrong with them.

What a record may hold stands at the top of `dialects`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import msgspec

from managed_cli.errors import InputError
from managed_cli.rollout.dialects import parse_content, plain_prompt, take_id
from managed_cli.rollout.input_files import InputFiles
from managed_cli.rollout.input_options import CHAT_FIELDS, DEFAULT_ID_FIELD, InputFormat, InputOptions
from managed_cli.rollout.jsonl import fault, parse_object
from managed_cli.rollout.openai_requests import BATCH_ID_FIELD
from managed_cli.rollout.records import record_bytes, records_of
from managed_cli.rollout.sample_ids import LateIds, SampleIds, canonical_json
from managed_cli.storage.standing import SampleStanding
from managed_cli.types import Message, SamplingParams

__all__ = [
    "CHAT_FIELDS",
    "BadLine",
    "InputOptions",
    "Origin",
    "PlainLine",
    "RepeatedId",
    "Task",
    "parsed_samples",
]

LINES_AT_ONCE = 512
BYTES_AT_ONCE = 2**20
"""How much of an input is looked up among the settled samples together."""

BAD_LINE_SALT = b"bad line\0"
"""Keeps the ids of lines that cannot be used apart from those derived from what is sent."""


class Task(msgspec.Struct, frozen=True, kw_only=True):  # made a million times: in a third of a dataclass's time
    """One sample to roll out; exactly one of `prompt`, `prompt_ids`, `messages` and `turns` is set.

    Attributes:
        sample_id: the line's id, or one derived from what is sent; never from its position.
        prompt_ids: token ids, sent as they are; whether the vocabulary has them, only the server knows.
        messages: a chat, the run's system message included.
        turns: user turns; the model answers each before the next is sent.
        system: system message in front of `turns`; None otherwise.
        tools: descriptions for the chat template.
        overrides: checked sampling parameters of this line, by the names of `SamplingParams`.
        fields: all other fields of the line.
        kind: the dialect the line is written in.
        source: file name and line: `prompts.jsonl:41`, in Parquet `prompts.parquet:row 41`.
        line: physical line or row, from 1.
    """

    sample_id: str
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    turns: tuple[str, ...] | None = None
    system: str | None = None
    tools: tuple[Message, ...] | None = None
    overrides: Mapping[str, object] = {}
    fields: Mapping[str, object] = {}
    kind: InputFormat = "auto"
    source: str
    line: int

    @property
    def first_messages(self) -> tuple[Message, ...] | None:
        """The chat that is sent first, of a conversation its first turn; None for what is no chat."""
        if self.turns is None:
            return self.messages
        system: tuple[Message, ...] = () if self.system is None else ({"role": "system", "content": self.system},)
        return (*system, {"role": "user", "content": self.turns[0]})

    @property
    def continue_final(self) -> bool:
        """Whether the chat ends with an assistant message, which the model continues."""
        return self.messages is not None and self.messages[-1]["role"] == "assistant"

    def sampling(self, run: SamplingParams) -> SamplingParams:
        """The run's sampling parameters with this line's put over them."""
        changes: dict[str, Any] = dict(self.overrides)  # Any: the types were checked when the line was read
        return msgspec.structs.replace(run, **changes) if changes else run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be used, as a sample that has failed before it was sent.

    Attributes:
        sample_id: the line's own id where it has one that no earlier line has, else one derived from its bytes.
        source: file name and line, as in a `Task`.
        place: the same with the file as the user named it, for messages.
        error: what is wrong with it; has no file and line of its own.
    """

    sample_id: str
    source: str
    line: int
    place: str
    error: InputError

    def __str__(self) -> str:
        return f"{self.place}: {self.error}"


class PlainLine(msgspec.Struct, frozen=True, gc=False):
    """A line that has been checked, as far as that needs it: a text prompt, and nothing else that is sent."""

    sample_id: str
    prompt: str


class SettledLine(msgspec.Struct, frozen=True):
    """A line of which only the id was read: an earlier session has settled its sample."""

    sample_id: str
    standing: SampleStanding


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedId:
    """A sample whose id an earlier line seems to have; `spare_id` is another one for it."""

    task: Task
    spare_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """A file that lines come from, and how places in it are called: by `name` in messages, by `label` in rows."""

    name: str
    label: str
    unit: str

    def place(self, number: int) -> str:
        """The line in a message: `data/prompts.jsonl:41`."""
        return f"{self.name}:{self.unit}{number}"

    def source(self, number: int) -> str:
        """The line in a row: `prompts.jsonl:41`."""
        return f"{self.label}:{self.unit}{number}"

    def place_seen_from(self, other: Origin, number: int) -> str:
        """The line in a message about a line of `other`: `line 41` where that is the same file."""
        return f"{self.unit or 'line '}{number}" if other == self else self.place(number)


class SettledIds:
    """Tells of JSON lines, by their ids alone, whether an earlier session has settled their samples.

    Only for an input that has been checked, without lines to be skipped: there, ids are known to be different, and
    what else a settled line holds need not be read again, which takes twice the time.

    Args:
        standings: of samples.
    """

    def __init__(self, options: InputOptions, standings: Callable[[Sequence[str]], list[SampleStanding]]) -> None:
        self._standings = standings
        fields = [("id", str | int | None, None), ("other", msgspec.Raw, msgspec.Raw())]
        names = {"id": options.id_field, "other": BATCH_ID_FIELD}
        line = msgspec.defstruct("Line", fields, rename=names, gc=False)
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode  # Any: that struct

    def told(self, numbered: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | SettledLine]]:
        """The lines, with what is known of it in place of each that is one of a settled sample; some are read ahead."""
        lines: list[tuple[int, bytes]] = []
        size = 0
        for line in numbered:
            lines.append(line)
            size += len(line[1])
            if len(lines) == LINES_AT_ONCE or size > BYTES_AT_ONCE:
                yield from self._told(lines)
                lines, size = [], 0
        yield from self._told(lines)

    def _told(self, lines: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | SettledLine]]:
        ids = [self._id(line) for _, line in lines]
        standings = iter(self._standings([sample_id for sample_id in ids if sample_id is not None]))
        for (number, line), sample_id in zip(lines, ids, strict=True):
            if sample_id is None or (standing := next(standings)) is SampleStanding.OWED:
                yield number, line
            else:
                yield number, SettledLine(sample_id, standing)

    def _id(self, record: bytes) -> str | None:
        """The id of a line; None where it has to be read as a whole to know."""
        try:
            line = self._decode(record)
        except (msgspec.DecodeError, RecursionError):
            return None
        if line.other or not line.id:
            return None  # a batch line has its id elsewhere; a derived one takes the content
        return str(line.id)


@overload
def parsed_samples(
    files: InputFiles, options: InputOptions
) -> Iterator[tuple[Origin, int, Task | RepeatedId | BadLine]]: ...
@overload
def parsed_samples(
    files: InputFiles, options: InputOptions, *, settled: SettledIds | None
) -> Iterator[tuple[Origin, int, Task | RepeatedId | BadLine | SettledLine]]: ...
@overload
def parsed_samples(
    files: InputFiles, options: InputOptions, *, late: LateIds
) -> Iterator[tuple[Origin, int, Task | RepeatedId | BadLine | PlainLine]]: ...
def parsed_samples(
    files: InputFiles, options: InputOptions, *, settled: SettledIds | None = None, late: LateIds | None = None
) -> Iterator[tuple[Origin, int, Task | RepeatedId | BadLine | SettledLine | PlainLine]]:
    """For each record its file, its number, and the sample or what is wrong with it; blank lines are left out.

    Args:
        settled: finds lines that are to be passed over, in an input that has been checked.
        late: lines are only checked: this one keeps the ids, and knows in the end whether any two meet. Not for a run
            with a system message.

    Raises:
        InputError: a file cannot be read, or the run's system message has no place in a prompt.
    """
    ids, used = late or SampleIds(), 0
    for file, label in zip(files.files, files.labels, strict=True):
        records = records_of(file)
        origin = Origin(file.name, label, records.unit)
        numbered = records.numbered
        if settled is not None and records.parse is parse_object:
            numbered = settled.told(numbered)
        for number, record in numbered:
            if type(record) is SettledLine:
                yield origin, number, record
                used += 1
                if used == options.limit:
                    return
                continue
            outcome = _parse_sample(record, records.parse, origin, number, options, ids, is_brief=late is not None)
            if options.system is not None and isinstance(outcome, Task):
                _refuse_system_without_chat(outcome, origin)
            yield origin, number, outcome
            used += 1
            if used == options.limit:
                return


def _refuse_system_without_chat(task: Task, origin: Origin) -> None:
    what = "a text prompt" if task.prompt is not None else "token ids" if task.prompt_ids is not None else None
    if what is not None:
        raise InputError(
            f"{origin.place(task.line)}: --system applies to chats only, and this line is {what}",
            details=["no request was sent"],
            hint='`{"messages": [{"role": "user", "content": "…"}]}` makes a prompt a chat',
        )


def _parse_sample(
    record: Any,  # Any: a line's bytes or a row's columns
    parse: Callable[[Any], dict[str, object]],
    origin: Origin,
    number: int,
    options: InputOptions,
    ids: SampleIds,
    *,
    is_brief: bool,
) -> Task | RepeatedId | BadLine | PlainLine:
    given_id = None
    try:
        fields = parse(record)
        if is_brief and (line := _find_plain_line(fields, options, ids)) is not None:
            return line
        given_id = _take_id(fields, options)
        kind, content = parse_content(fields, options)
    except InputError as error:
        # It takes its own id where it can: who looks for a failure looks for that.
        sample_id = given_id if given_id is not None and ids.give(given_id) else _id_of_bytes(record, ids)
        place, source = origin.place(number), origin.source(number)
        return BadLine(sample_id=sample_id, source=source, line=number, place=place, error=error)
    sample_id = ids.derive(canonical_json(content)) if given_id is None else given_id
    is_new = not ids.is_taken_as_given(sample_id) if given_id is None else ids.give(sample_id)
    if "sampling" in content:
        content["overrides"] = content.pop("sampling")
    source = origin.source(number)
    task = Task(sample_id=sample_id, fields=fields, kind=kind, source=source, line=number, **content)
    return task if is_new else RepeatedId(task, _id_of_bytes(record, ids))


def _find_plain_line(fields: dict[str, object], options: InputOptions, ids: SampleIds) -> PlainLine | None:
    """The line where it is a text prompt and has a usable id or none; `fields` are left as they are."""
    prompt = plain_prompt(fields, options)
    if prompt is None:
        return None
    sample_id = fields.get(options.id_field)
    if type(sample_id) is int:
        sample_id = str(sample_id)
    if isinstance(sample_id, str) and sample_id:
        ids.give(sample_id)
    elif sample_id is None and options.id_field == DEFAULT_ID_FIELD:
        sample_id = ids.derive(canonical_json({"prompt": prompt}))
    else:
        return None
    return PlainLine(sample_id, prompt)


def _id_of_bytes(record: bytes | dict[str, object], ids: SampleIds) -> str:
    """An id for what cannot have its own, the same in every run over the same lines."""
    return ids.derive(BAD_LINE_SALT + record_bytes(record))


def _take_id(record: dict[str, object], options: InputOptions) -> str | None:
    """The id of a line as text; None where one is to be derived."""
    field, value = take_id(record, options)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None and field == DEFAULT_ID_FIELD:
        return None
    if value is None:
        raise InputError(f"`{field}`: expected an id, the line has none")
    raise fault(field, "an id, a non-empty string or an integer", value)
