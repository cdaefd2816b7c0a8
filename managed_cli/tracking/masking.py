"""Prompt and completion become one row: which positions were sampled, and with which logprob.

Shapes: prompt P tokens, completion C tokens, row T = P + C. A prompt that continues earlier completions carries their
masks and logprobs along, so what was sampled in an earlier turn stays trainable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from managed_cli.errors import AlignmentError
from managed_cli.node import SequenceNode
from managed_cli.sent_prompt import SentPrompt
from managed_cli.tracking.row_part import RowPart
from managed_cli.types import Generation, Message


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
    """The ids to send, and what is known of each: P of them.

    Attributes:
        text: the prompt as it was rendered, BOS included.
        row: the ids; what was sampled in earlier turns keeps its masks and logprobs.
        sent: the ids as a server gets them.
        parent: the node this prompt extends; None for a root.
        fork_of, fork_reason: the node it looks like a continuation of and does not extend, and why not. Beside a
            `parent` they name a later turn that was lost: the parent is the longest that could be kept.
        spans: earlier sampled turns inside the prompt.
        spelled: `decode` of the ids, where planning has found it out; None where it has not.
        unwritten: positions of end-of-turn tokens that were sampled and that `text` does not write.
    """

    text: str
    row: RowPart
    sent: SentPrompt
    spans: tuple[Span, ...] = ()
    parent: TrackedNode | None = None
    fork_of: str | None = None
    fork_reason: str | None = None
    spelled: str | None = None
    unwritten: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """[P], a list of its own."""
        return self.row.all_tokens()

    @property
    def masked_tokens(self) -> list[int]:
        """[P], -100 where nothing was sampled; a list of its own."""
        return self.row.arrays()[1]

    @property
    def logprobs(self) -> list[float]:
        """[P], 1.0 where nothing was sampled; a list of its own."""
        return self.row.arrays()[2]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TrackedNode:
    """A recorded node with what is needed to recognise its continuation.

    Attributes:
        row: what was sent and sampled.
        full_text: `decode` of its tokens.
        metadata: of the row that is recorded.
        prompt_text: the prompt as rendered.
        continued_text: `prompt_text` and then the text of the completion, special tokens kept.
        end_token_text: text of the sampled token that ended the completion; empty where none did.
        conversation: the messages sent and the answer given, for chats; None for text prompts.
        tools: what the chat template was given beside the messages.
        unwritten: positions of end-of-turn tokens that were sampled and that `prompt_text` does not write.
        sent: the prompt's ids as the server got them.
    """

    node_id: str
    row: RowPart
    full_text: str
    metadata: dict[str, Any]  # Any: JSON values
    spans: tuple[Span, ...]
    prompt_text: str
    continued_text: str
    end_token_text: str
    conversation: tuple[Message, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # Any: JSON schemas
    unwritten: tuple[int, ...] = ()
    sent: SentPrompt | None = None

    @property
    def node(self) -> SequenceNode:
        """The row as the Python API has it, made when it is asked for: lists of its own, the metadata of the node."""
        return self.row.node(self.full_text, self.metadata)

    @property
    def last_span(self) -> Span:
        """The completion that this node added."""
        return self.spans[-1]

    @property
    def shown_text(self) -> str:
        """Prompt and completion as a person was given them."""
        return self.prompt_text + self.last_span.text

    @property
    def shown_length(self) -> int:
        """Characters of `shown_text`."""
        return len(self.prompt_text) + len(self.last_span.text)

    @property
    def reach(self) -> int:
        """Characters of the longest text that a prompt which continues this node begins with."""
        return max(len(self.continued_text), len(self.full_text))


def root_prompt(text: str, token_ids: Sequence[int]) -> PromptEncoding:
    """A prompt in which nothing was sampled: every position masked."""
    ids = list(token_ids)
    return PromptEncoding(text=text, row=RowPart(None, ids), sent=SentPrompt(ids))


def extended_prompt(
    text: str,
    parent: TrackedNode,
    suffix_ids: Sequence[int],
    *,
    spelled: str | None,
    unwritten: Sequence[int] = (),
) -> PromptEncoding:
    """The parent's row and then a masked suffix; the parent's completions keep their masks and logprobs."""
    row, before = RowPart(parent.row, suffix_ids), parent.row
    if parent.sent is not None and len(parent.sent) + len(before.tokens) == len(before):
        sent = parent.sent.followed_by([*before.tokens, *suffix_ids])
    else:
        sent = SentPrompt(row.all_tokens())
    return PromptEncoding(
        text=text,
        row=row,
        sent=sent,
        spans=parent.spans,
        parent=parent,
        spelled=spelled,
        unwritten=tuple(unwritten),
    )


def completion_span(prompt: PromptEncoding, completion: Generation, text: str) -> Span:
    """Where `completion` will stand in the row, and how it ended."""
    start = len(prompt.row)
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


def completed_row(prompt: PromptEncoding, completion: Generation, *, checked: bool = False) -> RowPart:
    """One training record: the prompt masked, the completion kept.

    Shapes: prompt P tokens, completion C tokens, result T = P + C. Positions of earlier completions inside the
    prompt stay unmasked.

    Args:
        checked: the completion is one of a reply that is `checked`. The prompt is masked by construction, or was
            checked when it was sampled, so that nothing is left to be found.

    Raises:
        AlignmentError: `completion.logprobs` does not have exactly C entries, or a value breaks the row's rule.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(logprobs) != len(ids):
        raise AlignmentError(f"a completion has {len(logprobs)} logprobs for {len(ids)} tokens")
    if not checked:
        try:
            alone = SequenceNode(full_text="", tokens=list(ids), masked_tokens=list(ids), logprobs=list(logprobs))
        except AlignmentError as error:
            raise AlignmentError(f"a completion that begins at position {len(prompt.row)}: {error}") from error
        ids, logprobs = alone.tokens, alone.logprobs
    return RowPart(prompt.row, ids, logprobs)
