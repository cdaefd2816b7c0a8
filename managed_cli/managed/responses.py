"""Replies in OpenAI's shape, with the ids that link each choice to its node."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Usage(BaseModel):
    """Tokens of one call: the prompt once, the completions of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One choice of a text completion; `node_id` is its node's in `get_state()`."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    node_id: str


class Completion(BaseModel):
    """The reply of `completion()`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(BaseModel):
    """What the model answered."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One choice of a chat completion; `node_id` is its node's in `get_state()`."""

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None = None
    node_id: str


class ChatCompletion(BaseModel):
    """The reply of `chat_completion()`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    model: str
    choices: list[ChatChoice]
    usage: Usage
