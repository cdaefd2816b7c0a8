"""`ManagedServer`: completions through one context, every token of them tracked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeVar, cast

from managed_cli.backends.base import Backend
from managed_cli.errors import ConfigError, ContextClosed, PromptRejected
from managed_cli.managed.recording import node_metadata, shown_text
from managed_cli.managed.responses import ChatChoice, ChatCompletion, ChatMessage, Completion, CompletionChoice, Usage
from managed_cli.managed.sampling import checked_sampling
from managed_cli.node import SequenceNode
from managed_cli.tokenizers import as_tokenizer
from managed_cli.tracking.extension import plan_prompt, plan_verbatim, verbatim_lengths, with_placeholder
from managed_cli.tracking.masking import (
    PromptEncoding,
    TrackedNode,
    completion_span,
    join_prompt_and_completion,
)
from managed_cli.tracking.trackers import NodeTracker, Ticket
from managed_cli.types import TOP_K_OFF, GenerationReply, Message, SamplingParams, Tokenizer

LONG_TEXT_CHARACTERS = 50_000
"""Longer texts are tokenised in a thread: on the event loop they would hold up every other request for over 10 ms."""

History = Literal["template", "verbatim"]

T = TypeVar("T")


class PreparedServer(Protocol):
    """What a context needs of a `Server`: it checks itself once, and then has a backend and a tokenizer."""

    @property
    def backend(self) -> Backend: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    async def prepare(self) -> Any:  # Any: what it returns is of no interest here
        """Connect, check, load the tokenizer; once."""
        ...


class ManagedServer:
    """One context on one server: what is sampled through it becomes `SequenceNode`s.

    Args:
        server: a `Server`, prepared on first use; or a bare, probed backend together with its tokenizer.
        tokenizer: ours or one of transformers; None takes the server's.
        track_tree: keep every node; otherwise an extension takes the place of the node it extends.
        history: `template` renders conversations as the chat template says; `verbatim` keeps sampled tokens and
            splices in only the new messages.
        metadata: put into every node's metadata.
    """

    def __init__(
        self,
        server: PreparedServer | Backend,
        tokenizer: Any = None,  # Any: one of ours, or a transformers tokenizer
        track_tree: bool = False,
        *,
        history: History = "template",
        metadata: Mapping[str, Any] | None = None,  # Any: JSON values
    ) -> None:
        self.track_tree = track_tree
        self.history = history
        self.metadata = dict(metadata or {})
        # A bare backend has no `prepare`; asking for its properties instead would be asking before they are there.
        self._server = cast("PreparedServer", server) if hasattr(server, "prepare") else None
        self._backend = None if hasattr(server, "prepare") else server
        self._tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        self._tracker = NodeTracker(keep_every_node=track_tree)
        self._planning = asyncio.Lock()
        self._closed = False

    @property
    def backend(self) -> Backend:
        """The wire side of the server, once prepared."""
        if self._backend is None:
            assert self._server is not None
            self._backend = self._server.backend
        return self._backend

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids are sent, once the server is prepared."""
        if self._tokenizer is None:
            if self._server is None:
                raise ConfigError("a bare backend needs its tokenizer: ManagedServer(backend, tokenizer)")
            self._tokenizer = self._server.tokenizer
        return self._tokenizer

    async def _prepare(self) -> None:
        if self._server is not None:
            await self._server.prepare()

    async def completion(
        self,
        *,
        prompt: str,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = TOP_K_OFF,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> Completion:
        """`n` completions of a text, in OpenAI's shape.

        Raises:
            ConfigError: a parameter out of range.
            ServerError: the server cannot be reached, refuses, or breaks its contract; nothing is recorded.
            ContextClosed: this context has been left.
        """
        params = _named_sampling(locals())
        nodes, reply = await self.sample(prompt=prompt, sampling=params)
        choices = [
            CompletionChoice(
                index=index,
                text=node.last_span.text,
                finish_reason=node.last_span.finish_reason,
                stop_reason=node.last_span.stop_reason,
                node_id=node.node_id,
            )
            for index, node in enumerate(nodes)
        ]
        return Completion(
            id=f"cmpl-{nodes[0].node_id}", model=self.backend.info.model, choices=choices, usage=_usage(nodes, reply)
        )

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = TOP_K_OFF,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> ChatCompletion:
        """`n` answers to a conversation, in OpenAI's shape; a last message of the assistant is continued.

        Raises:
            As `completion`; InputError where the chat template refuses the conversation.
        """
        params = _named_sampling(locals())
        nodes, reply = await self.sample(messages=messages, tools=tools, sampling=params)
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=node.last_span.text),
                finish_reason=node.last_span.finish_reason,
                stop_reason=node.last_span.stop_reason,
                node_id=node.node_id,
            )
            for index, node in enumerate(nodes)
        ]
        return ChatCompletion(
            id=f"chatcmpl-{nodes[0].node_id}",
            model=self.backend.info.model,
            choices=choices,
            usage=_usage(nodes, reply),
        )

    async def sample(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        sampling: SamplingParams,
        max_total_tokens: int | None = None,
    ) -> tuple[list[TrackedNode], GenerationReply]:
        """The nodes of one call, in choice order, and the server's reply; what the public calls stand on.

        Args:
            max_total_tokens: most prompt + completion tokens; cuts `sampling.max_tokens`.
        """
        self._check_open()
        ticket = self._tracker.issue()
        try:
            await self._prepare()
            async with self._planning:
                encoding = await self.plan(prompt=prompt, messages=messages, tools=tools)
                self._tracker.claim(ticket, encoding.parent)
            sampling = within_total(sampling, len(encoding.token_ids), max_total_tokens)
            reply = await self.backend.generate(encoding.token_ids, sampling)
            build = self._node_builder(ticket, encoding, reply, messages)
            nodes = await self._off_loop(encoding.text, build)
            self._check_open()
            self._tracker.record(ticket, nodes)
        except BaseException:
            self._tracker.release(ticket)
            raise
        return nodes, reply

    async def plan(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> PromptEncoding:
        """The ids that would be sent now, without sending them."""
        if (prompt is None) == (messages is None):
            raise ConfigError("give either prompt or messages")
        nodes = self._tracker.known_nodes()
        if messages is None:
            assert prompt is not None
            return await self._off_loop(prompt, lambda: self._plan_text(prompt, nodes))
        size = "".join(str(message.get("content") or "") for message in messages)
        return await self._off_loop(size, lambda: self._plan_chat(messages, tools, nodes))

    def _plan_text(self, prompt: str, nodes: Sequence[TrackedNode]) -> PromptEncoding:
        text = self.tokenizer.prompt_text(prompt)
        return plan_prompt(text, nodes, self.tokenizer, root_ids=self.tokenizer.encode_prompt(prompt))

    def _plan_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, nodes: Sequence[TrackedNode]
    ) -> PromptEncoding:
        continue_final = bool(messages) and messages[-1].get("role") == "assistant"

        def render(conversation: Sequence[Message]) -> str:
            return self.tokenizer.render_chat(conversation, tools=tools, continue_final_message=continue_final)

        if self.history == "verbatim":
            rendered = {
                length: render(with_placeholder(messages, length)) for length in verbatim_lengths(messages, nodes)
            }
            prompt = plan_verbatim(messages, nodes, self.tokenizer, rendered_with_placeholder=rendered)
            if prompt is not None:
                return prompt
        return plan_prompt(render(messages), nodes, self.tokenizer, conversation=messages)

    def _node_builder(
        self, ticket: Ticket, prompt: PromptEncoding, reply: GenerationReply, messages: Sequence[Message] | None
    ) -> Callable[[], list[TrackedNode]]:
        def build() -> list[TrackedNode]:
            prompt_spelled = self.tokenizer.decode(prompt.token_ids)
            return [
                self._node(ticket, index, prompt, prompt_spelled, reply, messages)
                for index in range(len(reply.choices))
            ]

        return build

    def _node(
        self,
        ticket: Ticket,
        index: int,
        prompt: PromptEncoding,
        prompt_spelled: str,
        reply: GenerationReply,
        messages: Sequence[Message] | None,
    ) -> TrackedNode:
        completion = reply.choices[index]
        shown = shown_text(completion, reply.sampling, self.tokenizer)
        full_text = self.tokenizer.decode([*prompt.token_ids, *completion.token_ids])
        # Where the text of the whole is not the text of its parts (SentencePiece, a split character), take the parts.
        added = (
            full_text[len(prompt_spelled) :]
            if full_text.startswith(prompt_spelled)
            else self.tokenizer.decode(completion.token_ids)
        )
        end_text = "" if completion.end_token_id is None else self.tokenizer.decode([completion.end_token_id])
        spans = (*prompt.spans, completion_span(prompt, completion, shown))
        node_id = f"{ticket.number}.{index}"
        metadata = node_metadata(self.metadata, self.backend, prompt, reply, spans, node_id=node_id, choice_index=index)
        return TrackedNode(
            node_id=node_id,
            node=join_prompt_and_completion(prompt, completion, full_text=full_text, metadata=metadata),
            spans=spans,
            prompt_text=prompt.text,
            continued_text=prompt.text + added,
            end_token_text=end_text if added.endswith(end_text) else "",
            conversation=_answered(messages, shown),
        )

    async def get_logprobs(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        top_k: int | None = None,
        top_logprobs: int | None = None,
    ) -> dict[str, list[Any]]:  # Any: ids, lists of ids, lists of floats
        """Top-k alternatives at every prompt position, real ones or an error.

        Shapes, for P prompt tokens: `prompt_tokens` [P]; `prompt_topk_token_ids` and `prompt_topk_logprobs` [P][k],
        best first. Position 0 has no logprob, since nothing precedes it: its lists are empty.

        Raises:
            NotImplementedError: this server type has no prompt logprobs.
            ServerContractError: something is missing from the reply.
        """
        self._check_open()
        if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
            raise ConfigError("give exactly one of prompt, messages and input_ids")
        if top_k is not None and top_logprobs is not None and top_k != top_logprobs:
            raise ConfigError(f"top_k is {top_k} and top_logprobs {top_logprobs}; they mean the same")
        count = top_k if top_k is not None else top_logprobs if top_logprobs is not None else 1
        if count < 1:
            raise ConfigError(f"top_k is {count}; it must be at least 1")
        await self._prepare()
        if input_ids is None:
            fresh = ManagedServer(self.backend, self.tokenizer, history=self.history)
            input_ids = (await fresh.plan(prompt=prompt, messages=messages)).token_ids
        found = await self.backend.prompt_logprobs(list(input_ids), count)
        return {
            "prompt_tokens": found.prompt_tokens,
            "prompt_topk_token_ids": found.topk_token_ids,
            "prompt_topk_logprobs": found.topk_logprobs,
        }

    def get_state(self) -> dict[str, Any]:  # Any: lists or mappings of nodes
        """A snapshot: `{"nodes": [...]}`, or in tree mode `{"sequences": {full_text: node}, "tree": the same}`.

        Where two nodes of a tree have the same text, the mapping holds the newest; `nodes()` has them all.
        """
        nodes = self.nodes()
        if not self.track_tree:
            return {"nodes": nodes}
        sequences = {node.full_text: node for node in nodes}
        return {"sequences": sequences, "tree": sequences}

    def nodes(self) -> list[SequenceNode]:
        """Copies of the nodes, in the order their calls were issued, choices in choice order."""
        self._check_open()
        return self._tracker.snapshot()

    def take_nodes(self) -> list[SequenceNode]:
        """The nodes themselves, for a caller that is done with the context and need not pay for copies."""
        self._check_open()
        return [tracked.node for tracked in self._tracker.nodes()]

    def reset(self) -> None:
        """Forget every node; calls under way raise ContextClosed instead of being recorded."""
        self._check_open()
        self._tracker.reset()

    def close(self) -> None:
        """End the context; every later use raises ContextClosed."""
        self._tracker.reset()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed(
                "this managed context has been left; its nodes are gone",
                hint="call get_state() before the end of the `async with` block",
            )

    async def _off_loop(self, text: str, work: Callable[[], T]) -> T:
        """`work()`, in a thread where it would block the event loop."""
        if self.tokenizer.over_network or len(text) > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(work)
        return work()


