"""Prompt and completion become one row: which positions were sampled, and with which logprob.

Shapes: prompt P tokens, completion C tokens, row T = P + C. A prompt that continues earlier completions carries their
masks and logprobs along, so what was sampled in an earlier turn stays trainable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from managed_cli.errors import AlignmentError
from managed_cli.node import SequenceNode
from managed_cli.sent_prompt import SentPrompt
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB, Generation, Message

T = TypeVar("T")


class Span(msgspec.Struct, frozen=True):
    """One sampled turn inside a row: positions [start, end), as the server ended it.

    Attributes:
        text: what a person reads: special tokens skipped, cut at a stop string.
        rescored: positions (in the row) whose logprob came from a second request.
    """

    start: int
    end: int
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    finish_reason_inferred: bool = False
    rescored: tuple[int, ...] = ()
    weight_version: str | None = None

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """The span as it stands in a row's metadata; what is usual is left out."""
        entry: dict[str, Any] = {
            "start": self.start,
            "end": self.end,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "text": self.text,
        }
        if self.finish_reason_inferred:
            entry["finish_reason_inferred"] = True
        if self.rescored:
            entry["rescored"] = list(self.rescored)
        if self.weight_version is not None:
            entry["weight_version"] = self.weight_version
        return entry


class PromptEncoding(msgspec.Struct, frozen=True):
    """The ids to send, and what is known of each. P = len(token_ids).

    Attributes:
        text: the prompt as it was rendered, BOS included.
        parent: the node this prompt extends; None for a root.
        fork_of, fork_reason: the node it looks like a continuation of and does not extend, and why not. Beside a
            `parent` they name a later turn that was lost: the parent is the longest that could be kept.
        spans: earlier sampled turns inside the prompt.
        spelled: `decode(token_ids)`, where planning has found it out; None where it has not.
        unwritten: positions of end-of-turn tokens that were sampled and that `text` does not write.
        sent: `token_ids` as a server gets them.
    """

    text: str
    token_ids: list[int]
    spans: tuple[Span, ...] = ()
    parent: TrackedNode | None = None
    fork_of: str | None = None
    fork_reason: str | None = None
    spelled: str | None = None
    unwritten: tuple[int, ...] = ()
    sent: SentPrompt | None = None

    @property
    def masked_tokens(self) -> list[int]:
        """The parent's, then -100: [P]."""
        return self.masks_with(())

    @property
    def logprobs(self) -> list[float]:
        """The parent's, then 1.0: [P]."""
        return self.logprobs_with(())

    def masks_with(self, sampled_ids: Sequence[int]) -> list[int]:
        """The masks of the row in which `sampled_ids` follow."""
        known = self.parent.node.masked_tokens if self.parent is not None else ()
        return [*known, *self._not_sampled(IGNORED_TOKEN_ID, len(known)), *sampled_ids]

    def logprobs_with(self, sampled: Sequence[float]) -> list[float]:
        """The logprobs of the row in which those of sampled ids follow."""
        known = self.parent.node.logprobs if self.parent is not None else ()
        return [*known, *self._not_sampled(MASKED_LOGPROB, len(known)), *sampled]

    def _not_sampled(self, value: T, known: int) -> list[T]:
        """`value` for every position behind the parent's row."""
        return [value] * (len(self.token_ids) - known)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TrackedNode:
    """A recorded node with what is needed to recognise its continuation.

    Attributes:
        prompt_text: the prompt as rendered.
        continued_text: `prompt_text` and then the text of the completion, special tokens kept.
        end_token_text: text of the sampled token that ended the completion; empty where none did.
        conversation: the messages sent and the answer given, for chats; None for text prompts.
        tools: what the chat template was given beside the messages.
        unwritten: positions of end-of-turn tokens that were sampled and that `prompt_text` does not write.
        sent: the prompt's ids as the server got them.
    """

    node_id: str
    node: SequenceNode
    spans: tuple[Span, ...]
    prompt_text: str
    continued_text: str
    end_token_text: str
    conversation: tuple[Message, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # Any: JSON schemas
    unwritten: tuple[int, ...] = ()
    sent: SentPrompt | None = None

    @property
    def last_span(self) -> Span:
        """The completion that this node added."""
        return self.spans[-1]

    @property
    def full_text(self) -> str:
        """`decode` of the node's tokens."""
        return self.node.full_text

    @property
    def shown_text(self) -> str:
        """Prompt and completion as a person was given them."""
        return self.prompt_text + self.last_span.text


def root_prompt(text: str, token_ids: Sequence[int]) -> PromptEncoding:
    """A prompt in which nothing was sampled: every position masked."""
    ids = list(token_ids)
    return PromptEncoding(text=text, token_ids=ids, sent=SentPrompt(ids))


def extended_prompt(
    text: str,
    parent: TrackedNode,
    suffix_ids: Sequence[int],
    *,
    spelled: str | None,
    unwritten: Sequence[int] = (),
) -> PromptEncoding:
    """The parent's row and then a masked suffix; the parent's completions keep their masks and logprobs."""
    token_ids = [*parent.node.tokens, *suffix_ids]
    return PromptEncoding(
        text=text,
        token_ids=token_ids,
        spans=parent.spans,
        parent=parent,
        spelled=spelled,
        unwritten=tuple(unwritten),
        sent=SentPrompt.following(parent.sent, token_ids),
    )


def completion_span(prompt: PromptEncoding, completion: Generation, text: str) -> Span:
    """Where `completion` will stand in the row, and how it ended."""
    start = len(prompt.token_ids)
    return Span(
        start=start,
        end=start + len(completion.token_ids),
        text=text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        finish_reason_inferred=completion.finish_reason_inferred,
        rescored=tuple([start + position for position in completion.rescored]),
        weight_version=completion.weight_version,
    )


def join_prompt_and_completion(
    prompt: PromptEncoding,
    completion: Generation,
    *,
    full_text: str,
    metadata: Mapping[str, Any],  # Any: JSON values
    checked: bool = False,
) -> SequenceNode:
    """One training record: the prompt masked, the completion kept.

    Shapes: prompt P tokens, completion C tokens, result T = P + C. Positions of earlier completions inside the
    prompt stay unmasked.

    Args:
        checked: the completion is one of a reply that is `checked`. Every position of the prompt is masked by
            construction, or was checked when it was sampled, so that nothing is left for the row's own check to find.

    Raises:
        AlignmentError: `completion.logprobs` does not have exactly C entries, or a value breaks the row's rule.
    """
    if len(completion.logprobs) != len(completion.token_ids):
        raise AlignmentError(
            f"a completion has {len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
        )
    make = SequenceNode.of_checked if checked else SequenceNode
    return make(
        full_text=full_text,
        tokens=[*prompt.token_ids, *completion.token_ids],
        masked_tokens=prompt.masks_with(completion.token_ids),
        logprobs=prompt.logprobs_with(completion.logprobs),
        metadata=dict(metadata),
    )
