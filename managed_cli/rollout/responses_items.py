"""The `input` of OpenAI's Responses API as messages of a chat."""

from __future__ import annotations

from typing import Any

from managed_cli.errors import InputError
from managed_cli.rollout.jsonl import fault, quoted
from managed_cli.types import Message

TEXT_PARTS = frozenset({"input_text", "output_text"})
"""Responses' types of text parts; a chat template knows `text`."""

_ITEM_KEYS = frozenset({"type", "id", "status"})
"""Keys that say something of an item and nothing of its message."""


def messages_of_items(place: str, value: object) -> object:
    """The messages that `input` means, still to be checked as messages.

    A string is the user's message. Function calls belong to the assistant's message before them, and their outputs
    are messages of a tool.

    Raises:
        InputError: an item that no chat template can be given; named by its index from 0.
    """
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise fault(place, "a string or a list of messages", value)
    messages: list[Message] = []
    for index, item in enumerate(value):
        _add_item(messages, f"{place}[{index}]", item)
    return messages


def _add_item(messages: list[Message], place: str, item: object) -> None:
    if not isinstance(item, dict):
        raise fault(place, "a message or another item, an object", item)
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message(item))
    elif kind == "function_call":
        _add_call(messages, place, item)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))})
    else:
        came = quoted(kind) if isinstance(kind, str) else "none"
        raise InputError(f"`{place}.type`: expected message, function_call or function_call_output, came {came}")


def _message(item: dict[str, Any]) -> Message:  # Any: JSON values
    message = {name: value for name, value in item.items() if name not in _ITEM_KEYS}
    if "content" in message:
        message["content"] = _content(message["content"])
    return message


def _content(content: object) -> object:
    """Content with its text parts as chat templates name them."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in TEXT_PARTS
        else part
        for part in content
    ]


def _add_call(messages: list[Message], place: str, item: dict[str, Any]) -> None:  # Any: JSON values
    for key in ("name", "arguments"):
        if not isinstance(item.get(key), str):
            raise fault(f"{place}.{key}", "a string", item.get(key))
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
    last = messages[-1] if messages else None
    if last is not None and last.get("role") == "assistant":
        earlier = last.get("tool_calls") or []
        if not isinstance(earlier, list):
            raise fault(f"{place}: `tool_calls` of the message before", "a list", earlier)
        messages[-1] = {**last, "tool_calls": [*earlier, call]}
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
