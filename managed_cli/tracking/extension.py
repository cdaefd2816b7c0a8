"""Which earlier node a new prompt continues, and with which ids.

Rules:
1. The text decides who is a candidate: the prompt begins with a node's text. The end-of-turn token that the model
   sampled at the node's end may stand in the prompt's text or be missing there, but not where the prompt goes on in the
   middle of that very answer. In a chat the messages must be the node's, too: another answer that begins alike is none.
2. The longest match wins; among equals one whose end-of-turn token is written, then the newest node.
3. The ids decide whether it holds: the text of the node's ids and of the suffix's is the prompt, or it is no extension.
   The suffix is encoded alone, as it is behind what it follows: no BOS, and no dummy space behind text. The sampled
   ids are never encoded again, and the sampled end-of-turn token stands once.
4. A node that sampled nothing a reader can see is extended only where the prompt spells out its end-of-turn token:
   otherwise any prompt that begins alike would count as its continuation.
5. What looks like a continuation and is none gets a reason code: as a new root, or as an extension of the longest
   earlier turn that can be kept.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from managed_cli.tracking.continued import continued_text
from managed_cli.tracking.masking import PromptEncoding, TrackedNode, extended_prompt, root_prompt
from managed_cli.tracking.messages import continues, ends_with_answer, follows_in_words, holds_answer, with_content
from managed_cli.types import Message, Tokenizer

HISTORY_REWRITTEN = "history_rewritten"
"""The chat template writes an earlier answer otherwise than it was sampled (trimmed, think block dropped, …)."""

STOP_STRING_CUT = "stop_string_cut"
"""The text goes on where a stop string cut it, but the sampled ids had gone further."""

SPECIAL_TOKENS_DROPPED = "special_tokens_dropped"
"""The text lacks special tokens that the model sampled: inside its answer, or at the end of one that is continued."""

TEXT_MISMATCH = "text_mismatch"
"""The texts fit, but the sampled ids and the encoded suffix do not spell the prompt."""

FORK_REASONS = (HISTORY_REWRITTEN, STOP_STRING_CUT, SPECIAL_TOKENS_DROPPED, TEXT_MISMATCH)

ANSWER_PLACEHOLDER = "0ANSWER0"
"""Stands for an answer when a template is asked what follows one: plain text that no template trims or rewrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Match:
    """A candidate: the first `matched` characters of the prompt are the node's.

    Attributes:
        end_token_written: the text of the node's end-of-turn token is among them, or there is none.
        unwritten: positions of the node's end-of-turn tokens that are not among them.
    """

    node: TrackedNode
    matched: int
    end_token_written: bool
    unwritten: tuple[int, ...]


def plan_prompt(
    text: str,
    nodes: Sequence[TrackedNode],
    tokenizer: Tokenizer,
    *,
    root_ids: Callable[[], Sequence[int]] | None = None,
    conversation: Sequence[Message] | None = None,
) -> PromptEncoding:
    """The ids to send for `text`: an extension of one of `nodes` (oldest first), or a new root.

    Args:
        root_ids: gives the ids of the text where it starts a new sequence; None encodes it as a rendered prompt.
        conversation: the messages behind `text`, for a chat.
    """
    related = [node for node in nodes if _may_continue(node, conversation)]
    if not related:
        return root_prompt(text, tokenizer.encode_rendered(text) if root_ids is None else root_ids())
    mismatched: list[TrackedNode] = []
    prompt: PromptEncoding | None = None
    for match in _matches(text, related, conversation):
        prompt = _confirmed(text, match, tokenizer)
        if prompt is not None:
            break
        mismatched.append(match.node)
    fork = _fork(text, related, mismatched, conversation, kept=prompt.parent if prompt else None)
    if prompt is None:
        prompt = root_prompt(text, tokenizer.encode_rendered(text) if root_ids is None else root_ids())
    return prompt if fork is None else msgspec.structs.replace(prompt, fork_of=fork[0], fork_reason=fork[1])


def _may_continue(node: TrackedNode, conversation: Sequence[Message] | None) -> bool:
    if conversation is None or node.conversation is None:
        return True
    return holds_answer(node.conversation, conversation)


