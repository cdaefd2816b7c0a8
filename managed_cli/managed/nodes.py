"""From a server's reply to the nodes that are tracked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from managed_cli.managed.recording import shown_text, text_after_text
from managed_cli.tracking.continued import continued_text
from managed_cli.tracking.masking import (
    PromptEncoding,
    Span,
    TrackedNode,
    completed_row,
    completion_span,
)
from managed_cli.tracking.messages import answered, is_plain
from managed_cli.types import GenerationReply, Message, Tokenizer

MetadataOf = Callable[[Sequence[Span], str, int], dict[str, Any]]  # Any: JSON values
"""Spans, node id and choice index → the node's metadata."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given, as it was when the call was issued."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]  # Any: JSON schemas

    @classmethod
    def of(
        cls,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,  # Any: JSON schemas
    ) -> Chat | None:
        """A copy of both; None without messages."""
        if messages is None:
            return None
        return cls(tuple(map(_copied, messages)), copy.deepcopy(tuple(tools or ())))


def _copied(message: Message) -> Message:
    """A message of its own: a plain one in a tenth of a deep copy's time."""
    return dict(message) if is_plain(message) else copy.deepcopy(message)


def tracked_nodes(
    call_number: int,
    prompt: PromptEncoding,
    reply: GenerationReply,
    chat: Chat | None,
    tokenizer: Tokenizer,
    metadata_of: MetadataOf,
) -> list[TrackedNode]:
    """One node for each choice, in choice order; ids are `CALL.CHOICE`."""
    spelled = tokenizer.decode(prompt.token_ids) if prompt.spelled is None else prompt.spelled
    return [
        _tracked_node(f"{call_number}.{index}", index, prompt, spelled, reply, chat, tokenizer, metadata_of)
        for index in range(len(reply.choices))
    ]


def _tracked_node(
    node_id: str,
    index: int,
    prompt: PromptEncoding,
    prompt_spelled: str,
    reply: GenerationReply,
    chat: Chat | None,
    tokenizer: Tokenizer,
    metadata_of: MetadataOf,
) -> TrackedNode:
    completion = reply.choices[index]
    shown = shown_text(completion, reply.sampling, tokenizer)
    full_text = continued_text(prompt_spelled, prompt.row, completion.token_ids, tokenizer)
    # Where the text of the whole is not the text of its parts (a split character), take the parts.
    in_parts = full_text.startswith(prompt_spelled)
    added = full_text[len(prompt_spelled) :] if in_parts else text_after_text(completion.token_ids, tokenizer)
    end_text = "" if completion.end_token_id is None else tokenizer.decode([completion.end_token_id])
    spans = (*prompt.spans, completion_span(prompt, completion, shown))
    return TrackedNode(
        node_id=node_id,
        row=completed_row(prompt, completion, checked=reply.checked),
        full_text=full_text,
        metadata=metadata_of(spans, node_id, index),
        spans=spans,
        prompt_text=prompt.text,
        continued_text=full_text if in_parts and prompt.text == prompt_spelled else prompt.text + added,
        end_token_text=end_text if added.endswith(end_text) else "",
        conversation=answered(chat.messages, shown) if chat else None,
        tools=chat.tools if chat else (),
        unwritten=prompt.unwritten,
        sent=prompt.sent,
    )
