"""When two messages say the same, and when a conversation goes on from another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.tracking.messages import (
    answered,
    content_text,
    continues,
    flat_message,
    follows_in_words,
    holds_answer,
    same_message,
    with_content,
)

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@given(st.lists(st.text(), min_size=1))
def test_text_parts_are_their_lines(texts: list[str]) -> None:
    assert content_text([part(text) for text in texts]) == "\n".join(texts)


def test_parts_that_are_not_all_text_stay_as_they_are() -> None:
    content = [part("look"), {"type": "image_url", "image_url": {"url": "x"}}]
    assert flat_message({"role": "user", "content": content})["content"] == content
    assert content_text(content) == ""


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_no_content_is_empty_content(message: dict[str, Any]) -> None:
    assert flat_message(message) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "Hello", "tool_calls": None, "refusal": None},
        {"content": [part("Hello")], "role": "assistant", "tool_calls": []},
    ],
)
def test_empty_fields_and_text_parts_make_no_difference(other: dict[str, Any]) -> None:
    assert same_message(ANSWER, other)
    assert same_message(other, ANSWER)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello "},
        {"role": "assistant", "content": "Hello", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        {"role": "assistant", "content": None},
    ],
)
def test_whatever_a_template_may_read_makes_a_difference(other: dict[str, Any]) -> None:
    assert not same_message(ANSWER, other)


def test_tool_calls_tell_two_messages_without_content_apart() -> None:
    rome = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "Rome"}}]}
    oslo = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "Oslo"}}]}
    assert not same_message(rome, oslo)
    assert same_message(rome, {**rome, "content": ""})


def test_a_conversation_goes_on_from_its_own_beginning_only() -> None:
    conversation = [USER, ANSWER, USER]
    assert continues([USER, ANSWER], conversation)
    assert continues(conversation, conversation)
    assert not continues([*conversation, ANSWER], conversation)
    assert not continues([USER, {**ANSWER, "content": "Hell"}], conversation)


def test_an_answer_in_other_words_is_another_answer() -> None:
    assert holds_answer([USER, ANSWER], [USER, ANSWER, USER])
    assert not holds_answer([USER, {**ANSWER, "content": "Hell"}], [USER, ANSWER, USER])
    assert not holds_answer([USER, ANSWER], [USER])
    assert not holds_answer([USER, ANSWER], [USER, {"role": "user", "content": "Hello"}])


def test_a_last_answer_may_have_been_written_further() -> None:
    grown = [USER, {**ANSWER, "content": "Hello there"}]
    assert holds_answer([USER, ANSWER], grown)
    assert follows_in_words([USER, ANSWER], grown)
    assert not holds_answer([USER, ANSWER], [*grown, USER])


def test_an_answer_moved_into_other_fields_may_be_the_same() -> None:
    moved = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert holds_answer([USER, ANSWER], [USER, moved, USER])
    assert not holds_answer([USER, ANSWER], [USER, {"role": "assistant", "content": ""}, USER])


@pytest.mark.parametrize("content", ["The answer", [part("The answer")], None])
def test_a_continued_answer_grows_by_what_was_sampled(content: Any) -> None:
    start = content_text(content)
    assert answered([USER, {"role": "assistant", "content": content}], " is 42") == (
        USER,
        {"role": "assistant", "content": f"{start} is 42"},
    )
    assert answered([USER], "42") == (USER, {"role": "assistant", "content": "42"})


def test_a_placeholder_is_all_that_the_answer_says() -> None:
    calls = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}
    assert with_content([USER, calls, USER], 2, "?") == [USER, {"role": "assistant", "content": "?"}, USER]