def _matches(text: str, nodes: Sequence[TrackedNode], conversation: Sequence[Message] | None) -> Iterator[_Match]:
    """Every candidate by rules 1 and 4, in the order of rule 2.

    A node that reaches no further than a candidate that was found is looked at when that one did not do: of a long
    conversation, mostly only the newest turn is compared with the prompt.
    """
    found: list[tuple[int, bool, int, _Match]] = []  # in order, the best one last
    for age, node in sorted(enumerate(nodes), key=lambda entry: entry[1].reach, reverse=True):
        while found and found[-1][0] > node.reach:
            yield found.pop()[-1]
        match = _match(text, node, answer_goes_on=_answer_goes_on(node, conversation))
        if match is not None:
            bisect.insort(found, (match.matched, match.end_token_written, age, match), key=lambda entry: entry[:3])
    for entry in reversed(found):
        yield entry[-1]


def _answer_goes_on(node: TrackedNode, conversation: Sequence[Message] | None) -> bool:
    """Whether the prompt ends inside the answer that the node sampled, to be written further."""
    if conversation is None or not ends_with_answer(conversation):
        return False
    return node.conversation is None or len(node.conversation) == len(conversation)


def _match(text: str, node: TrackedNode, *, answer_goes_on: bool) -> _Match | None:
    span, end = node.last_span, node.end_token_text
    if span.start == span.end:
        return None
    # The prompt is spelled as earlier prompts were, or the caller hands the node's full text back.
    texts = {node.continued_text: node.unwritten, node.full_text: ()}
    if span.text or end:
        for written, unwritten in texts.items():
            if text.startswith(written):
                return _Match(node, len(written), True, unwritten)
    if span.text and end and not answer_goes_on:
        for written, unwritten in texts.items():
            visible = written[: len(written) - len(end)]
            if text.startswith(visible) and len(text) > len(visible):
                return _Match(node, len(visible), False, (*unwritten, span.end - 1))
    return None


def _confirmed(text: str, match: _Match, tokenizer: Tokenizer) -> PromptEncoding | None:
    """The extension by rule 3, or None."""
    row, left_out = match.node.row, set(match.unwritten)
    written_ids = [token for at, token in enumerate(row) if at not in left_out] if left_out else []
    suffix = text[match.matched :]
    for suffix_ids in _suffix_encodings(suffix, match.node, tokenizer, after_end_token=match.end_token_written):
        if not match.end_token_written and suffix_ids and suffix_ids[0] in tokenizer.eos_token_ids:
            return None  # the template ends turns with another token than the sampled one: both would stand there
        if left_out:
            spelled = tokenizer.decode([*written_ids, *suffix_ids])
        else:
            spelled = continued_text(match.node.full_text, row, suffix_ids, tokenizer)
        if spelled == text or spelled == tokenizer.decode(tokenizer.encode_rendered(text)):
            whole = None if left_out else spelled
            return extended_prompt(text, match.node, suffix_ids, spelled=whole, unwritten=match.unwritten)
    return None


def _suffix_encodings(
    suffix: str, node: TrackedNode, tokenizer: Tokenizer, *, after_end_token: bool
) -> Iterator[list[int]]:
    """How the suffix may be encoded: as it is behind the node's end-of-turn token, and as it is behind text.

    They differ where SentencePiece begins each piece of text between special tokens with a space of its own.
    """
    behind_token: list[int] | None = None
    if after_end_token and node.end_token_text and suffix:
        ids = tokenizer.encode_rendered(node.end_token_text + suffix)
        if ids[:1] == list(node.row.tokens[-1:]):
            behind_token = ids[1:]
            yield behind_token
    behind_text = tokenizer.encode_suffix(suffix)
    if behind_text != behind_token:
        yield behind_text


def _fork(
    text: str,
    nodes: Sequence[TrackedNode],
    mismatched: Collection[TrackedNode],
    conversation: Sequence[Message] | None,
    *,
    kept: TrackedNode | None,
) -> tuple[str, str] | None:
    """(node id, reason) of the longest, newest node beyond `kept` that `text` looks like a continuation of."""
    lost: list[tuple[tuple[int, int], int, str, str]] = []
    for age, node in enumerate(nodes):
        if kept is not None and not _reaches_beyond(node, kept):
            continue
        reason = TEXT_MISMATCH if node in mismatched else _lost_reason(text, node, conversation)
        if reason is not None:
            messages = 0 if conversation is None else len(node.conversation or ())
            lost.append(((messages, node.shown_length), age, node.node_id, reason))
    return max(lost)[2:] if lost else None


