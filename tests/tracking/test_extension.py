"""The rules of extension on their own, with a tokenizer of one id per character."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.tracking.extension import FORK_REASONS, plan_prompt, plan_verbatim, with_placeholder
from managed_cli.tracking.masking import TrackedNode, completed_row, completion_span, root_prompt
from managed_cli.tracking.row_part import RowPart
from managed_cli.types import Generation

END = "¶"
ENDS = {"¶", "§"}


class Letters:
    """One id per character; ¶ and § are special and end a turn."""

    name = "letters"
    vocab_size = 0x110000
    eos_token_ids = frozenset(ord(end) for end in ENDS)
    over_network = False
    decodes_bytes = False

    def prompt_text(self, text: str) -> str:
        return text

    def encode_rendered(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    encode_prompt = encode_suffix = encode_rendered

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in token_ids if not (skip_special_tokens and chr(i) in ENDS))

    def render_chat(self, messages: Any, **_options: Any) -> str:
        raise NotImplementedError

    def chat_template_hash(self) -> str | None:
        return None


LETTERS = Letters()


def node_of(prompt: str, sampled: str, *, node_id: str = "0.0", shown: str | None = None, **facts: Any) -> TrackedNode:
    """A node whose prompt is `prompt`; `sampled` may end with an end token."""
    end = sampled[-1] if sampled[-1:] in ENDS else ""
    ids = LETTERS.encode_rendered(sampled)
    completion = Generation(
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        text=None,
        finish_reason="stop" if end else "length",
        end_token_id=ord(end) if end else None,
    )
    root = root_prompt(prompt, LETTERS.encode_rendered(prompt))
    text = sampled.removesuffix(end) if shown is None else shown
    return TrackedNode(
        node_id,
        completed_row(root, completion),
        prompt + sampled,
        {},
        (completion_span(root, completion, text),),
        prompt,
        prompt + sampled,
        end,
        **facts,
    )


def parent_of(text: str, nodes: Sequence[TrackedNode], **settings: Any) -> str | None:
    found = plan_prompt(text, nodes, LETTERS, **settings)
    return found.parent.node_id if found.parent else None


def test_without_nodes_a_prompt_is_a_root_and_all_masked() -> None:
    found = plan_prompt("abc", [], LETTERS)
    assert (found.token_ids, found.masked_tokens) == (LETTERS.encode_rendered("abc"), [-100] * 3)
    assert (found.parent, found.fork_reason) == (None, None)


def test_the_longest_node_wins() -> None:
    nodes = [node_of("q", "4", node_id="short"), node_of("q", "42", node_id="long"), node_of("q", "4", node_id="new")]
    assert parent_of("q42!", nodes) == "long"
    assert parent_of("q43!", nodes) == "new"


def test_among_equals_a_written_end_beats_an_unwritten_one_and_then_the_newest_wins() -> None:
    finished, cut = node_of("q", f"a{END}", node_id="finished"), node_of("q", "a", node_id="cut")
    assert parent_of("qa more", [cut, finished]) == "cut"
    assert parent_of(f"qa{END} more", [finished, cut]) == "finished"
    assert parent_of("qa", [node_of("q", "a", node_id="1"), node_of("q", "a", node_id="2")]) == "2"


def test_an_end_token_that_is_not_written_stays_in_the_ids() -> None:
    found = plan_prompt("qa more", [node_of("q", f"a{END}")], LETTERS)
    assert LETTERS.decode(found.token_ids) == f"qa{END} more"
    assert found.masked_tokens[1:3] == [ord("a"), ord(END)]
    assert found.unwritten == (2,)


def test_another_end_token_behind_an_unwritten_one_is_no_extension() -> None:
    found = plan_prompt("qa§ more", [node_of("q", f"a{END}")], LETTERS)
    assert (found.parent, found.fork_of, found.fork_reason) == (None, "0.0", "text_mismatch")


def test_a_finished_answer_is_not_extended_by_its_own_words_alone() -> None:
    found = plan_prompt("qa", [node_of("q", f"a{END}")], LETTERS)
    assert (found.parent, found.fork_reason) == (None, "special_tokens_dropped")


@pytest.mark.parametrize("sampled", ["", END])
def test_a_node_that_shows_nothing_is_extended_only_where_its_end_token_is_written(sampled: str) -> None:
    nodes = [node_of("q", sampled)]
    found = plan_prompt("q and more", nodes, LETTERS)
    assert (found.parent, found.fork_reason) == (None, None)
    assert parent_of(f"q{END} and more", nodes) == ("0.0" if sampled else None)


def test_ids_that_do_not_spell_the_prompt_are_not_sent() -> None:
    node = node_of("q", "a")
    node = dataclasses.replace(node, row=RowPart(node.row.before, [ord("b")], [-1.0]))
    found = plan_prompt("qa more", [node], LETTERS)
    assert LETTERS.decode(found.token_ids) == "qa more"
    assert (found.parent, found.fork_reason) == (None, "text_mismatch")


def test_the_ids_of_a_root_are_those_that_were_given() -> None:
    assert plan_prompt("x", [], LETTERS, root_ids=lambda: [7, 8]).token_ids == [7, 8]


@given(
    st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab¶", max_size=4)), max_size=6), st.text("ab¶", max_size=9)
)
def test_an_extension_begins_with_its_parent_and_spells_the_prompt(known: list[tuple[str, str]], text: str) -> None:
    nodes = [node_of(p, s.rstrip(END) + s[-1:], node_id=str(i)) for i, (p, s) in enumerate(known) if END not in s[:-1]]
    found = plan_prompt(text, nodes, LETTERS)
    kept = [token for at, token in enumerate(found.token_ids) if at not in found.unwritten]
    assert LETTERS.decode(kept) == text
    if found.parent is None:
        assert set(found.masked_tokens) <= {-100}
    else:
        tokens = found.parent.node.tokens
        assert found.token_ids[: len(tokens)] == tokens
        assert found.masked_tokens[: len(tokens)] == found.parent.node.masked_tokens
        assert set(found.masked_tokens[len(tokens) :]) <= {-100}
    assert found.fork_reason is None or found.fork_reason in FORK_REASONS


def rendered(messages: Sequence[Any]) -> str:
    return "".join(m["content"] + (END if m["role"] == "assistant" else "") for m in messages)


def test_verbatim_goes_on_from_the_longest_known_conversation_and_renders_it_once() -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    short = node_of("q", f"a{END}", node_id="short", conversation=(user, answer))
    long = node_of(f"qa{END}q", f"a{END}", node_id="long", conversation=(user, answer, user, answer))
    conversation = [user, answer, user, answer, user]
    asked: list[Any] = []

    def render(messages: Sequence[Any]) -> str:
        asked.append(messages)
        return rendered(messages)

    found = plan_verbatim(conversation, [long, short], LETTERS, render=render)
    assert found is not None
    assert found.parent is long
    assert found.text == f"qa{END}qa{END}q"
    assert asked == [with_placeholder(conversation, 4)]
    assert plan_verbatim(conversation, [long], LETTERS, render=render, tools=[{"name": "f"}]) is None


def test_verbatim_keeps_away_from_a_template_that_swallows_the_answer() -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    node = node_of("q", f"a{END}", conversation=(user, answer))
    assert plan_verbatim([user, answer, user], [node], LETTERS, render=lambda _messages: "qq") is None
    assert plan_verbatim([user, answer, user], [], LETTERS, render=rendered) is None
