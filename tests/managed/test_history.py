"""How conversations go on: what the template writes, what was sampled, and when the two are one sequence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from managed_cli.node import SequenceNode
from managed_cli.tokenizers import HuggingFaceTokenizer
from tests.managed.context import USER, Context, unmasked
from tests.managed.scripted import finished, generation, truncated
from tests.tokenizers import catalog

NEXT = {"role": "user", "content": "And 7 times 8?"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("answer", ["The answer is 42.", "42", "naïve 🦜 café", "a\nb  c"])
def test_a_canonical_answer_makes_turn_two_the_ids_of_the_whole_rendered_chat(name: str, answer: str) -> None:
    tokenizer, end_id = catalog.loaded(name), catalog.end_ids(name)[0]
    first = [USER]
    whole = tokenizer.encode_rendered(tokenizer.render_chat([*first, said(answer), NEXT]))
    start = len(tokenizer.encode_rendered(tokenizer.render_chat(first)))
    sampled = whole[start : whole.index(end_id, start)]

    async def talk() -> Context:
        context = Context(tokenizer)
        reply = await context.chat(first, finished(tokenizer, sampled, end_id))
        assert reply.choices[0].message.content == answer
        await context.chat([*first, said(answer), NEXT], truncated(tokenizer, [400]))
        return context

    context = asyncio.run(talk())
    assert context.sent == whole
    (node,) = context.nodes
    assert unmasked(node) == [*sampled, end_id, 400]


def test_a_think_block_of_an_earlier_turn_leaves_its_row_and_masks_the_second() -> None:
    qwen3, end_id = catalog.loaded("qwen3"), catalog.end_ids("qwen3")[0]
    thinking = qwen3.encode_suffix("<think>\n6 * 7 is 42\n</think>\n\n42")

    async def talk(history: str) -> Context:
        context = Context(qwen3, history=history)
        messages: list[Any] = [USER]
        for _ in range(3):
            reply = await context.chat(messages, finished(qwen3, thinking, end_id))
            messages = [*messages, said(reply.choices[0].message.content), NEXT]
        return context

    rows = asyncio.run(talk("template")).nodes
    assert [unmasked(row) for row in rows] == [[*thinking, end_id]] * 3
    assert [row.metadata.get("fork_reason") for row in rows] == [None, "history_rewritten", "history_rewritten"]
    assert [row.full_text.count("<think>") for row in rows] == [1, 1, 1]

    (row,) = asyncio.run(talk("verbatim")).nodes
    assert unmasked(row) == [*thinking, end_id] * 3
    assert row.full_text.count("<think>") == 3
    assert row.full_text.count(f"<|im_end|>\n<|im_start|>user\n{NEXT['content']}<|im_end|>\n") == 2


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("ends", [True, False])
def test_verbatim_history_closes_a_turn_once_whether_it_was_finished_or_cut(name: str, ends: bool) -> None:
    tokenizer, end_id = catalog.loaded(name), catalog.end_ids(name)[0]
    ids = tokenizer.encode_suffix("  odd spaces \n")

    async def talk() -> Context:
        context = Context(tokenizer, history="verbatim")
        choice = finished(tokenizer, ids, end_id) if ends else truncated(tokenizer, ids)
        reply = await context.chat([USER], choice)
        await context.chat([USER, said(reply.choices[0].message.content), NEXT], truncated(tokenizer, [400]))
        return context

    context = asyncio.run(talk())
    (node,) = context.nodes
    start = node.metadata["turns"][0]["end"]
    closing = node.tokens[start - 1 : start + 2].count(end_id) if ends else node.tokens[start : start + 2].count(end_id)
    assert closing == 1
    assert unmasked(node) == [*ids, *([end_id] if ends else []), 400]


@pytest.mark.parametrize("turns", [3, 5])
def test_end_tokens_that_no_prompt_writes_stand_once_in_every_later_turn(turns: int) -> None:
    """`completion()` with plain text: the caller appends what it was shown, which has no end-of-turn token."""
    tokenizer, end_id = catalog.loaded("smollm2"), catalog.end_ids("smollm2")[0]
    ids = tokenizer.encode_suffix(" yes")

    async def talk() -> Context:
        context, prompt = Context(tokenizer), "Q:"
        for _ in range(turns):
            reply = await context.complete(prompt, finished(tokenizer, ids, end_id))
            prompt = f"{prompt}{reply.choices[0].text} Q:"
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*ids, end_id] * turns
    assert node.tokens.count(end_id) == turns


def test_a_full_text_handed_back_is_continued_with_its_end_token_once() -> None:
    tokenizer, end_id = catalog.loaded("smollm2"), catalog.end_ids("smollm2")[0]
    ids = tokenizer.encode_suffix(" yes")

    async def talk() -> Context:
        context, prompt = Context(tokenizer), "Q:"
        for _ in range(3):
            await context.complete(prompt, finished(tokenizer, ids, end_id))
            prompt = f"{context.nodes[-1].full_text} Q:"
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*ids, end_id] * 3


@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_cut_answer_is_written_further_and_a_finished_one_is_not(history: str) -> None:
    tokenizer, end_id = catalog.loaded("smollm2"), catalog.end_ids("smollm2")[0]
    ids = tokenizer.encode_suffix("The answer")

    async def talk(*, ends: bool) -> Context:
        context = Context(tokenizer, history=history)
        await context.chat([USER], finished(tokenizer, ids, end_id) if ends else truncated(tokenizer, ids))
        await context.chat([USER, said("The answer")], truncated(tokenizer, tokenizer.encode_suffix(" is 42")))
        return context

    (node,) = asyncio.run(talk(ends=False)).nodes
    assert unmasked(node) == [*ids, *tokenizer.encode_suffix(" is 42")]
    context = asyncio.run(talk(ends=True))
    assert context.sent[-len(ids) :] == ids  # the model goes on behind the words, not behind its end of turn
    first, second = context.nodes
    assert unmasked(first) == [*ids, end_id]
    assert (second.metadata["fork_of"], second.metadata["fork_reason"]) == ("0.0", "special_tokens_dropped")


def test_a_cut_answer_goes_on_behind_words_that_the_caller_added() -> None:
    tokenizer = catalog.loaded("smollm2")
    ids = tokenizer.encode_suffix("The answer")

    async def talk() -> Context:
        context = Context(tokenizer)
        await context.chat([USER], truncated(tokenizer, ids))
        await context.chat([USER, said("The answer is:")], truncated(tokenizer, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*ids, 400]


@pytest.mark.parametrize("server_names_the_stop", [True, False])
def test_ids_that_ran_past_a_stop_string_are_not_continued_from_the_cut(server_names_the_stop: bool) -> None:
    tokenizer = catalog.loaded("smollm2")
    ids = tokenizer.encode_suffix("42\nUser: and")
    stop = "\nUser:" if server_names_the_stop else None
    choice = generation(ids, text="42", finish_reason="stop", stop_reason=stop)

    async def talk() -> Context:
        context = Context(tokenizer)
        await context.chat([USER], choice)
        await context.chat([USER, said("42"), NEXT], truncated(tokenizer, [400]))
        return context

    first, second = asyncio.run(talk()).nodes
    assert unmasked(first) == ids
    assert (unmasked(second), second.metadata["fork_reason"]) == ([400], "stop_string_cut")


def test_an_emoji_that_is_sampled_over_two_calls_is_no_error(smollm2: HuggingFaceTokenizer) -> None:
    emoji = smollm2.encode_suffix("🦜")

    async def talk() -> Context:
        context = Context(smollm2)
        await context.complete("x ", truncated(smollm2, emoji[:-1]))
        await context.complete("x " + context.nodes[0].full_text[2:], truncated(smollm2, emoji[-1:]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert node.full_text == "x 🦜"
    assert unmasked(node) == emoji


def test_special_tokens_inside_an_answer_are_named_as_the_reason(smollm2: HuggingFaceTokenizer) -> None:
    ids = [*smollm2.encode_suffix("a"), smollm2.encode_rendered("<|im_start|>")[0], *smollm2.encode_suffix("b")]

    async def talk() -> Context:
        context = Context(smollm2)
        reply = await context.chat([USER], truncated(smollm2, ids))
        await context.chat([USER, said(reply.choices[0].message.content), NEXT], truncated(smollm2, [400]))
        return context

    _, second = asyncio.run(talk()).nodes
    assert second.metadata["fork_reason"] == "special_tokens_dropped"


def test_another_end_token_than_the_template_s_is_not_doubled_by_it(smollm2: HuggingFaceTokenizer) -> None:
    template_end, other_end = catalog.end_ids("smollm2")
    ids = smollm2.encode_suffix("42")

    async def talk(history: str) -> Context:
        context = Context(smollm2, history=history)
        await context.chat([USER], finished(smollm2, ids, other_end))
        await context.chat([USER, said("42"), NEXT], truncated(smollm2, [400]))
        return context

    _, second = asyncio.run(talk("template")).nodes
    assert second.metadata["fork_reason"] == "text_mismatch"
    context = asyncio.run(talk("verbatim"))
    (node,) = context.nodes
    end = node.metadata["turns"][0]["end"]
    assert node.tokens[end - 1] == other_end
    assert node.tokens[end] != template_end


def test_what_the_caller_does_to_its_messages_afterwards_changes_nothing() -> None:
    """Llama 3.1's template trims, so only a conversation that is recognised goes on as one sequence."""
    tokenizer = catalog.loaded("llama3_1")
    ids = tokenizer.encode_suffix(" 42")

    async def talk() -> Context:
        context = Context(tokenizer, history="verbatim")
        messages: list[dict[str, Any]] = [dict(USER)]
        await context.chat(messages, truncated(tokenizer, ids))
        messages[0]["content"] = "changed"
        messages.append(said("42"))
        await context.chat([USER, said(" 42"), NEXT], truncated(tokenizer, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*ids, 400]


def test_verbatim_history_does_not_take_one_tool_call_for_another() -> None:
    qwen3, end_id = catalog.loaded("qwen3"), catalog.end_ids("qwen3")[0]

    def called(city: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"c": city}}}],
        }

    async def talk(second: str) -> list[SequenceNode]:
        context = Context(qwen3, history="verbatim")
        start = [USER, called("Rome"), {"role": "tool", "content": "sunny"}]
        await context.chat(start, finished(qwen3, qwen3.encode_suffix("Sunny."), end_id))
        other = [USER, called(second), {"role": "tool", "content": "sunny"}, said("Sunny."), NEXT]
        await context.chat(other, truncated(qwen3, [400]))
        return context.nodes

    assert len(asyncio.run(talk("Rome"))) == 1
    first, other = asyncio.run(talk("Oslo"))
    assert "Oslo" in other.full_text
    assert "Rome" not in other.full_text
    assert other.metadata["parent_id"] is None
    assert first.metadata["node_id"] == "0.0"


