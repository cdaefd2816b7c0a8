"""What a line means, whichever dialect it is written in: what of it is sent, and under which id.

    prompt         `prompt` (or the field that --prompt-field names): text, sent as it is
    token-ids      `prompt_token_ids`, `input_ids`, or a list of integers in `prompt`: sent as they are
    messages       `messages`, or a list of messages in `prompt`; an assistant message at the end is continued
    turns          `turns`: user turns, answered one after the other; `system` may stand beside them
    sharegpt       `conversations`; the assistant's turns at the end are dropped; `system` may stand beside them
    openai-batch   `custom_id` (the id) and `body`, a request for chat or text completions
    nemo-gym       `responses_create_params`, a request for OpenAI's Responses

All but the last two may have `sampling`, and the chats `tools`. All other fields are kept as metadata. Null is the same
as absent, since that is how tables are exported whose rows differ. A line that two dialects could claim is refused, but
for requests: what stands beside them is metadata.
"""

from __future__ import annotations

from typing import Any

from managed_cli.errors import InputError
from managed_cli.rollout.chats import parse_messages, parse_tools, parse_turns, with_system
from managed_cli.rollout.input_options import CHAT_FIELDS, DEFAULT_ID_FIELD, InputFormat, InputOptions
from managed_cli.rollout.jsonl import fault, keys_shown
from managed_cli.rollout.openai_requests import (
    BATCH_ID_FIELD,
    RESPONSES_FIELD,
    is_batch_line,
    parse_batch_line,
    parse_nemo_gym_line,
)
from managed_cli.rollout.overrides import parse_overrides
from managed_cli.rollout.sharegpt import DROPPED_TURNS_FIELD, parse_conversation
from managed_cli.rollout.token_ids import TOKEN_ID_FIELDS, parse_token_ids
from managed_cli.types import Message

PROMPT_LIKE_FIELDS = ("question", "instruction", "problem", "query", "input", "text")
"""What published data sets call their prompts; a line with one of these gets a hint."""

_KIND_OF_FIELD: dict[str, InputFormat] = {
    "messages": "messages",
    "turns": "turns",
    "conversations": "sharegpt",
    **dict.fromkeys(TOKEN_ID_FIELDS, "token-ids"),
}
_COMPANIONS = frozenset({"system", "tools", "sampling"})
_TELLING_FIELDS = CHAT_FIELDS | {BATCH_ID_FIELD, *TOKEN_ID_FIELDS}
"""A line without any of these is a text prompt, or none."""

_EXPECTED: dict[InputFormat, str] = {
    "auto": "a non-empty string",
    "prompt": "a non-empty string",
    "messages": "a list of messages",
    "token-ids": "a list of token ids",
}


def take_id(record: dict[str, object], options: InputOptions) -> tuple[str, object]:
    """Field and value of the line's id, taken out of `record`; a batch line's own tells its dialect and stays."""
    own = options.id_field in (DEFAULT_ID_FIELD, BATCH_ID_FIELD)
    if BATCH_ID_FIELD in record and own and _envelope(record, options) == "openai-batch":
        return BATCH_ID_FIELD, record[BATCH_ID_FIELD]
    return options.id_field, record.pop(options.id_field, None)


def parse_content(
    record: dict[str, object], options: InputOptions
) -> tuple[InputFormat, dict[str, Any]]:  # Any: one type per key
    """What a line is, and what of it is sent in its final form; these fields are taken out of `record`.

    Raises:
        InputError: the line means nothing, two things, or something that cannot be sent. It has no file and line yet.
    """
    if (prompt := plain_prompt(record, options)) is not None:
        del record[options.text_field]
        return "prompt", {"prompt": prompt}
    envelope = _envelope(record, options)
    if envelope == "openai-batch":
        return envelope, parse_batch_line(record, options)
    if envelope == "nemo-gym":
        return envelope, parse_nemo_gym_line(record, options)
    field, value = _take_content(record, options)
    beside = {name: given for name in _COMPANIONS & record.keys() if (given := record.pop(name)) is not None}
    overrides = beside.pop("sampling", None)
    kind, content = _parse_content(field, value, beside, record, options)
    if overrides is not None and (parsed := parse_overrides(overrides, options.sampling)):
        content["sampling"] = parsed
    return kind, content


def plain_prompt(record: dict[str, object], options: InputOptions) -> str | None:
    """The text prompt of a line that can mean nothing else, as nearly all lines there are; else None."""
    if _TELLING_FIELDS.isdisjoint(record) and options.input_format in ("auto", "prompt"):
        prompt = record.get(options.text_field)
        if isinstance(prompt, str) and prompt:
            return prompt
    return None


def _envelope(record: dict[str, object], options: InputOptions) -> InputFormat | None:
    """The dialect of a line that is a request; None for one that is not, or whose prompt field was named."""
    if options.input_format != "auto":
        return options.input_format if options.input_format in ("openai-batch", "nemo-gym") else None
    if options.prompt_field is not None and record.get(options.prompt_field) is not None:
        return None
    if record.get(RESPONSES_FIELD) is not None:
        return "nemo-gym"
    return "openai-batch" if is_batch_line(record) else None


