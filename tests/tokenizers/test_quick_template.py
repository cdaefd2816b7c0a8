"""The compiled chat template gives the text that the library around it gives, for every real template."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from managed_cli.quick_template import quick_template
from managed_cli.tokenizers import TEMPLATE_REFUSALS
from managed_cli.types import Message
from tests.tokenizers import catalog

PLAIN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.one_of(
            st.text(), st.sampled_from(["<think>a</think>\n\nb", "<tool_response>x", " \n", "{{ 1 }}"])
        ),
    }
)
CONVERSATIONS = st.one_of(
    st.lists(PLAIN, max_size=6),
    st.lists(st.text(), min_size=1, max_size=6).map(
        lambda said: [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(said)]
    ),
)
OTHERS: list[Message] = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "assistant", "content": "a", "reasoning_content": "because"},
    {"role": "assistant", "content": "a", "thinking": "because", "tool_calls": None},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": "a", "name": "Ann"},
    {"role": "user"},
]


def said(write: Any, messages: Sequence[Message], opening: bool, **options: Any) -> str:
    try:
        return str(write(messages, opening, **options))
    except TEMPLATE_REFUSALS as error:
        return f"{type(error).__name__}: {error}"


def by_the_library(tokenizer: Any, messages: Sequence[Message], opening: bool, tools: Any = None) -> str:
    def write(messages: Sequence[Message], opening: bool) -> str:
        options = {"add_generation_prompt": opening, "tokenize": False, "tools": tools}
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], **options))

    return said(write, messages, opening)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_plain_messages_are_written_as_the_library_writes_them(name: str) -> None:
    tokenizer = catalog.loaded(name)._tokenizer
    quick = quick_template(tokenizer, TEMPLATE_REFUSALS)
    assert quick.__name__ == "quick"  # type: ignore[attr-defined]  # else nothing is compared below

    @settings(max_examples=150, deadline=None)
    @given(CONVERSATIONS, st.booleans())
    def same(messages: list[Message], opening: bool) -> None:
        before = copy.deepcopy(messages)
        assert said(quick, messages, opening) == by_the_library(tokenizer, messages, opening)
        assert messages == before

    same()


@pytest.mark.parametrize("message", OTHERS, ids=lambda message: ",".join(message))
@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3_1"])
def test_other_messages_go_through_the_library(name: str, message: Message) -> None:
    tokenizer = catalog.loaded(name)._tokenizer
    quick = quick_template(tokenizer, TEMPLATE_REFUSALS)
    messages = [{"role": "user", "content": "q"}, message]
    assert said(quick, messages, True) == by_the_library(tokenizer, messages, True)


def test_tools_go_through_the_library() -> None:
    tokenizer = catalog.loaded("qwen3")._tokenizer
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    messages = [{"role": "user", "content": "q"}]
    written = said(quick_template(tokenizer, TEMPLATE_REFUSALS), messages, True, tools=tools)
    assert written == by_the_library(tokenizer, messages, True, tools)
    assert '"name": "f"' in written


def test_a_template_or_an_end_token_that_somebody_sets_later_counts() -> None:
    tokenizer = copy.deepcopy(catalog.loaded("llama2")._tokenizer)
    quick = quick_template(tokenizer, TEMPLATE_REFUSALS)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    before = quick(messages, False)
    tokenizer.eos_token = "<unk>"
    assert quick(messages, False) == by_the_library(tokenizer, messages, False) != before
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert quick(messages, False) == "q!"


def test_a_library_that_is_made_otherwise_or_adds_something_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = catalog.loaded("smollm2")._tokenizer

    class Shouting:
        chat_template, special_tokens_map = tokenizer.chat_template, tokenizer.special_tokens_map

        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            return str(tokenizer.apply_chat_template(*args, **options)).upper()

    messages = [{"role": "user", "content": "abc"}]
    assert "ABC" in quick_template(Shouting(), TEMPLATE_REFUSALS)(messages, True)
    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
    assert quick_template(tokenizer, TEMPLATE_REFUSALS).__name__ == "write"  # type: ignore[attr-defined]


@pytest.mark.parametrize("template", ["{%", "{{ 1 / 0 }}", {"default": "{{ messages[0].content }}"}])
def test_a_template_that_is_none_or_several_is_left_to_the_library(template: Any) -> None:
    tokenizer = copy.copy(catalog.loaded("smollm2")._tokenizer)
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "abc"}]
    assert said(quick_template(tokenizer, TEMPLATE_REFUSALS), messages, True) == by_the_library(
        tokenizer, messages, True
    )
