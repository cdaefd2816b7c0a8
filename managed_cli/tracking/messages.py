"""When two chat messages say the same, and what a conversation is once its answer is there.

A message is compared by everything that a chat template may read. Keys whose value is empty are as good as absent:
clients send back `tool_calls: None` and the like with what they were given. Content given as text parts is the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from managed_cli.types import Message

PART_SEPARATOR = "\n"
"""Stands between the text parts of one content."""


def content_text(content: object) -> str:
    """The text of a message's content: itself, its text parts joined, or nothing where it has none."""
    flat = flat_content(content)
    return flat if isinstance(flat, str) else ""


def flat_content(content: object) -> object:
    """Content with text parts only, as one string; any other content as it is."""
    if isinstance(content, str) or not isinstance(content, Sequence) or not content:
        return content
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return content
    return PART_SEPARATOR.join(str(part.get("text") or "") for part in content)


def flat_message(message: Message) -> dict[str, Any]:  # Any: what chat templates read
    """The message, with its content as a string where it has only text."""
    return {key: flat_content(value) if key == "content" else value for key, value in message.items()}


def same_message(a: Message, b: Message) -> bool:
    """Whether a chat template would be given the same."""
    return _telling(a) == _telling(b)


def _telling(message: Message) -> dict[str, Any]:  # Any: what chat templates read
    return {key: value for key, value in flat_message(message).items() if value not in (None, "", [], (), {})}


def ends_with_answer(conversation: Sequence[Message]) -> bool:
    """Whether the last message is the assistant's, so that it is to be continued."""
    return bool(conversation) and conversation[-1].get("role") == "assistant"


def answered(conversation: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """The conversation with the model's answer; a continued last message grows by it."""
    if not ends_with_answer(conversation):
        return (*conversation, {"role": "assistant", "content": answer})
    last = conversation[-1]
    return (*conversation[:-1], {**last, "content": content_text(last.get("content")) + answer})


def continues(earlier: Sequence[Message], conversation: Sequence[Message]) -> bool:
    """Whether `conversation` is `earlier` and then more; a last answer may have been written further."""
    if len(earlier) > len(conversation):
        return False
    *before, last = earlier
    if not all(same_message(a, b) for a, b in zip(before, conversation, strict=False)):
        return False
    there = conversation[len(earlier) - 1]
    if same_message(last, there):
        return True
    grown = {**flat_message(there), "content": content_text(last.get("content"))}
    return (
        len(earlier) == len(conversation)
        and ends_with_answer(conversation)
        and content_text(there.get("content")).startswith(content_text(last.get("content")))
        and same_message(last, grown)
    )


def placeholder_at(conversation: Sequence[Message], length: int, placeholder: str) -> list[Message]:
    """The messages with `placeholder` as the content of the last of the first `length`."""
    answer = {**conversation[length - 1], "content": placeholder}
    return [*conversation[: length - 1], answer, *conversation[length:]]