def _take_content(record: dict[str, object], options: InputOptions) -> tuple[str, object]:
    """Name and value of the field that holds what is sent."""
    names = _content_fields(options)
    found = [name for name in names if record.get(name) is not None]
    if options.input_format == "auto":
        if len(found) > 1:
            shown = " and ".join(f"`{name}`" for name in found)
            hint = "`--input-format` says what the lines are; their other fields are then kept as metadata"
            raise InputError(f"{shown}: expected exactly one of them, came {len(found)}", hint=hint)
        for name in (*names, RESPONSES_FIELD):
            if name in record and record[name] is None:
                del record[name]
    if not found:
        raise _no_prompt(record, options)
    return found[0], record.pop(found[0])


def _content_fields(options: InputOptions) -> tuple[str, ...]:
    """Where a line can hold what is sent; in a fixed format, the first that is there is meant."""
    wanted = options.input_format
    if wanted == "auto":
        return tuple(dict.fromkeys((options.text_field, *_KIND_OF_FIELD)))
    named = () if options.prompt_field is None else (options.prompt_field,)
    own = (name for name, kind in _KIND_OF_FIELD.items() if kind == wanted)
    default = () if wanted in ("turns", "sharegpt") else (options.text_field,)
    return tuple(dict.fromkeys((*named, *own, *default)))


def _parse_content(
    field: str, value: object, beside: dict[str, object], record: dict[str, object], options: InputOptions
) -> tuple[InputFormat, dict[str, Any]]:  # Any: one type per key
    """The kind of a line and what is sent; `beside` are its system message and tools."""
    kind = _kind(field, value, options)
    if kind == "prompt":
        _refuse_chat_only(beside, "a text prompt", field)
        return kind, {"prompt": value}
    if kind == "token-ids":
        _refuse_chat_only(beside, "token ids", field)
        return kind, {"prompt_ids": parse_token_ids(field, value)}
    system = beside.get("system")
    if system is not None and not isinstance(system, str):
        raise fault("system", "a string", system)
    content: dict[str, Any] = {}  # Any: as above
    if kind == "messages":
        if system is not None:
            raise InputError(f"`system`: stands beside `turns` only, expected it as the first of `{field}`")
        content["messages"] = _with_run_system(parse_messages(value, field), options)
    elif kind == "sharegpt":
        content["messages"] = _parse_sharegpt(value, system, record, options)
    else:
        content["turns"] = parse_turns(value)
        if (system := options.system if system is None else system) is not None:
            content["system"] = system
    if "tools" in beside and (tools := parse_tools(beside["tools"])):
        content["tools"] = tools
    return kind, content


def _kind(field: str, value: object, options: InputOptions) -> InputFormat:
    """What the value of a field is; for the prompt field, its type tells."""
    if field in _KIND_OF_FIELD and field != options.prompt_field:
        return _KIND_OF_FIELD[field]
    first = value[0] if isinstance(value, list) and value else None
    kind: InputFormat | None = None
    if isinstance(value, str) and value:
        kind = "prompt"
    elif isinstance(first, dict):
        kind = "messages"
    elif type(first) is int:
        kind = "token-ids"
    wanted = options.input_format
    if kind is None or wanted not in ("auto", kind):
        in_a_list = wanted == "auto" and isinstance(value, list)
        raise fault(field, "text, a list of messages or a list of token ids" if in_a_list else _EXPECTED[wanted], value)
    return kind


def _with_run_system(messages: tuple[Message, ...], options: InputOptions) -> tuple[Message, ...]:
    return messages if options.system is None else with_system(messages, options.system)


def _parse_sharegpt(
    value: object, system: str | None, record: dict[str, object], options: InputOptions
) -> tuple[Message, ...]:
    """The messages of a conversation; what is dropped of it is kept in `record`."""
    kept, dropped = parse_conversation(value, keep_last_assistant=options.keep_last_assistant)
    messages = parse_messages(kept, "conversations")
    if system is not None:
        if with_system(messages, system) == messages:
            raise InputError("`system`: expected one system message, `conversations` has one of its own")
        messages = with_system(messages, system)
    if dropped:
        record.setdefault(DROPPED_TURNS_FIELD, dropped)
    return _with_run_system(messages, options)


def _refuse_chat_only(beside: dict[str, object], what: str, field: str) -> None:
    """Raise for a field that would silently not be sent with what is no chat."""
    for name, value in beside.items():
        if value != []:
            raise InputError(f"`{name}`: belongs to a chat, and this line has {what} in `{field}`")


def _no_prompt(record: dict[str, object], options: InputOptions) -> InputError:
    came = f"an object with {keys_shown(record)}" if record else "an object without other fields"
    if options.input_format in ("auto", "prompt"):
        others = ", `messages` or `turns`" if options.input_format == "auto" else ""
        return InputError(f"expected `{options.text_field}`{others}, came {came}", hint=_likely_prompt(record))
    names = " or ".join(f"`{name}`" for name in _content_fields(options))
    return InputError(f"expected {names} in a line of the format {options.input_format}, came {came}")


def _likely_prompt(record: dict[str, object]) -> str | None:
    instruction, given = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and isinstance(given, str) and given:
        joined = '.prompt = .instruction + "\\n\\n" + .input'
        return (
            f"how `instruction` and `input` are joined is not guessed: `jq -c '{joined}' FILE` joins them into `prompt`"
        )
    likely = next((name for name in PROMPT_LIKE_FIELDS if isinstance(record.get(name), str)), None)
    return f"`--prompt-field {likely}` takes the prompt from `{likely}`" if likely else None
