"""The chat fields of a line: `messages`, `turns`, `system` and `tools`, checked and otherwise kept as they came."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from managed_cli.errors import InputError
from managed_cli.rollout.jsonl import fault, quoted
from managed_cli.types import Message

SYSTEM_ROLES = frozenset({"system", "developer"})
"""Roles of a message that instructs the model; `developer` is OpenAI's newer word for it."""


def parse_messages(value: object, place: str = "messages") -> tuple[Message, ...]:
    """The messages of a chat, each with a role and text; `place` is the field they stand in.

    Raises:
        InputError: names the message by its index from 0.
    """
    if not isinstance(value, list) or not value:
        raise fault(place, "a list of messages", value)
    for index, message in enumerate(value):
        _check_message(f"{place}[{index}]", message)
    last = value[-1]
    if last["role"] == "assistant" and not content_text(last).strip():
        raise InputError(
            f"`{place}[{len(value) - 1}].content`: expected text, since an assistant message at the end is continued",
            hint="without that message the model begins the answer itself",
        )
    return tuple(value)


def _check_message(place: str, message: object) -> None:
    if not isinstance(message, dict):
        raise fault(place, "an object with `role` and `content`", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise fault(f"{place}.role", "a role such as `user`", role) if "role" in message else _missing(place, "role")
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and role == "assistant" and message.get("tool_calls"):
        return  # OpenAI's form of a message that only calls tools
    if "content" not in message:
        raise _missing(place, "content")
    if not isinstance(content, list) or not content:
        raise fault(f"{place}.content", "a string or a list of text parts", content)
    for index, part in enumerate(content):
        _check_part(f"{place}.content[{index}]", part)


def _missing(place: str, name: str) -> InputError:
    return InputError(f"`{place}`: expected `role` and `content`, `{name}` is missing")


def _check_part(place: str, part: object) -> None:
    if not isinstance(part, dict):
        raise fault(place, 'an object such as {"type": "text", "text": "…"}', part)
    kind = part.get("type")
    if kind != "text":
        came = quoted(kind) if isinstance(kind, str) else "none"
        raise InputError(f'`{place}`: expected a part of type "text", came type {came}')
    if not isinstance(part.get("text"), str):
        raise fault(f"{place}.text", "a string", part.get("text"))


def content_text(message: Message) -> str:
    """The text of a message; "" for one that only calls tools."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def parse_turns(value: object) -> tuple[str, ...]:
    """The user's turns, in order; the model answers each.

    Raises:
        InputError: names the turn by its index from 0.
    """
    if not isinstance(value, list) or not value:
        raise fault("turns", "a list of user turns", value)
    for index, turn in enumerate(value):
        if not isinstance(turn, str) or not turn:
            raise fault(f"turns[{index}]", "a non-empty string", turn)
    return tuple(value)


def parse_tools(value: object, place: str = "tools") -> tuple[Message, ...] | None:
    """Tool descriptions for the chat template; None for an empty list.

    Tables keep them as the JSON text of such a list, since their columns have one type for all rows; that is read too.

    Raises:
        InputError: it is no list of objects.
    """
    tools = _decoded(value) if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise fault(place, "a list of tool descriptions", value)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise fault(f"{place}[{index}]", "an object that describes a tool", tool)
    return tuple(tools) or None


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def with_system(messages: Sequence[Message], system: str) -> tuple[Message, ...]:
    """`messages` behind a system message; as they are where they hold one."""
    if any(message["role"] in SYSTEM_ROLES for message in messages):
        return tuple(messages)
    return ({"role": "system", "content": system}, *messages)
