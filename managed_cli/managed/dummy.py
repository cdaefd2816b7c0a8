"""OpenAI endpoints in the shape of a managed server: an opt-in for trying out code, never for data.

They give no token ids, so a row from there can only hold placeholders. That is refused unless the environment
variable `ATROPOS_ALLOW_DUMMY_MANAGED_SERVER` says 1, true or yes; rows are then marked `dummy_tokens`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from managed_cli.backends.openai import NO_TOKEN_IDS, OpenAIBackend, TextChoice, TextReply
from managed_cli.errors import ConfigError, PromptRejected
from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.recording import sampling_json
from managed_cli.managed.server import History, ManagedServer
from managed_cli.managed.servers import Server
from managed_cli.tracking.extension import continues_conversation
from managed_cli.tracking.masking import PromptEncoding, Span, TrackedNode, root_prompt
from managed_cli.tracking.row_part import RowPart
from managed_cli.tracking.trackers import NodeTracker, Ticket
from managed_cli.types import Generation, GenerationReply, Message, SamplingParams

OPT_IN_VARIABLE = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
"""Named as in Atropos, whose environments set it."""

OPT_IN_VALUES = frozenset({"1", "true", "yes"})

DUMMY_PROMPT_LENGTH = 64
DUMMY_COMPLETION_LENGTH = 64
"""Tokens of the placeholder arrays: 64 masked and 64 sampled, the same for every text."""

DUMMY_LOGPROB = -0.5
"""Logprob of every sampled placeholder: allowed by the alignment rule, and plainly not measured."""

DUMMY_ROW = RowPart(
    RowPart(None, range(DUMMY_PROMPT_LENGTH)),
    range(DUMMY_PROMPT_LENGTH, DUMMY_PROMPT_LENGTH + DUMMY_COMPLETION_LENGTH),
    [DUMMY_LOGPROB] * DUMMY_COMPLETION_LENGTH,
)


class DummyTokensWarning(UserWarning):
    """Rows hold placeholder tokens and cannot be trained on."""


class OpenAIServer(Server):
    """An OpenAI endpoint; its contexts are `DummyManagedServer`s, and only where that is opted into."""

    server_type = "openai"

    @property
    def is_prepared(self) -> bool:
        """Whether the endpoint has been asked for its model."""
        return self._backend is not None and self._asked

    def __init__(self, config: APIServerConfig | None = None, **settings: Any) -> None:  # Any: fields of the config
        super().__init__(config, **settings)
        self._asked = False

    async def _prepare(self) -> None:
        require_opt_in()
        if self._backend is None:
            self._backend = await self.connected()
        await self._backend.wait_until_ready(self.config.wait_for_server)
        await self._backend.probe()
        self._asked = True

    def _context(
        self, tokenizer: Any, track_tree: bool, history: History, metadata: Mapping[str, Any] | None
    ) -> ManagedServer:  # Any: as in `managed_server`
        return DummyManagedServer(self, tokenizer, track_tree, history=history, metadata=metadata)


class DummyManagedServer(ManagedServer):
    """A managed server over text: replies are real, arrays are placeholders.

    `full_text` is `role:content` of every message, joined by blank lines; for a text prompt, prompt and completion.

    Raises (when made):
        NotImplementedError: the opt-in is not set; the message explains the limitation.
    """

    def __init__(
        self,
        server: Any,  # Any: an `OpenAIServer`, or a probed `OpenAIBackend`
        tokenizer: Any = None,  # Any: not used; there are no ids to decode
        track_tree: bool = False,
        *,
        history: History = "template",
        metadata: Mapping[str, Any] | None = None,  # Any: JSON values
    ) -> None:
        require_opt_in()
        super().__init__(server, None, track_tree, history=history, metadata=metadata)
        del tokenizer
        warnings.warn(
            "an OpenAI endpoint gives no token ids: rows hold placeholder tokens and cannot be trained on",
            DummyTokensWarning,
            stacklevel=2,
        )

    async def sample(
        self,
        *,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        sampling: SamplingParams,
        max_total_tokens: int | None = None,
    ) -> tuple[list[TrackedNode], GenerationReply]:
        """The placeholder nodes of one call, in choice order, and a reply that holds their arrays."""
        self._check_open()
        if max_total_tokens is not None:
            raise ConfigError("an OpenAI endpoint gives no token counts beforehand, so a total cannot be kept to")
        if prompt_ids is not None:
            raise PromptRejected(NO_TOKEN_IDS)
        if (prompt is None) == (messages is None):
            raise ConfigError("give either prompt or messages")
        if tools:
            raise ConfigError("the dummy managed server does not send tools")
        ticket = self._tracker.issue()
        try:
            await self._prepare()
            backend = self.backend
            assert isinstance(backend, OpenAIBackend)
            parent = _continued(self._tracker, prompt, messages)
            self._tracker.claim(ticket, parent)
            if messages is None:
                assert prompt is not None
                reply = await backend.complete(prompt, sampling)
            else:
                reply = await backend.chat(messages, sampling)
            self._check_open()
            nodes = [
                self._dummy_node(ticket, index, parent, choice, reply, prompt, messages)
                for index, choice in enumerate(reply.choices)
            ]
            self._tracker.record(ticket, nodes)
        except BaseException:
            self._tracker.release(ticket)
            raise
        return nodes, _generation_reply(reply)

    def _dummy_node(
        self,
        ticket: Ticket,
        index: int,
        parent: TrackedNode | None,
        choice: TextChoice,
        reply: TextReply,
        prompt: str | None,
        messages: Sequence[Message] | None,
    ) -> TrackedNode:
        conversation = None if messages is None else (*messages, {"role": "assistant", "content": choice.text})
        full_text = f"{prompt}{choice.text}" if conversation is None else conversation_text(conversation)
        node_id = f"{ticket.number}.{index}"
        span = Span(
            start=DUMMY_PROMPT_LENGTH,
            end=DUMMY_PROMPT_LENGTH + DUMMY_COMPLETION_LENGTH,
            text=choice.text,
            finish_reason=choice.finish_reason,
        )
        metadata = {
            **self.metadata,
            "sample_id": self.metadata.get("sample_id"),
            "choice_index": index,
            "node_id": node_id,
            "parent_id": parent.node_id if parent else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "turns": [span.to_json()],
            "sampling": sampling_json(reply.sampling),
            "server": reply.server,
            "server_type": self.backend.server_type,
            "model": self.backend.info.model,
            "logprobs_mode": str(self.backend.info.logprobs_mode),
            "attempts": reply.attempts,
            "dummy_tokens": True,
        }
        return TrackedNode(
            node_id=node_id,
            row=DUMMY_ROW,
            full_text=full_text,
            metadata=metadata,
            spans=(span,),
            prompt_text=full_text.removesuffix(choice.text),
            continued_text=full_text,
            end_token_text="",
            conversation=conversation,
        )

    async def plan(
        self,
        *,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> PromptEncoding:
        """The text that would be sent, with placeholder ids."""
        del tools
        if prompt_ids is not None:
            raise NotImplementedError(NO_TOKEN_IDS)
        text = prompt if messages is None else conversation_text(messages)
        return root_prompt(text or "", range(DUMMY_PROMPT_LENGTH))

    async def get_logprobs(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        top_k: int | None = None,
        top_logprobs: int | None = None,
    ) -> dict[str, list[Any]]:  # Any: never returned
        """Always raises NotImplementedError: placeholders for logprobs would be inventions."""
        raise NotImplementedError(f"get_logprobs: {NO_TOKEN_IDS}")


def require_opt_in() -> None:
    """Return when the environment allows placeholders.

    Raises:
        NotImplementedError: it does not; the message explains the limitation and how to opt in.
    """
    if os.environ.get(OPT_IN_VARIABLE, "").lower() not in OPT_IN_VALUES:
        raise NotImplementedError(
            f"{NO_TOKEN_IDS}. To try out code with placeholder tokens, which cannot be trained on, "
            f"set {OPT_IN_VARIABLE}=1"
        )


def conversation_text(conversation: Sequence[Message]) -> str:
    """`role:content` of every message, joined by blank lines."""
    return "\n\n".join(f"{message.get('role')}:{message.get('content') or ''}" for message in conversation)


def _continued(tracker: NodeTracker, prompt: str | None, messages: Sequence[Message] | None) -> TrackedNode | None:
    """The newest node that the call continues, by its text; None where it begins anew."""
    for node in reversed(tracker.known_nodes()):
        if messages is not None and continues_conversation(node, messages):
            return node
        if prompt is not None and node.last_span.text and prompt.startswith(node.continued_text):
            return node
    return None


def _generation_reply(reply: TextReply) -> GenerationReply:
    choices = tuple(
        Generation(
            token_ids=list(DUMMY_ROW.tokens),
            logprobs=[DUMMY_LOGPROB] * DUMMY_COMPLETION_LENGTH,
            text=choice.text,
            finish_reason=choice.finish_reason,
        )
        for choice in reply.choices
    )
    return GenerationReply(choices=choices, sampling=reply.sampling, server=reply.server, attempts=reply.attempts)
