"""Which earlier node a new prompt continues, and with which ids.

Rules:
1. The text decides who is a candidate: the prompt begins with a node's text. The end-of-turn token that the model
   sampled at the node's end may stand in the prompt's text or be missing there.
2. The longest match wins; ties go to the newest node.
3. The ids decide whether it holds: the text of the node's ids and of the suffix encoded alone is the prompt, or it is
   no extension. The sampled ids are never encoded again, and the sampled end-of-turn token stands once.
4. A node that sampled nothing a reader can see is extended only where the prompt spells out its end-of-turn token:
   otherwise any prompt that begins alike would count as its continuation.
5. What looks like a continuation and is none becomes a new root with a reason code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from managed_cli.tracking.masking import PromptEncoding, TrackedNode, extended_prompt, root_prompt
from managed_cli.types import Message, Tokenizer

HISTORY_REWRITTEN = "history_rewritten"
"""The chat template writes an earlier answer otherwise than it was sampled (trimmed, think block dropped, …)."""

STOP_STRING_CUT = "stop_string_cut"
"""The text goes on where a stop string cut it, but the sampled ids had gone further."""

SPECIAL_TOKENS_DROPPED = "special_tokens_dropped"
"""The text lacks special tokens that the model sampled inside its answer."""

TEXT_MISMATCH = "text_mismatch"
"""The texts fit, but the sampled ids and the encoded suffix do not spell the prompt."""

FORK_REASONS = (HISTORY_REWRITTEN, STOP_STRING_CUT, SPECIAL_TOKENS_DROPPED, TEXT_MISMATCH)

ANSWER_PLACEHOLDER = "0ANSWER0"
"""Stands for an answer when a template is asked what follows one: plain text that no template trims or rewrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Match:
    """A candidate: the first `matched` characters of the prompt are the node's.

    `end_token_written`: the text of the node's end-of-turn token is among them.
    """

    node: TrackedNode
    matched: int
    end_token_written: bool


def plan_prompt(
    text: str,
    nodes: Sequence[TrackedNode],
    tokenizer: Tokenizer,
    *,
    root_ids: Sequence[int] | None = None,
    conversation: Sequence[Message] | None = None,
) -> PromptEncoding:
    """The ids to send for `text`: an extension of one of `nodes` (oldest first), or a new root.

    Args:
        root_ids: ids of the text where it starts a new sequence; None encodes it as a rendered prompt.
        conversation: the messages behind `text`, for the reason code of a fork.
    """
    mismatched: TrackedNode | None = None
    for match in _matches(text, nodes):
        prompt = _confirmed(text, match, tokenizer)
        if prompt is not None:
            return prompt
        mismatched = mismatched or match.node
    root = root_prompt(text, tokenizer.encode_rendered(text) if root_ids is None else root_ids)
    fork = _fork(text, nodes, mismatched, conversation)
    return root if fork is None else dataclasses.replace(root, fork_of=fork[0], fork_reason=fork[1])


def _matches(text: str, nodes: Sequence[TrackedNode]) -> list[_Match]:
    """Every candidate by rules 1 and 4, in the order of rule 2."""
    found: list[tuple[int, int, _Match]] = []
    for age, node in enumerate(nodes):
        match = _match(text, node)
        if match is not None:
            found.append((match.matched, age, match))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    return [match for _, _, match in found]


def _match(text: str, node: TrackedNode) -> _Match | None:
    if node.last_span.start == node.last_span.end:
        return None
    for written in {node.continued_text: None, node.node.full_text: None}:
        visible = written[: len(written) - len(node.end_token_text)] if node.end_token_text else written
        if text.startswith(written):
            if node.last_span.text or node.end_token_text:
                return _Match(node, len(written), end_token_written=True)
        elif node.end_token_text and node.last_span.text and text.startswith(visible):
            return _Match(node, len(visible), end_token_written=False)
    return None


