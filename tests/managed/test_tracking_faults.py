"""Each fault of the tracking kind that was seen in such systems, on real tokenizers: ours does not have it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from managed_cli.errors import AlignmentError, ContextClosed
from managed_cli.node import SequenceNode
from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import Generation
from tests.managed.context import USER, Context, unmasked
from tests.managed.scripted import CURRENT, Exchange, finished, generation, truncated
from tests.tokenizers import catalog


@pytest.mark.parametrize("name", [name for name in catalog.NAMES if catalog.CATALOG[name].keeps_history])
def test_each_turn_has_one_end_of_turn_token_and_it_is_the_sampled_one(name: str) -> None:
    tokenizer, end_id = catalog.loaded(name), catalog.end_ids(name)[0]
    answer = tokenizer.encode_suffix("The answer is 42.")

    async def four_turns() -> Context:
        context, messages = Context(tokenizer), [USER]
        for _ in range(4):
            reply = await context.chat(messages, finished(tokenizer, answer, end_id))
            said = reply.choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        return context

    (node,) = asyncio.run(four_turns()).nodes
    assert unmasked(node) == [*answer, end_id] * 4
    turns = [turn["end"] for turn in node.metadata["turns"]]
    assert [node.masked_tokens[end - 1] for end in turns] == [end_id] * 4
    assert end_id not in [node.tokens[end] for end in turns[:-1]]


@pytest.mark.parametrize("first_is_longer", [True, False])
def test_continuing_42_extends_42_and_not_4(smollm2: HuggingFaceTokenizer, first_is_longer: bool) -> None:
    four, forty_two = smollm2.encode_suffix("4"), smollm2.encode_suffix("42")
    choices = [truncated(smollm2, four), truncated(smollm2, forty_two)]
    at = 0 if first_is_longer else 1

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("6 times 7 is ", *(reversed(choices) if first_is_longer else choices))
        await context.complete("6 times 7 is 42 and", truncated(smollm2, smollm2.encode_suffix(" so on")))
        return context

    nodes = asyncio.run(talk()).nodes
    assert [node.metadata["node_id"] for node in nodes] == (["1.0", "0.1"] if first_is_longer else ["0.0", "1.0"])
    assert unmasked(nodes[at]) == [*forty_two, *smollm2.encode_suffix(" so on")]


def test_an_answer_that_cannot_be_extended_does_not_fall_back_to_a_shorter_sibling(
    smollm2: HuggingFaceTokenizer,
) -> None:
    """ "42" ended with another token than the template writes; "4" is no part of this conversation."""
    four, forty_two = smollm2.encode_suffix("4"), smollm2.encode_suffix("42")
    other_end = catalog.end_ids("smollm2")[1]

    async def talk() -> Context:
        context = Context(smollm2)
        await context.chat([USER], truncated(smollm2, four), finished(smollm2, forty_two, other_end))
        more = [USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "And?"}]
        await context.chat(more, truncated(smollm2, four))
        return context

    *_, node = asyncio.run(talk()).nodes
    assert unmasked(node) == four
    assert (node.metadata["parent_id"], node.metadata["fork_of"]) == (None, "0.1")


def test_of_two_samples_with_the_same_text_the_continuation_has_the_ids_of_one_of_them(
    smollm2: HuggingFaceTokenizer,
) -> None:
    whole = smollm2.encode_suffix("hello there")
    spelled = [token for letter in "hello there" for token in smollm2.encode_suffix(letter)]

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("say ", truncated(smollm2, whole), truncated(smollm2, spelled))
        await context.complete("say hello there!", truncated(smollm2, whole))
        return context

    context = asyncio.run(talk())
    assert whole != spelled
    assert context.sent == [*smollm2.encode_prompt("say "), *spelled, *smollm2.encode_suffix("!")]
    assert context.nodes[1].metadata["parent_id"] == "0.1"


def test_a_truncated_and_a_finished_sample_of_the_same_text_are_told_apart(smollm2: HuggingFaceTokenizer) -> None:
    ids, end_id = smollm2.encode_suffix("hello"), catalog.end_ids("smollm2")[0]
    cut, whole = truncated(smollm2, ids), finished(smollm2, ids, end_id)

    async def talk(*choices: Generation) -> Context:
        context = Context(smollm2)
        await context.complete("say ", *choices)
        await context.complete("say hello there", cut)
        return context

    for choices in ((cut, whole), (whole, cut)):
        context = asyncio.run(talk(*choices))
        assert end_id not in context.sent
        assert context.nodes[choices.index(cut)].metadata["parent_id"] == f"0.{choices.index(cut)}"


@pytest.mark.parametrize("ends", [True, False])
def test_a_prompt_that_begins_like_an_empty_sample_is_not_its_extension(
    smollm2: HuggingFaceTokenizer, ends: bool
) -> None:
    nothing = finished(smollm2, [], catalog.end_ids("smollm2")[0]) if ends else generation([], text="")

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("once upon", nothing)
        await context.complete("once upon a time", truncated(smollm2, [400, 401]))
        return context

    first, second = asyncio.run(talk()).nodes
    assert [first.metadata["node_id"], second.metadata["node_id"]] == ["0.0", "1.0"]
    assert second.metadata["parent_id"] is None
    assert "fork_reason" not in second.metadata


def test_an_answer_that_is_only_an_end_token_is_extended_where_the_template_writes_it(
    smollm2: HuggingFaceTokenizer,
) -> None:
    end_id = catalog.end_ids("smollm2")[0]

    async def talk() -> Context:
        context = Context(smollm2)
        await context.chat([USER], finished(smollm2, [], end_id))
        again = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "Well?"}]
        await context.chat(again, truncated(smollm2, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [end_id, 400]


def test_choices_of_an_extension_stand_together_where_the_extended_node_stood(smollm2: HuggingFaceTokenizer) -> None:
    a, b, c = (truncated(smollm2, smollm2.encode_suffix(letter)) for letter in "abc")

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", a, b, c)
        await context.complete("x b more", a, b, c)
        return context

    found = [node.metadata["node_id"] for node in asyncio.run(talk()).nodes]
    assert found == ["0.0", "1.0", "1.1", "1.2", "0.2"]


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_earlier_completions_stay_unmasked_in_both_apis_and_both_modes(
    smollm2: HuggingFaceTokenizer, tree: bool, chat: bool
) -> None:
    first, second = smollm2.encode_suffix("one"), smollm2.encode_suffix(" two")

    async def talk() -> Context:
        context = Context(smollm2, track_tree=tree)
        if chat:
            await context.chat([USER], truncated(smollm2, first))
            said = {"role": "assistant", "content": "one"}
            await context.chat([USER, said, USER], truncated(smollm2, second))
        else:
            await context.complete("count: ", truncated(smollm2, first))
            await context.complete("count: one and", truncated(smollm2, second))
        return context

    nodes = asyncio.run(talk()).nodes
    assert len(nodes) == (2 if tree else 1)
    assert unmasked(nodes[-1]) == [*first, *second]


def test_a_tree_keeps_identical_samples_apart(smollm2: HuggingFaceTokenizer) -> None:
    same = truncated(smollm2, smollm2.encode_suffix("same"))

    async def talk() -> Context:
        context = Context(smollm2, track_tree=True)
        await context.complete("x ", same, same, same)
        return context

    context = asyncio.run(talk())
    state = context.managed.get_state()
    assert [node.metadata["node_id"] for node in context.nodes] == ["0.0", "0.1", "0.2"]
    assert {text: node.metadata["node_id"] for text, node in state["tree"].items()} == {"x same": "0.2"}


def test_nodes_stand_in_the_order_of_issue_whatever_finishes_first(smollm2: HuggingFaceTokenizer) -> None:
    async def race() -> list[Any]:
        context = Context(smollm2)
        exchanges = [Exchange(lambda _sent, i=i: [truncated(smollm2, [400 + i])]) for i in range(3)]

        async def call(exchange: Exchange, prompt: str) -> None:
            CURRENT.set(exchange)
            await context.managed.completion(prompt=prompt)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(exchange, f"{i} ")) for i, exchange in enumerate(exchanges)]
            for exchange in exchanges:
                await exchange.arrived.wait()
            for index in (2, 0, 1):
                exchanges[index].gate.set()
                await asyncio.wait([tasks[index]])
        return [node.metadata["node_id"] for node in context.nodes]

    assert asyncio.run(race()) == ["0.0", "1.0", "2.0"]


@pytest.mark.parametrize("leave", [True, False])
def test_a_late_reply_is_not_written_into_a_context_that_was_reset_or_left(
    smollm2: HuggingFaceTokenizer, leave: bool
) -> None:
    async def late() -> None:
        context, exchange = Context(smollm2), Exchange(lambda _sent: [truncated(smollm2, [400])])

        async def call() -> None:
            CURRENT.set(exchange)
            with pytest.raises(ContextClosed):
                await context.managed.completion(prompt="x")

        async with asyncio.TaskGroup() as group:
            group.create_task(call())
            await exchange.arrived.wait()
            if leave:
                context.managed.close()
            else:
                context.managed.reset()
            exchange.gate.set()
        if not leave:
            assert context.nodes == []
            await context.complete("y", truncated(smollm2, [401]))
            assert [node.tokens[-1] for node in context.nodes] == [401]

    asyncio.run(late())


def test_state_is_a_copy_that_nobody_else_can_change(smollm2: HuggingFaceTokenizer) -> None:
    async def talk() -> Context:
        context = Context(smollm2, metadata={"own": {"deep": [1]}})
        await context.complete("x ", truncated(smollm2, [400]))
        return context

    context = asyncio.run(talk())
    (mine,) = context.nodes
    mine.tokens.append(7)
    mine.metadata["turns"][0]["start"] = 99
    mine.metadata["own"]["deep"].append(2)
    (theirs,) = context.nodes
    assert theirs.tokens[-1] == 400
    assert theirs.metadata["turns"][0]["start"] == len(theirs.tokens) - 1
    assert theirs.metadata["own"] == {"deep": [1]}


def test_sentencepiece_keeps_a_completion_s_own_leading_space_and_adds_none_to_a_suffix() -> None:
    llama2 = catalog.loaded("llama2")
    paris = llama2.encode_suffix(" Paris")

    async def talk() -> tuple[Context, Any]:
        context = Context(llama2)
        reply = await context.complete("The capital is", generation(paris))
        said = reply.choices[0].text
        await context.complete(f"The capital is{said}, and", generation(llama2.encode_suffix(" Rome")))
        return context, said

    context, said = asyncio.run(talk())
    assert said == " Paris"
    (node,) = context.nodes
    assert unmasked(node) == [*paris, *llama2.encode_suffix(" Rome")]
    assert node.full_text.endswith("The capital is Paris, and Rome")


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("llama3_1", " leading space"),
        ("llama3_1", "trailing newline\n"),
        ("gemma3", " leading space"),
        ("qwen3", "<think>\nhm\n</think>\n\n42"),
    ],
)
def test_a_template_that_rewrites_an_answer_leaves_the_earlier_row_and_says_so(name: str, sampled: str) -> None:
    tokenizer, end_id = catalog.loaded(name), catalog.end_ids(name)[0]
    ids = tokenizer.encode_suffix(sampled)

    async def talk(history: str) -> list[SequenceNode]:
        context = Context(tokenizer, history=history)
        reply = await context.chat([USER], finished(tokenizer, ids, end_id))
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        await context.chat([USER, said, USER], finished(tokenizer, tokenizer.encode_suffix("ok"), end_id))
        return context.nodes

    first, second = asyncio.run(talk("template"))
    assert unmasked(first) == [*ids, end_id]
    assert unmasked(second) == [*tokenizer.encode_suffix("ok"), end_id]
    assert (second.metadata["fork_of"], second.metadata["fork_reason"]) == ("0.0", "history_rewritten")
    assert second.metadata["parent_id"] is None
    (one,) = asyncio.run(talk("verbatim"))
    assert unmasked(one) == [*ids, end_id, *tokenizer.encode_suffix("ok"), end_id]
    assert "fork_reason" not in one.metadata


def test_a_turn_that_the_template_rewrites_is_named_though_the_turn_before_it_is_kept() -> None:
    tokenizer, end_id = catalog.loaded("llama3_1"), catalog.end_ids("llama3_1")[0]
    plain, spaced = tokenizer.encode_suffix("plain"), tokenizer.encode_suffix(" spaced")

    async def talk() -> list[SequenceNode]:
        context, messages = Context(tokenizer, track_tree=True), [USER]
        for ids in (plain, spaced, plain):
            reply = await context.chat(messages, finished(tokenizer, ids, end_id))
            messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}, USER]
        return context.nodes

    *_, third = asyncio.run(talk())
    assert unmasked(third) == [*plain, end_id, *plain, end_id]
    assert third.metadata["parent_id"] == "0.0"
    assert (third.metadata["fork_of"], third.metadata["fork_reason"]) == ("1.0", "history_rewritten")


@pytest.mark.parametrize("name", [name for name in catalog.NAMES if catalog.CATALOG[name].bos])
def test_bos_stands_once_in_rendered_chats_and_in_text_prompts(name: str) -> None:
    tokenizer = catalog.loaded(name)
    bos = catalog.CATALOG[name].bos
    (bos_id,) = tokenizer.encode_rendered(bos)

    async def talk() -> Context:
        context = Context(tokenizer)
        await context.chat([USER], generation([400]))
        await context.complete("text", generation([400]))
        await context.complete(f"{bos}text that has it already", generation([400]))
        return context

    for exchange in asyncio.run(talk()).backend.log:
        assert exchange.sent.count(bos_id) == 1
        assert exchange.sent[0] == bos_id


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, -2.0, -3.0], [-1.0, float("nan")], [-1.0, 0.5]])
def test_logprobs_that_do_not_fit_are_refused_and_nothing_is_recorded(
    smollm2: HuggingFaceTokenizer, logprobs: list[float]
) -> None:
    bad = Generation(token_ids=[400, 401], logprobs=logprobs, text="x", finish_reason="stop")

    async def talk() -> Context:
        context = Context(smollm2)
        with pytest.raises(AlignmentError):
            await context.complete("x", bad)
        return context

    assert asyncio.run(talk()).nodes == []


@pytest.mark.parametrize("reason", ["abort", "length", "stop", "something_new"])
def test_a_finish_reason_is_recorded_in_the_server_s_own_words(smollm2: HuggingFaceTokenizer, reason: str) -> None:
    async def talk() -> tuple[Any, Context]:
        context = Context(smollm2)
        return await context.complete("x", generation([400], text="y", finish_reason=reason)), context

    reply, context = asyncio.run(talk())
    (node,) = context.nodes
    assert reply.choices[0].finish_reason == node.metadata["finish_reason"] == reason


@pytest.mark.parametrize("name", catalog.NAMES)
def test_sampled_ids_that_text_does_not_give_back_are_kept_as_they_were_sampled(name: str) -> None:
    tokenizer, end_id = catalog.loaded(name), catalog.end_ids(name)[0]
    spelled = [token for letter in "unbelievable" for token in tokenizer.encode_suffix(letter)]
    assert tokenizer.encode_suffix("unbelievable") != spelled

    async def talk() -> Context:
        context = Context(tokenizer)
        reply = await context.chat([USER], finished(tokenizer, spelled, end_id))
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        await context.chat([USER, said, USER], generation([400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*spelled, end_id, 400]
