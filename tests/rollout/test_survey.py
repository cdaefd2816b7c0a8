from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import TokenizerError
from managed_cli.rollout.survey import MAX_BAD_LINES_KEPT, MAX_FIELD_NAMES, Lengths, Survey, prompt_length
from managed_cli.rollout.tasks import InputOptions, Task, read_samples
from managed_cli.tokenizers import HuggingFaceTokenizer, load_tokenizer
from tests.rollout.inputs_on_disk import WriteInput, tasks_of
from tests.servers.tokenizer import VOCABULARY_SIZE, shared_tokenizer_directory

USER = {"role": "user", "content": "What is the answer?"}


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return load_tokenizer(str(shared_tokenizer_directory()))


def a_task(number: int) -> Task:
    return Task(sample_id=f"s{number}", prompt="x", source=f"p.jsonl:{number}", line=number)


def surveyed(path: object, tokenizer: HuggingFaceTokenizer | None = None, budget: int | None = None) -> Survey:
    survey = Survey(tokenizer, budget)
    for sample in read_samples(path, InputOptions(on_bad_line="skip")):  # type: ignore[arg-type]  # from the fixture
        survey.add(sample)
    return survey


def test_each_kind_has_its_first_line_and_counts_what_stands_beside_it(write: WriteInput) -> None:
    path = write(
        {"prompt": "first", "topic": "x"},
        {"messages": [USER], "tools": [{"name": "f"}], "sampling": {"n": 2}},
        {"prompt": "second", "topic": "y", "answer": 1},
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {"turns": ["one", "two"]},
        {"prompt_token_ids": [3, 4]},
    )
    kinds = surveyed(path).kinds
    assert {kind: (summary.count, summary.first, summary.example) for kind, summary in kinds.items()} == {
        "prompt": (2, "prompts.jsonl:1", "first"),
        "messages": (2, "prompts.jsonl:2", "What is the answer?"),
        "turns": (1, "prompts.jsonl:5", "one"),
        "token-ids": (1, "prompts.jsonl:6", "[3, 4]"),
    }
    assert kinds["prompt"].fields == {"topic": 2, "answer": 1}
    chats = kinds["messages"]
    assert (chats.with_tools, chats.with_sampling, chats.continued) == (1, 1, 1)


def test_field_names_that_hold_data_do_not_fill_the_memory(write: WriteInput) -> None:
    survey = surveyed(write(*[{"prompt": "a", f"key {i}": 1} for i in range(MAX_FIELD_NAMES + 50)]))
    assert len(survey.kinds["prompt"].fields) == MAX_FIELD_NAMES


def test_bad_lines_are_counted_and_the_first_are_kept(write: WriteInput) -> None:
    survey = surveyed(write({"prompt": "a"}, *[b"no json\n"] * (MAX_BAD_LINES_KEPT + 1)))
    assert (survey.samples, survey.bad_count) == (MAX_BAD_LINES_KEPT + 2, MAX_BAD_LINES_KEPT + 1)
    assert len(survey.bad_lines) == MAX_BAD_LINES_KEPT


def test_a_prompt_is_as_long_as_what_is_sent(write: WriteInput, tokenizer: HuggingFaceTokenizer) -> None:
    text, chat, begun, turns, ids = tasks_of(
        write(
            {"prompt": "The answer is 42."},
            {"messages": [USER]},
            {"messages": [USER, {"role": "assistant", "content": "It is"}]},
            {"turns": ["What is the answer?", "Why?"], "system": "Think."},
            {"prompt": [5, 6, 7]},
        )
    )
    asked = "<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n"

    def length(rendered: str) -> int:
        return len(tokenizer.encode_rendered(rendered))

    assert prompt_length(text, tokenizer) == length("The answer is 42.")
    assert prompt_length(chat, tokenizer) == length(asked)
    assert prompt_length(begun, tokenizer) == length(asked + "It is")
    assert prompt_length(turns, tokenizer) == length("<|im_start|>system\nThink.<|im_end|>\n" + asked)
    assert prompt_length(ids, tokenizer) == 3


def test_ids_outside_the_vocabulary_are_a_bad_line(write: WriteInput, tokenizer: HuggingFaceTokenizer) -> None:
    survey = surveyed(write({"prompt": [0, VOCABULARY_SIZE - 1]}, {"prompt": [VOCABULARY_SIZE]}), tokenizer)
    assert [str(bad) for bad in survey.bad_lines] == [
        f"prompts.jsonl:2: the token id {VOCABULARY_SIZE} is outside the vocabulary of {VOCABULARY_SIZE} ids"
    ]


def test_a_chat_that_the_template_refuses_is_a_bad_line(write: WriteInput) -> None:
    strict = load_tokenizer(str(shared_tokenizer_directory()))
    strict._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    survey = surveyed(write({"messages": [USER, USER]}, {"prompt": "a"}), strict)
    assert survey.bad_count == 1
    assert str(survey.bad_lines[0]).startswith("prompts.jsonl:1: the chat template of ")
    assert str(survey.bad_lines[0]).endswith("refuses this conversation: roles must alternate")
    assert survey.lengths is not None
    assert survey.lengths.samples == 1


def test_a_chat_without_a_template_is_the_tokenizer_s_fault(write: WriteInput) -> None:
    bare = load_tokenizer(str(shared_tokenizer_directory()))
    bare._tokenizer.chat_template = None
    with pytest.raises(TokenizerError, match="has no chat template"):
        surveyed(write({"messages": [USER]}), bare)


def test_prompts_without_room_are_counted_and_the_first_ten_named() -> None:
    lengths = Lengths(budget=100)
    for number in range(1, 31):
        lengths.add(a_task(number), 90 + number)
    assert lengths.over_budget == 21
    assert [prompt.source for prompt in lengths.first_over_budget] == [f"p.jsonl:{n}" for n in range(10, 20)]
    assert lengths.first_over_budget[0].length == 100  # it fits, and not one sampled token with it


@given(st.lists(st.integers(1, 5000), min_size=1), st.floats(0, 1))
def test_quantiles_are_lengths_that_enough_prompts_keep_to(values: list[int], share: float) -> None:
    lengths = Lengths(budget=None)
    for number, length in enumerate(values):
        lengths.add(a_task(number), length)
    found = lengths.quantile(share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert (lengths.quantile(0), lengths.quantile(1), lengths.total) == (min(values), max(values), sum(values))
    assert lengths.quantile(0.5) == statistics.median_low(values)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_the_histogram_holds_every_prompt_once(values: list[int]) -> None:
    lengths = Lengths(budget=None)
    for number, length in enumerate(values):
        lengths.add(a_task(number), length)
    bins = list(lengths.histogram())
    for low, high, count in bins:
        assert count == sum(low <= value <= high for value in values)
    assert sum(count for *_, count in bins) == len(values)
    assert all(after == before + 1 for (_, before, _), (after, *_) in itertools.pairwise(bins))
