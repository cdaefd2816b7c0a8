"""One line → one `Task`, or what is wrong with the line.

A line is a JSON object with exactly one of

    prompt     a string, sent as it is (or the field that --prompt-field names)
    messages   a chat; an assistant message at the end is continued
    turns      user turns, answered one after the other; `system` may stand beside them

and, if it likes, `id`, `tools` (for chats) and `sampling`. All other fields are kept as metadata. Null is the same as
absent, since that is how tables are exported whose rows differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from managed_cli.errors import ConfigError, InputError
from managed_cli.rollout.chats import parse_messages, parse_tools, parse_turns, with_system
from managed_cli.rollout.inputs import InputSource, numbered_lines
from managed_cli.rollout.jsonl import fault, keys_shown, parse_object
from managed_cli.rollout.overrides import parse_overrides
from managed_cli.rollout.sample_ids import SampleIds, canonical_json
from managed_cli.types import Message, SamplingParams

DEFAULT_PROMPT_FIELD = "prompt"
DEFAULT_ID_FIELD = "id"

CHAT_FIELDS = frozenset({"messages", "turns", "system", "tools", "sampling"})
"""Fields with a meaning of their own, which no option can rename."""

PROMPT_LIKE_FIELDS = ("question", "instruction", "problem", "query", "input", "text")
"""What published data sets call their prompts; a line with one of these gets a hint."""

_NO_OVERRIDES: Mapping[str, object] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One sample to roll out; exactly one of `prompt`, `messages` and `turns` is set.

    Attributes:
        sample_id: the line's id, or one derived from what is sent; never from its position.
        messages: a chat, the run's system message included.
        turns: user turns; the model answers each before the next is sent.
        system: system message in front of `turns`; None otherwise.
        tools: descriptions for the chat template.
        overrides: checked sampling parameters of this line, by the names of `SamplingParams`.
        fields: all other fields of the line.
        source: file name and line: `prompts.jsonl:41`.
        line: physical line, from 1.
    """

    sample_id: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    turns: tuple[str, ...] | None = None
    system: str | None = None
    tools: tuple[Message, ...] | None = None
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    source: str
    line: int

    @property
    def continue_final(self) -> bool:
        """Whether the chat ends with an assistant message, which the model continues."""
        return self.messages is not None and self.messages[-1]["role"] == "assistant"

    def sampling(self, run: SamplingParams) -> SamplingParams:
        """The run's sampling parameters with this line's put over them."""
        changes: dict[str, Any] = dict(self.overrides)  # Any: the types were checked when the line was read
        return dataclasses.replace(run, **changes) if changes else run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How lines are understood.

    Attributes:
        prompt_field: takes the place of `prompt`; None for that name.
        id_field: where the id stands. Under another name than `id`, every line must have one.
        system: system message for chats that have none.
        limit: use only the first samples; None for all.
        sampling: the run's settings, against which n and temperature of a line are checked; None to check lines alone.

    Raises:
        ConfigError: options that cannot be meant together.
    """

    prompt_field: str | None = None
    id_field: str = DEFAULT_ID_FIELD
    system: str | None = None
    limit: int | None = None
    sampling: SamplingParams | None = None

    def __post_init__(self) -> None:
        for option, name in (("--prompt-field", self.prompt_field), ("--id-field", self.id_field)):
            if name in CHAT_FIELDS:
                raise ConfigError(f"{option} {name}: `{name}` has a meaning of its own, expected another field")
        if self.id_field == self.text_field:
            raise ConfigError(f"--id-field {self.id_field}: expected another field than the prompt's")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: expected at least 1")

    @property
    def text_field(self) -> str:
        """The field of text prompts."""
        return DEFAULT_PROMPT_FIELD if self.prompt_field is None else self.prompt_field


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedId:
    """A sample whose id an earlier line seems to have."""

    task: Task


def parsed_samples(source: InputSource, options: InputOptions) -> Iterator[tuple[int, Task | RepeatedId | InputError]]:
    """Line number, and the sample or what is wrong with it; blank lines are left out."""
    ids, used = SampleIds(), 0
    for number, line in numbered_lines(source):
        if not line or line.isspace():
            continue
        outcome: Task | RepeatedId | InputError
        try:
            outcome = _parse_sample(parse_object(line), f"{source.label}:{number}", number, options, ids)
        except InputError as error:
            outcome = error
        yield number, outcome
        used += 1
        if used == options.limit:
            return


def _parse_sample(
    record: dict[str, object], place: str, line: int, options: InputOptions, ids: SampleIds
) -> Task | RepeatedId:
    """The sample of one line; `record` is emptied of all but its other fields."""
    given_id = _parse_id(record.pop(options.id_field, None), options)
    content = _parse_content(record, options)
    sample_id = ids.derive(canonical_json(content)) if given_id is None else given_id
    is_new = not ids.is_taken_as_given(sample_id) if given_id is None else ids.give(sample_id)
    task = Task(
        sample_id=sample_id,
        prompt=content.get("prompt"),
        messages=content.get("messages"),
        turns=content.get("turns"),
        system=content.get("system"),
        tools=content.get("tools"),
        overrides=content.get("sampling", _NO_OVERRIDES),
        fields=record,
        source=place,
        line=line,
    )
    return task if is_new else RepeatedId(task)


def _parse_id(value: object, options: InputOptions) -> str | None:
    """The id of a line as text; None where one is to be derived."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None and options.id_field == DEFAULT_ID_FIELD:
        return None
    if value is None:
        raise InputError(f"`{options.id_field}`: expected an id, the line has none")
    raise fault(options.id_field, "an id, a non-empty string or an integer", value)


