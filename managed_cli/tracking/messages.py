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


def is_plain(message: Message) -> bool:
    """Whether the message is a role and a content, both strings, as most are."""
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


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
    """The message, with its content as a string where it has only text, or none: many templates cannot take None."""
    content = message.get("content")
    if isinstance(content, str) and isinstance(message, dict):
        return message
    return {**message, "content": "" if content is None else flat_content(content)}


def same_message(a: Message, b: Message) -> bool:
    """Whether a chat template would be given the same."""
    return a == b or _telling(a) == _telling(b)


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
    """Whether `conversation` is `earlier` to the last field, and then perhaps more."""
    return len(earlier) <= len(conversation) and all(
        same_message(a, b) for a, b in zip(earlier, conversation, strict=False)
    )


def holds_answer(earlier: Sequence[Message], conversation: Sequence[Message]) -> bool:
    """Whether the answer that closes `earlier` may stand at its place in `conversation`.

    A client may have written a last answer further, or moved parts of it into other fields (tool calls, reasoning):
    then only the rendered text can tell. An answer in plain words that differs is another one.
    """
    if not earlier or len(earlier) > len(conversation):
        return False
    answer, there = earlier[-1], conversation[len(earlier) - 1]
    if there.get("role") != answer.get("role"):
        return False
    said, found = content_text(answer.get("content")), content_text(there.get("content"))
    if len(earlier) == len(conversation) and ends_with_answer(conversation):
        return found.startswith(said)
    return found == said or bool(_telling(there).keys() - {"role", "content"})


def follows_in_words(earlier: Sequence[Message], conversation: Sequence[Message]) -> bool:
    """Whether a person would say that `conversation` goes on from `earlier`: roles and words are the same."""
    return holds_answer(earlier, conversation) and all(
        a.get("role") == b.get("role") and content_text(a.get("content")) == content_text(b.get("content"))
        for a, b in zip(earlier[:-1], conversation, strict=False)
    )


def with_content(conversation: Sequence[Message], length: int, content: str) -> list[Message]:
    """The messages with `content` as all that the last of the first `length` says."""
    said = {"role": conversation[length - 1].get("role", "assistant"), "content": content}
    return [*conversation[: length - 1], said, *conversation[length:]]