def _reaches_beyond(node: TrackedNode, kept: TrackedNode) -> bool:
    """Whether `node` holds more of the conversation than `kept`."""
    if node.conversation is not None and kept.conversation is not None:
        return len(node.conversation) > len(kept.conversation)
    return node.shown_length > kept.shown_length


def _lost_reason(text: str, node: TrackedNode, conversation: Sequence[Message] | None) -> str | None:
    span = node.last_span
    if span.start == span.end:
        return None
    if span.text and text.startswith(node.shown_text):
        stopped = isinstance(span.stop_reason, str) or (span.finish_reason == "stop" and not node.end_token_text)
        return STOP_STRING_CUT if stopped else SPECIAL_TOKENS_DROPPED
    if conversation is not None and node.conversation and follows_in_words(node.conversation, conversation):
        return HISTORY_REWRITTEN
    return None


def continues_conversation(node: TrackedNode, conversation: Sequence[Message]) -> bool:
    """Whether the messages are the node's, its answer included, and then perhaps more."""
    return node.conversation is not None and continues(node.conversation, conversation)


def plan_verbatim(
    conversation: Sequence[Message],
    nodes: Sequence[TrackedNode],
    tokenizer: Tokenizer,
    *,
    render: Callable[[Sequence[Message]], str],
    tools: Sequence[Mapping[str, Any]] = (),  # Any: JSON schemas
) -> PromptEncoding | None:
    """The extension that keeps the sampled tokens and splices in the new messages' tokens; None without a parent.

    Args:
        render: the chat template; asked for the conversation with `ANSWER_PLACEHOLDER` as its last known answer.
    """
    candidates = [(len(node.conversation or ()), age, node) for age, node in enumerate(nodes)]
    for length, _, node in sorted(candidates, key=lambda entry: entry[:2], reverse=True):
        # The longest is looked at first, and mostly the only one: comparing messages takes time in every turn.
        if node.last_span.end == node.last_span.start or not _known_from(node, conversation, tools):
            continue
        if node.end_token_text and length == len(conversation):
            continue  # the answer is to be written further, but the model has ended it
        rendered = render(with_placeholder(conversation, length))
        if rendered.count(ANSWER_PLACEHOLDER) != 1:
            continue
        after = rendered[rendered.rindex(ANSWER_PLACEHOLDER) + len(ANSWER_PLACEHOLDER) :]
        suffix = _without_end_of_turn(after, tokenizer) if node.end_token_text else after
        kept = node.full_text
        for suffix_ids in _suffix_encodings(suffix, node, tokenizer, after_end_token=True):
            spelled = continued_text(kept, node.row, suffix_ids, tokenizer)
            added = spelled[len(kept) :]
            if spelled.startswith(kept) and (added == suffix or _ends_alike(rendered, added, tokenizer)):
                return extended_prompt(spelled, node, suffix_ids, spelled=spelled)
    return None


def _known_from(
    node: TrackedNode,
    conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],  # Any: JSON schemas
) -> bool:
    """Whether the node's tokens are the beginning of this conversation: same messages, same tools."""
    return tuple(tools) == node.tools and continues_conversation(node, conversation)


def with_placeholder(conversation: Sequence[Message], length: int) -> list[Message]:
    """The messages with `ANSWER_PLACEHOLDER` as the answer that closes the first `length` of them."""
    return with_content(conversation, length, ANSWER_PLACEHOLDER)


def _ends_alike(rendered: str, added: str, tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer that does not keep text as it is would have written `added` at the end, too."""
    return bool(added) and tokenizer.decode(tokenizer.encode_rendered(rendered)).endswith(added)


def _without_end_of_turn(text: str, tokenizer: Tokenizer) -> str:
    """`text` without the end-of-turn token it begins with: the sampled one stands there already."""
    ids = tokenizer.encode_suffix(text)
    if ids and ids[0] in tokenizer.eos_token_ids:
        return text[len(tokenizer.decode(ids[:1])) :]
    return text