def within_total(sampling: SamplingParams, prompt_length: int, max_total_tokens: int | None) -> SamplingParams:
    """`sampling` with `max_tokens` cut so that prompt and completion keep to `max_total_tokens`.

    Raises:
        PromptRejected: the prompt alone reaches the limit.
    """
    if max_total_tokens is None:
        return sampling
    room = max_total_tokens - prompt_length
    if room < 1:
        raise PromptRejected(f"the prompt has {prompt_length} tokens, and --max-total-tokens is {max_total_tokens}")
    return dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _answered(messages: Sequence[Message] | None, answer: str) -> tuple[Message, ...] | None:
    """The conversation with the model's answer; a continued last message grows by it."""
    if messages is None:
        return None
    if messages and messages[-1].get("role") == "assistant":
        last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{answer}"}
        return (*messages[:-1], last)
    return (*messages, {"role": "assistant", "content": answer})


def _named_sampling(arguments: Mapping[str, Any]) -> SamplingParams:  # Any: locals() of a public call
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return checked_sampling(**{name: arguments[name] for name in names})


def _usage(nodes: Sequence[TrackedNode], reply: GenerationReply) -> Usage:
    sampled = sum(len(choice.token_ids) for choice in reply.choices)
    prompt = nodes[0].last_span.start
    return Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
