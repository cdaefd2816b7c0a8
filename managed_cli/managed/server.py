"""`ManagedServer`: completions through one context, every token of them tracked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, Self, TypeVar, cast

import msgspec

from managed_cli.backends.base import Backend
from managed_cli.errors import ConfigError, ContextClosed, PromptRejected
from managed_cli.managed.nodes import Chat, tracked_nodes
from managed_cli.managed.recording import node_metadata
from managed_cli.managed.responses import ChatChoice, ChatCompletion, ChatMessage, Completion, CompletionChoice, Usage
from managed_cli.managed.sampling import checked_sampling
from managed_cli.managed.short_texts import LongText, short_texts
from managed_cli.node import SequenceNode
from managed_cli.tokenizers import as_tokenizer
from managed_cli.tracking.extension import plan_prompt, plan_verbatim
from managed_cli.tracking.masking import PromptEncoding, Span, TrackedNode, root_prompt
from managed_cli.tracking.messages import content_text, ends_with_answer
from managed_cli.tracking.trackers import NodeTracker
from managed_cli.types import TOP_K_OFF, GenerationReply, Message, SamplingParams, Tokenizer

LONG_TEXT_CHARACTERS = 50_000
"""Longer texts are encoded, and by some libraries decoded, in a thread: on the event loop they would hold up every
other request for over 10 ms."""

LONGEST_CHAT_CHARACTERS = 1_000_000
"""A longer conversation goes to the thread at once: to plan a turn of one with 670,000 took 7 ms."""

History = Literal["template", "verbatim"]

P = ParamSpec("P")
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
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        sampling: SamplingParams,
        max_total_tokens: int | None = None,
    ) -> tuple[list[TrackedNode], GenerationReply]:
        """The nodes of one call, in choice order, and the server's reply; what the public calls stand on.

        Args:
            prompt_ids: sent as they are, nothing before them; never an extension.
            max_total_tokens: most prompt + completion tokens; cuts `sampling.max_tokens`.
        """
        self._check_open()
        # What the caller does to its messages while the server generates must not change what they were.
        chat = Chat.of(messages, tools)
        ticket = self._tracker.issue()
        try:
            await self._prepare()
            async with self._planning:
                encoding = await self._plan(prompt, chat, prompt_ids)
                self._tracker.claim(ticket, encoding.parent)
            sampling = within_total(sampling, len(encoding.row), max_total_tokens)
            reply = await self.backend.generate(encoding.sent, sampling)
            decoded_at_length = 0 if self.tokenizer.decodes_bytes else len(encoding.text)
            tracked = ticket.number, encoding, reply, chat
            nodes = await self._off_loop(decoded_at_length, self._tracked, *tracked)
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
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
    ) -> PromptEncoding:
        """The ids that would be sent now, without sending them."""
        return await self._plan(prompt, Chat.of(messages, tools), prompt_ids)

    async def _plan(self, prompt: str | None, chat: Chat | None, prompt_ids: Sequence[int] | None) -> PromptEncoding:
        if prompt_ids is not None:
            if prompt is not None or chat is not None:
                raise ConfigError("give one of prompt, prompt_ids and messages")
            return await self._off_loop(0, self._plan_ids, prompt_ids)
        nodes = self._tracker.known_nodes()
        if prompt is not None and chat is None:
            return await self._off_loop(len(prompt), self._plan_text, prompt, nodes)
        if chat is None or prompt is not None:
            raise ConfigError("give one of prompt, prompt_ids and messages")
        size = sum(len(content_text(message.get("content"))) for message in chat.messages)
        if nodes and LONG_TEXT_CHARACTERS < size <= LONGEST_CHAT_CHARACTERS and not self.tokenizer.over_network:
            with contextlib.suppress(LongText):  # mostly it goes on from a node, and little of it has to be encoded
                return self._plan_chat(chat, nodes, short_texts(self.tokenizer, LONG_TEXT_CHARACTERS))
        return await self._off_loop(size, self._plan_chat, chat, nodes, self.tokenizer)

    def _plan_ids(self, prompt_ids: Sequence[int]) -> PromptEncoding:
        unknown = next((token for token in prompt_ids if not 0 <= token < self.tokenizer.vocab_size), None)
        if unknown is not None:
            raise PromptRejected(
                f"the prompt holds id {unknown}, but the tokenizer has a vocabulary of {self.tokenizer.vocab_size}"
            )
        return root_prompt(self.tokenizer.decode(prompt_ids), prompt_ids)

    def _plan_text(self, prompt: str, nodes: Sequence[TrackedNode]) -> PromptEncoding:
        text = self.tokenizer.prompt_text(prompt)
        return plan_prompt(text, nodes, self.tokenizer, root_ids=lambda: self.tokenizer.encode_prompt(prompt))

    def _plan_chat(self, chat: Chat, nodes: Sequence[TrackedNode], tokenizer: Tokenizer) -> PromptEncoding:
        messages, tools = chat.messages, chat.tools
        continue_final = ends_with_answer(messages)

        def render(conversation: Sequence[Message]) -> str:
            return tokenizer.render_chat(conversation, tools=tools, continue_final_message=continue_final)

        if self.history == "verbatim":
            prompt = plan_verbatim(messages, nodes, tokenizer, render=render, tools=tools)
            if prompt is not None:
                return prompt
        return plan_prompt(render(messages), nodes, tokenizer, conversation=messages)

    def _tracked(
        self, number: int, prompt: PromptEncoding, reply: GenerationReply, chat: Chat | None
    ) -> list[TrackedNode]:
        def metadata_of(spans: Sequence[Span], node_id: str, choice_index: int) -> dict[str, Any]:  # Any: JSON values
            facts = (self.metadata, self.backend, prompt, reply, spans)
            return node_metadata(*facts, node_id=node_id, choice_index=choice_index)

        return tracked_nodes(number, prompt, reply, chat, self.tokenizer, metadata_of)

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

    def take_rows(self) -> list[TrackedNode]:
        """The nodes as they were tracked, for a caller that is done with the context: nothing is copied."""
        self._check_open()
        return self._tracker.nodes()

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

    async def _off_loop(self, characters: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(…)` on a text so long, in a thread where it would block the event loop."""
        if self.tokenizer.over_network or characters > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)


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
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _named_sampling(arguments: Mapping[str, Any]) -> SamplingParams:  # Any: locals() of a public call
    names = SamplingParams.__struct_fields__
    return checked_sampling(**{name: arguments[name] for name in names})


def _usage(nodes: Sequence[TrackedNode], reply: GenerationReply) -> Usage:
    sampled = sum(len(choice.token_ids) for choice in reply.choices)
    prompt = nodes[0].last_span.start
    return Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
