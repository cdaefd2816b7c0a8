"""Messages → text by the compiled chat template itself, where the library above it adds nothing.

The library walks through every field of every message, in several passes, before the template sees them; where role and
content are strings and there is nothing else, that changes nothing and takes longer than the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from managed_cli.tracking.messages import is_plain
from managed_cli.types import Message

CHAT_PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "one"},),
    ({"role": "system", "content": " s\n"}, {"role": "user", "content": "a {{b}} <c> 'é' 🦜 "}),
    (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "three "},
    ),
)


class WriteChat(Protocol):
    """The text of a conversation; `opening` adds what stands before the next answer."""

    def __call__(
        self,
        messages: Sequence[Message],
        opening: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> str: ...


def quick_template(tokenizer: Any, refusals: tuple[type[Exception], ...]) -> WriteChat:
    """`tokenizer.apply_chat_template`, without its passes over messages of two strings where that gives the same text.

    Args:
        tokenizer: one of the transformers library, with a chat template.
        refusals: what a template raises that refuses a conversation.
    """

    def write(
        messages: Sequence[Message],
        opening: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> str:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=opening,
                tokenize=False,
            )
        )

    template = tokenizer.chat_template
    if not isinstance(template, str):
        return write
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:  # a library that is made otherwise
        return write
    try:
        compiled = _compile_jinja_template(template)
    except refusals:
        return write

    def quick(
        messages: Sequence[Message],
        opening: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> str:
        # Whoever shares this tokenizer may have given it another template.
        if tools or not messages or tokenizer.chat_template is not template or not all(map(is_plain, messages)):
            return write(messages, opening, tools)
        names = tokenizer.special_tokens_map
        return str(
            compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=opening, **names)
        )

    def said(how: WriteChat, messages: Sequence[Message], opening: bool) -> str:
        try:
            return how(messages, opening)
        except refusals as error:
            return f"{type(error).__name__}: {error}"

    agree = all(
        said(write, chat, opening) == said(quick, chat, opening) for chat in CHAT_PROBES for opening in (False, True)
    )
    return quick if agree else write
