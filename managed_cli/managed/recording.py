"""What goes into a node's metadata, and the text of a completion that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from managed_cli.backends.base import Backend
from managed_cli.tracking.masking import PromptEncoding, Span
from managed_cli.types import Generation, GenerationReply, SamplingParams, Tokenizer

ANCHOR = "a"
"""Stands before ids whose text is wanted as it reads after other text: alone, SentencePiece drops a leading space."""


def text_after_text(token_ids: Sequence[int], tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> str:
    """The text of ids that follow other text."""
    anchor = tokenizer.encode_suffix(ANCHOR)
    text = tokenizer.decode([*anchor, *token_ids], skip_special_tokens=skip_special_tokens)
    return text.removeprefix(tokenizer.decode(anchor))


def shown_text(completion: Generation, sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    """The completion as a person reads it: specials skipped, cut at a stop string.

    The server's own text where it sends one; else the same rule applied to the ids.
    """
    if completion.text is not None:
        return completion.text
    ids = completion.token_ids
    if completion.end_token_id is not None:
        ids = ids[:-1]
    text = text_after_text(ids, tokenizer, skip_special_tokens=True)
    cuts = [text.find(stop) for stop in sampling.stop]
    found = [cut for cut in cuts if cut >= 0]
    return text[: min(found)] if found else text


def node_metadata(
    given: Mapping[str, Any],
    backend: Backend,
    prompt: PromptEncoding,
    reply: GenerationReply,
    spans: Sequence[Span],
    *,
    node_id: str,
    choice_index: int,
) -> dict[str, Any]:  # Any: JSON values
    """Identity, ending, spans and facts of one node; `given` adds to them and never replaces them."""
    last = spans[-1]
    facts: dict[str, Any] = {
        "sample_id": given.get("sample_id"),
        "choice_index": choice_index,
        "node_id": node_id,
        "parent_id": prompt.parent.node_id if prompt.parent else None,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "turns": [span.to_json() for span in spans],
        "sampling": sampling_json(reply.sampling),
        "server": reply.server,
        "server_type": backend.server_type,
        "model": backend.info.model,
        "logprobs_mode": str(reply.logprobs_mode),
        "attempts": reply.attempts,
    }
    if prompt.fork_reason is not None:
        facts["fork_of"] = prompt.fork_of
        facts["fork_reason"] = prompt.fork_reason
    versions = weight_versions(backend, last)
    if versions is not None:
        facts["weight_version"] = versions
    return {**given, **facts}


def weight_versions(backend: Backend, span: Span) -> str | None:
    """The weights that sampled the last turn: the server's word in the reply, else its word before the run."""
    return span.weight_version or backend.info.weight_version


def sampling_json(sampling: SamplingParams) -> dict[str, Any]:  # Any: JSON values
    """What was sent, as JSON."""
    sent = msgspec.structs.asdict(sampling)
    sent["stop"] = list(sampling.stop)
    sent["stop_token_ids"] = list(sampling.stop_token_ids)
    return sent