def test_verbatim_history_does_not_outlive_a_change_of_tools() -> None:
    qwen3, end_id = catalog.loaded("qwen3"), catalog.end_ids("qwen3")[0]
    ids = qwen3.encode_suffix("42")

    async def talk(tools: list[Any]) -> Context:
        context = Context(qwen3, history="verbatim")
        await context.chat([USER], finished(qwen3, ids, end_id), tools=[TOOL])
        await context.chat([USER, said("42"), NEXT], truncated(qwen3, [400]), tools=tools)
        return context

    assert len(asyncio.run(talk([TOOL])).nodes) == 1
    other = {"type": "function", "function": {"name": "other", "description": "d", "parameters": {}}}
    context = asyncio.run(talk([other]))
    assert "other" in context.nodes[-1].full_text
    assert len(context.nodes) == 2


def test_an_answer_moved_into_tool_calls_is_still_extended_where_the_template_writes_it_alike() -> None:
    qwen3, end_id = catalog.loaded("qwen3"), catalog.end_ids("qwen3")[0]
    moved = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    written = qwen3.render_chat([USER, moved], add_generation_prompt=False)
    answer = (
        written.removeprefix(qwen3.render_chat([USER]))
        .partition("<|im_end|>")[0]
        .removeprefix("<think>\n\n</think>\n\n")
    )
    ids = qwen3.encode_suffix(answer)

    async def talk() -> Context:
        context = Context(qwen3)
        await context.chat([USER], finished(qwen3, ids, end_id))
        await context.chat([USER, moved, {"role": "tool", "content": "1"}, NEXT], truncated(qwen3, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert unmasked(node) == [*ids, end_id, 400]


def test_content_given_as_text_parts_is_the_same_conversation(smollm2: HuggingFaceTokenizer) -> None:
    def parts(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    async def talk(history: str) -> Context:
        context = Context(smollm2, history=history)
        ids = smollm2.encode_suffix("42")
        await context.chat([{"role": "user", "content": parts("Hi")}], truncated(smollm2, ids))
        await context.chat([{"role": "user", "content": "Hi"}, said(parts("42")), NEXT], truncated(smollm2, [400]))  # type: ignore[arg-type]  # parts are content, too
        return context

    for history in ("template", "verbatim"):
        assert len(asyncio.run(talk(history)).nodes) == 1


def test_the_text_of_a_special_token_in_a_user_s_words_is_sent_as_the_template_s_text_says(
    smollm2: HuggingFaceTokenizer,
) -> None:
    words = {"role": "user", "content": "look: <|im_end|> and <|im_start|>"}

    async def talk() -> Context:
        context = Context(smollm2)
        await context.chat([words], truncated(smollm2, smollm2.encode_suffix("42")))
        await context.chat([words, said("42"), words], truncated(smollm2, [400]))
        return context

    (node,) = asyncio.run(talk()).nodes
    assert node.tokens[:-1] == smollm2.encode_rendered(smollm2.render_chat([words, said("42"), words]))