def _parse_content(record: dict[str, object], options: InputOptions) -> dict[str, Any]:  # Any: one type per key
    """What of a line is sent, by field name, in its final form; these fields are taken out of `record`."""
    prompt = record.pop(options.text_field, None)
    chat = {}
    if not CHAT_FIELDS.isdisjoint(record):
        chat = {name: value for name in CHAT_FIELDS & record.keys() if (value := record.pop(name)) is not None}
    overrides = chat.pop("sampling", None)
    content: dict[str, Any] = {}
    if "messages" in chat or "turns" in chat:
        content = _parse_chat(prompt, chat, options)
    elif isinstance(prompt, str) and prompt:
        _refuse_chat_only(chat, options)
        content = {"prompt": prompt}
    elif prompt is not None:
        hint = "`messages` is the field for chats" if isinstance(prompt, list) else None
        raise fault(options.text_field, "a non-empty string", prompt, hint=hint)
    else:
        raise _no_prompt(record, options)
    if overrides is not None and (parsed := parse_overrides(overrides, options.sampling)):
        content["sampling"] = parsed
    return content


def _parse_chat(prompt: object, chat: dict[str, object], options: InputOptions) -> dict[str, Any]:  # Any: as above
    together = [options.text_field] if prompt is not None else []
    together += [name for name in ("messages", "turns") if name in chat]
    if len(together) > 1:
        names = " and ".join(f"`{name}`" for name in together)
        raise InputError(f"{names}: expected exactly one of them, came {len(together)}")
    content: dict[str, Any] = {}
    system = chat.get("system")
    if "messages" in chat:
        if system is not None:
            raise InputError("`system`: stands beside `turns` only, expected it as the first of `messages`")
        messages = parse_messages(chat["messages"])
        content["messages"] = messages if options.system is None else with_system(messages, options.system)
    else:
        content["turns"] = parse_turns(chat["turns"])
        if system is not None and not isinstance(system, str):
            raise fault("system", "a string", system)
        if (system := options.system if system is None else system) is not None:
            content["system"] = system
    if "tools" in chat and (tools := parse_tools(chat["tools"])):
        content["tools"] = tools
    return content


def _refuse_chat_only(chat: dict[str, object], options: InputOptions) -> None:
    """Raise for a field that would silently not be sent with a text prompt."""
    for name, value in chat.items():
        if value != []:
            raise InputError(f"`{name}`: belongs to a chat, and this line has a text prompt in `{options.text_field}`")


def _no_prompt(record: dict[str, object], options: InputOptions) -> InputError:
    came = f"an object with {keys_shown(record)}" if record else "an object without other fields"
    likely = next((name for name in PROMPT_LIKE_FIELDS if isinstance(record.get(name), str)), None)
    hint = f"`--prompt-field {likely}` takes the prompt from `{likely}`" if likely else None
    return InputError(f"expected `{options.text_field}`, `messages` or `turns`, came {came}", hint=hint)