def _confirmed(text: str, match: _Match, tokenizer: Tokenizer) -> PromptEncoding | None:
    """The extension by rule 3, or None."""
    suffix = text[match.matched :]
    suffix_ids = tokenizer.encode_suffix(suffix)
    node_ids = match.node.node.tokens
    spelled_ids = node_ids if match.end_token_written else node_ids[:-1]
    if not match.end_token_written and suffix_ids and suffix_ids[0] in tokenizer.eos_token_ids:
        return None  # the template ends turns with another token than the sampled one: both would stand there
    spelled = tokenizer.decode([*spelled_ids, *suffix_ids])
    if spelled != text and spelled != tokenizer.decode(tokenizer.encode_rendered(text)):
        return None
    return extended_prompt(text, match.node, suffix_ids)


def _fork(
    text: str, nodes: Sequence[TrackedNode], mismatched: TrackedNode | None, conversation: Sequence[Message] | None
) -> tuple[str, str] | None:
    """(node id, reason) of the newest node that `text` looks like a continuation of."""
    if mismatched is not None:
        return mismatched.node_id, TEXT_MISMATCH
    for node in reversed(nodes):
        if not node.last_span.text:
            continue
        if text.startswith(node.shown_text):
            stopped = isinstance(node.last_span.stop_reason, str)
            return node.node_id, STOP_STRING_CUT if stopped else SPECIAL_TOKENS_DROPPED
        if conversation is not None and continues_conversation(node, conversation):
            return node.node_id, HISTORY_REWRITTEN
    return None


def continues_conversation(node: TrackedNode, conversation: Sequence[Message]) -> bool:
    """Whether the messages are the node's, its answer included, and then more."""
    earlier = node.conversation
    if earlier is None or len(earlier) > len(conversation):
        return False
    return all(_same(a, b) for a, b in zip(earlier, conversation, strict=False))


def _same(a: Message, b: Message) -> bool:
    return a.get("role") == b.get("role") and (a.get("content") or "") == (b.get("content") or "")


def plan_verbatim(
    conversation: Sequence[Message],
    nodes: Sequence[TrackedNode],
    tokenizer: Tokenizer,
    *,
    rendered_with_placeholder: dict[int, str],
) -> PromptEncoding | None:
    """The extension that keeps the sampled tokens and splices in the new messages' tokens; None without a parent.

    Args:
        rendered_with_placeholder: for a length of the known conversation, the chat rendered with
            `ANSWER_PLACEHOLDER` as its last known answer; filled by the caller for `verbatim_lengths`.
    """
    candidates = [
        (len(node.conversation or ()), age, node)
        for age, node in enumerate(nodes)
        if node.last_span.end > node.last_span.start and continues_conversation(node, conversation)
    ]
    for length, _, node in sorted(candidates, key=lambda entry: entry[:2], reverse=True):
        rendered = rendered_with_placeholder.get(length)
        if rendered is None or rendered.count(ANSWER_PLACEHOLDER) != 1:
            continue
        after = rendered.partition(ANSWER_PLACEHOLDER)[2]
        suffix = _without_end_of_turn(after, tokenizer) if node.end_token_text else after
        suffix_ids = tokenizer.encode_suffix(suffix)
        spelled = tokenizer.decode([*node.node.tokens, *suffix_ids])
        if spelled == node.node.full_text + suffix:
            return extended_prompt(spelled, node, suffix_ids)
    return None


def verbatim_lengths(conversation: Sequence[Message], nodes: Sequence[TrackedNode]) -> list[int]:
    """How many of the messages are known from a node, for each node that they continue."""
    return sorted({len(node.conversation or ()) for node in nodes if continues_conversation(node, conversation)})


def with_placeholder(conversation: Sequence[Message], length: int) -> list[Message]:
    """The messages with `ANSWER_PLACEHOLDER` as the answer that closes the first `length` of them."""
    answer = {"role": conversation[length - 1].get("role", "assistant"), "content": ANSWER_PLACEHOLDER}
    return [*conversation[: length - 1], answer, *conversation[length:]]


def _without_end_of_turn(text: str, tokenizer: Tokenizer) -> str:
    """`text` without the end-of-turn token it begins with: the sampled one stands there already."""
    ids = tokenizer.encode_suffix(text)
    if ids and ids[0] in tokenizer.eos_token_ids:
        return text[len(tokenizer.decode(ids[:1])) :]
    return text
