"""The calls of a managed context: arguments, replies, state, failures and calls that overlap."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection
from typing import Any

import pytest

from managed_cli.errors import ConfigError, ContextClosed, PromptRejected, ServerContractError
from managed_cli.managed.server import ManagedServer, within_total
from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import SamplingParams
from tests.managed.context import USER, Context, unmasked
from tests.managed.scripted import CURRENT, Exchange, ScriptedBackend, finished, generation, truncated


def overlapping(context: Context, prompts: list[str], fails: Collection[int] = ()) -> Any:
    """The calls in flight together, finished last first; replies in the order of issue, None for a failed one."""
    exchanges = [
        Exchange(lambda _sent, i=i: [truncated(context.tokenizer, [400 + i])], fails=i in fails)
        for i in range(len(prompts))
    ]

    async def call(exchange: Exchange, prompt: str) -> Any:
        CURRENT.set(exchange)
        try:
            return await context.managed.completion(prompt=prompt)
        except ServerContractError:
            return None

    async def run() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(e, p)) for e, p in zip(exchanges, prompts, strict=True)]
            for exchange in exchanges:
                await exchange.arrived.wait()
            for task, exchange in reversed(list(zip(tasks, exchanges, strict=True))):
                exchange.gate.set()
                await asyncio.wait([task])
        return [task.result() for task in tasks]

    return run()


def ids_of(context: Context) -> list[str]:
    return [node.metadata["node_id"] for node in context.nodes]


@pytest.mark.parametrize("call", ["completion", "chat_completion"])
@pytest.mark.parametrize("unknown", ["stream", "temprature", "best_of", "logprobs"])
def test_an_unknown_keyword_is_a_type_error(smollm2: HuggingFaceTokenizer, call: str, unknown: str) -> None:
    managed = ManagedServer(ScriptedBackend(smollm2.vocab_size), smollm2)
    given = {"prompt": "x"} if call == "completion" else {"messages": [USER]}
    with pytest.raises(TypeError, match=unknown):
        getattr(managed, call)(**given, **{unknown: 1})
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(getattr(managed, call)).parameters.values())


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("chat", [True, False])
def test_choices_pair_with_the_nodes_of_a_fresh_context(smollm2: HuggingFaceTokenizer, n: int, chat: bool) -> None:
    choices = [truncated(smollm2, [400 + i], seed=i) for i in range(n)]

    async def talk() -> tuple[Any, Any]:
        context = Context(smollm2)
        reply = await (context.chat([USER], *choices) if chat else context.complete("x", *choices))
        return reply, context.managed.get_state()

    reply, state = asyncio.run(talk())
    pairs = list(zip(reply.choices, state["nodes"], strict=True))
    assert [choice.node_id for choice, _ in pairs] == [node.metadata["node_id"] for _, node in pairs]
    assert [unmasked(node) for _, node in pairs] == [list(choice.token_ids) for choice in choices]
    assert [node.metadata["choice_index"] for _, node in pairs] == [choice.index for choice, _ in pairs]


def test_usage_counts_the_prompt_once_and_every_choice(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Any:
        context = Context(smollm2)
        return await context.complete("one two", generation([400, 401]), generation([]))

    usage = asyncio.run(talk()).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 2, 4)


def test_every_sampling_parameter_is_sent(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2)
        settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
        await context.complete("x", generation([400]), max_tokens=5, stop="end", stop_token_ids=[9], **settings)
        return context

    sampling = asyncio.run(talk()).backend.log[0].sampling
    assert sampling == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, seed=3, stop=("end",),
        stop_token_ids=(9,),
    )  # fmt: skip


def test_two_calls_that_extend_one_node_stand_in_the_order_of_issue(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", truncated(smollm2, smollm2.encode_suffix("a")))
        await overlapping(context, ["other", "x a one", "x a two", "last"])
        return context

    context = asyncio.run(talk())
    assert ids_of(context) == ["2.0", "1.0", "3.0", "4.0"]
    assert [node.metadata["parent_id"] for node in context.nodes] == ["0.0", None, "0.0", None]


def test_a_call_that_fails_leaves_the_node_it_would_have_replaced(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", truncated(smollm2, smollm2.encode_suffix("a")))
        replies = await overlapping(context, ["x a one", "x a two"], fails={0})
        assert replies[0] is None
        return context

    context = asyncio.run(talk())
    assert ids_of(context) == ["0.0", "2.0"]
    asyncio.run(overlapping(context, ["x a three"]))
    assert ids_of(context) == ["3.0", "2.0"]


def test_a_cancelled_call_is_not_recorded_and_gives_its_claim_back(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context, exchange = Context(smollm2), Exchange(lambda _sent: [])
        await context.complete("x ", truncated(smollm2, smollm2.encode_suffix("a")))

        async def call() -> None:
            CURRENT.set(exchange)
            await context.managed.completion(prompt="x a one")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(call())
            await exchange.arrived.wait()
            task.cancel()
        await context.complete("x a two", truncated(smollm2, [400]))
        return context

    assert ids_of(asyncio.run(talk())) == ["2.0"]


def test_a_branch_may_leave_from_a_node_that_was_replaced(smollm2: HuggingFaceTokenizer) -> None:
    a = truncated(smollm2, smollm2.encode_suffix("a"))

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", a)
        await context.complete("x a one ", a)
        await context.complete("x a two ", a)
        return context

    nodes = asyncio.run(talk()).nodes
    assert [(n.metadata["node_id"], n.metadata["parent_id"]) for n in nodes] == [("1.0", "0.0"), ("2.0", "0.0")]
    assert [len(unmasked(node)) for node in nodes] == [2, 2]


def test_a_context_that_was_left_refuses_everything(smollm2: HuggingFaceTokenizer) -> None:
    context = Context(smollm2)
    with context.managed:
        pass
    for use in (context.managed.nodes, context.managed.get_state, context.managed.reset, context.managed.take_rows):
        with pytest.raises(ContextClosed):
            use()
    with pytest.raises(ContextClosed):
        asyncio.run(context.complete("x", generation([400])))
    assert context.backend.log == []


def test_a_call_that_was_issued_before_a_reset_is_not_sent_after_it(smollm2: HuggingFaceTokenizer) -> None:
    """It waits for its turn to be planned; its reply could not be recorded any more."""

    async def talk() -> Context:
        context = Context(smollm2)

        async def call() -> None:
            CURRENT.set(Exchange(lambda _sent: [generation([400])]))
            with pytest.raises(ContextClosed):
                await context.managed.completion(prompt="x")

        async with asyncio.TaskGroup() as group, context.managed._planning:
            group.create_task(call())
            await asyncio.sleep(0)
            context.managed.reset()
        return context

    assert asyncio.run(talk()).backend.log == []


def test_reset_starts_anew(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", truncated(smollm2, smollm2.encode_suffix("a")))
        context.managed.reset()
        await context.complete("x a more", truncated(smollm2, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert (node.metadata["node_id"], node.metadata["parent_id"]) == ("0.0", None)
    assert unmasked(node) == [400]


def test_metadata_of_the_caller_never_replaces_the_facts(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2, metadata={"sample_id": "s", "node_id": "mine", "own": 1})
        await context.complete("x", generation([400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert (node.metadata["sample_id"], node.metadata["node_id"], node.metadata["own"]) == ("s", "0.0", 1)


def test_a_prompt_that_fills_the_limit_is_rejected() -> None:
    sampling = SamplingParams(max_tokens=10)
    assert within_total(sampling, 95, None) is sampling
    assert within_total(sampling, 95, 100).max_tokens == 5
    assert within_total(sampling, 5, 100).max_tokens == 10
    with pytest.raises(PromptRejected, match="100 tokens"):
        within_total(sampling, 100, 100)


def test_prompt_and_messages_exclude_each_other(smollm2: HuggingFaceTokenizer) -> None:
    managed = Context(smollm2).managed
    for given in ({}, {"prompt": "x", "messages": [USER]}):
        with pytest.raises(ConfigError):
            asyncio.run(managed.plan(**given))  # type: ignore[arg-type]  # either of two keywords


def test_planning_shows_the_ids_that_would_be_sent_and_records_nothing(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> tuple[Context, Any]:
        context = Context(smollm2)
        await context.chat([USER], finished(smollm2, smollm2.encode_suffix("42"), 2))
        more = [USER, {"role": "assistant", "content": "42"}, USER]
        planned = await context.managed.plan(messages=more)
        before = ids_of(context)
        await context.chat(more, generation([400]))
        assert before == ["0.0"]
        return context, planned

    context, planned = asyncio.run(talk())
    assert context.sent == planned.token_ids


def test_a_long_prompt_is_planned_in_a_thread_with_the_same_result(
    smollm2: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> list[Any]:
        context = Context(smollm2)
        await context.complete("once upon a time ", truncated(smollm2, smollm2.encode_suffix("there")))
        await context.complete("once upon a time there was", truncated(smollm2, [400]))
        return [(node.tokens, node.masked_tokens, node.full_text) for node in context.nodes]

    on_the_loop = asyncio.run(talk())
    monkeypatch.setattr("managed_cli.managed.server.LONG_TEXT_CHARACTERS", 0)
    assert asyncio.run(talk()) == on_the_loop


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize(("longest", "in_threads"), [(0, 4), (20, 3), (85, 1)])
def test_a_long_conversation_is_planned_on_the_loop_or_in_a_thread_with_the_same_result(
    smollm2: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch, history: str, longest: int, in_threads: int
) -> None:
    threads: list[object] = []

    async def talk() -> list[Any]:
        context, messages = Context(smollm2, history=history), [USER]
        for answer in ("42", " forty-two,  as was said more than once", "no"):
            await context.chat(messages, finished(smollm2, smollm2.encode_suffix(answer), 2))
            messages = [*messages, {"role": "assistant", "content": answer}, USER]
        rewritten = [{"role": "user", "content": "Something else. " * 9}, *messages[1:]]
        await context.chat(rewritten, finished(smollm2, smollm2.encode_suffix("so"), 2))
        return [(node.tokens, node.masked_tokens, node.full_text, node.metadata["parent_id"]) for node in context.nodes]

    async def counted(work: Any, *arguments: Any) -> Any:  # Any: whatever is to be done
        threads.append(work)
        return work(*arguments)

    expected = asyncio.run(talk())
    monkeypatch.setattr("managed_cli.managed.server.LONG_TEXT_CHARACTERS", longest)
    monkeypatch.setattr("asyncio.to_thread", counted)
    assert asyncio.run(talk()) == expected
    assert len(threads) == in_threads
