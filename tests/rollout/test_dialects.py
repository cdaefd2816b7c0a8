from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.errors import ConfigError
from managed_cli.rollout.tasks import InputOptions, validate_input
from tests.rollout.inputs_on_disk import WriteInput, fault_of_line, refusal, tasks_of

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


class TestPrompt:
    def test_a_list_of_messages_in_prompt_is_a_chat(self, write: WriteInput) -> None:
        chat, same = tasks_of(write({"prompt": [SYSTEM, USER]}, {"messages": [SYSTEM, USER]}))
        assert (chat.kind, chat.messages, chat.prompt) == ("messages", (SYSTEM, USER), None)
        assert same.sample_id == chat.sample_id.removesuffix("0") + "1"

    def test_a_list_of_messages_in_prompt_is_checked_under_its_own_name(self, write: WriteInput) -> None:
        path = write({"prompt": [USER, {"role": "user"}]})
        assert fault_of_line(path) == "1: `prompt[1]`: expected `role` and `content`, `content` is missing"
        path = write({"prompt": [USER], "system": "x"})
        assert fault_of_line(path) == "1: `system`: stands beside `turns` only, expected it as the first of `prompt`"

    def test_a_named_prompt_field_holds_text_messages_or_ids(self, write: WriteInput) -> None:
        tasks = tasks_of(write({"q": "a"}, {"q": [USER]}, {"q": [1, 2]}), prompt_field="q")
        assert [task.kind for task in tasks] == ["prompt", "messages", "token-ids"]

    def test_alpaca_lines_are_not_joined_by_guess(self, write: WriteInput) -> None:
        error = refusal(write({"instruction": "Translate.", "input": "good night", "output": "boa noite"}))
        assert error.hint is not None
        assert error.hint.startswith("how `instruction` and `input` are joined is not guessed: `jq -c ")
        (task,) = tasks_of(write({"instruction": "Say hi.", "input": "", "output": "hi"}), prompt_field="instruction")
        assert (task.prompt, task.fields) == ("Say hi.", {"input": "", "output": "hi"})


class TestTokenIds:
    @pytest.mark.parametrize("field", ["prompt", "prompt_token_ids", "input_ids"])
    def test_token_ids_are_kept_as_they_are(self, write: WriteInput, field: str) -> None:
        path = write({field: [0, 5, 2**31 - 1], "topic": "x", "sampling": {"n": 2}})
        (task,) = tasks_of(path)
        assert (task.kind, task.prompt_ids, task.prompt) == ("token-ids", (0, 5, 2**31 - 1), None)
        assert (task.fields, task.overrides) == ({"topic": "x"}, {"n": 2})
        report = validate_input(path, InputOptions())
        assert (report.samples, report.token_prompts, report.choices(1)) == (1, 1, 2)

    @pytest.mark.parametrize("bad", [-1, 2**31, 1.0, True, None, "1", [1]])
    def test_the_first_value_that_is_no_id_is_named(self, write: WriteInput, bad: object) -> None:
        message = fault_of_line(write({"input_ids": [1, 2, bad, -5]}))
        assert message.startswith("1: `input_ids[2]`: expected a token id, an integer from 0 to 2147483647, came ")

    @pytest.mark.parametrize("value", [[], "1 2", {}, 7])
    def test_something_else_than_a_list_of_ids_is_refused(self, write: WriteInput, value: object) -> None:
        assert fault_of_line(write({"input_ids": value})).startswith("1: `input_ids`: expected a list of token ids, ")

    def test_ids_and_text_are_two_prompts(self, write: WriteInput) -> None:
        path = write({"prompt": "a", "input_ids": [1]})
        assert fault_of_line(path) == "1: `prompt` and `input_ids`: expected exactly one of them, came 2"

    def test_tools_and_system_belong_to_chats(self, write: WriteInput) -> None:
        path = write({"prompt_token_ids": [1], "system": "x"})
        expected = "1: `system`: belongs to a chat, and this line has token ids in `prompt_token_ids`"
        assert fault_of_line(path) == expected

    def test_the_run_s_system_message_has_no_place_in_token_ids(self, write: WriteInput) -> None:
        path = write({"input_ids": [1]})
        expected = f"{path}:1: --system applies to chats only, and this line is token ids"
        assert refusal(path, system="x").message == expected

    @settings(deadline=None, max_examples=30)
    @given(first=st.lists(st.integers(0, 2**31 - 1), min_size=1), second=st.lists(st.integers(0, 9), min_size=1))
    def test_different_ids_are_different_samples(
        self, tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int]
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "ids.jsonl"
        path.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in (first, second)))
        one, two = tasks_of(path)
        assert one.prompt_ids == tuple(first)
        assert (one.sample_id.partition("-")[0] == two.sample_id.partition("-")[0]) == (first == second)


class TestShareGPT:
    def test_the_answers_at_the_end_are_dropped_and_kept_as_a_field(self, write: WriteInput) -> None:
        path = write({"id": "a", "conversations": [human("1"), gpt("2"), human("3"), gpt("4"), gpt("5")], "x": 1})
        (task,) = tasks_of(path)
        assert (task.kind, task.sample_id) == ("sharegpt", "a")
        assert task.messages == (
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        )
        dropped = [{"role": "assistant", "content": text} for text in "45"]
        assert task.fields == {"x": 1, "dropped_turns": dropped}

    def test_the_last_answer_is_continued_where_it_is_to_be_kept(self, write: WriteInput) -> None:
        (task,) = tasks_of(write({"conversations": [human("1"), gpt("2")]}), keep_last_assistant=True)
        assert task.continue_final
        assert task.fields == {}

    @pytest.mark.parametrize(
        ("speaker", "role"),
        [
            *[(name, "user") for name in ("human", "user", "Human")],
            *[(name, "assistant") for name in ("gpt", "assistant", "model", "chatgpt")],
            *[("system", "system"), ("tool", "tool"), ("observation", "tool")],
        ],
    )
    def test_speakers_become_roles(self, write: WriteInput, speaker: str, role: str) -> None:
        (task,) = tasks_of(write({"conversations": [{"from": speaker, "value": "x"}, human("y")]}))
        assert task.messages is not None
        assert task.messages[0] == {"role": role, "content": "x"}

    def test_role_and_content_are_read_too_with_all_a_template_may_want(self, write: WriteInput) -> None:
        calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
        tool = {"role": "tool", "content": "42", "tool_call_id": "1"}
        (task,) = tasks_of(write({"conversations": [USER, calls, tool]}))
        assert task.messages == (USER, calls, tool)

    def test_a_system_message_may_stand_beside_or_inside(self, write: WriteInput) -> None:
        said = [{"from": "system", "value": "be brief"}, human("hi")]
        beside, inside, run = tasks_of(
            write(
                {"system": "be brief", "conversations": said[1:]}, {"conversations": said}, {"conversations": said[1:]}
            ),
            system="be kind",
        )
        assert beside.messages == inside.messages == (SYSTEM, USER)
        assert run.messages == ({"role": "system", "content": "be kind"}, USER)
        both = write({"system": "x", "conversations": said})
        expected = "1: `system`: expected one system message, `conversations` has one of its own"
        assert fault_of_line(both) == expected

    @pytest.mark.parametrize(
        ("conversations", "message"),
        [
            ("x", '`conversations`: expected a list of turns, came the string "x"'),
            ([], "`conversations`: expected a list of turns, came an empty list"),
            (["x"], '`conversations[0]`: expected an object with `from` and `value`, came the string "x"'),
            ([human("a"), {"from": "human"}], "`conversations[1].value`: expected a string, came null"),
            ([{"role": "user"}], "`conversations[0]`: expected `role` and `content`, `content` is missing"),
            (
                [gpt("a")],
                "`conversations`: expected a turn that is not the assistant's, since its last turns are sampled anew",
            ),
        ],
    )
    def test_a_bad_conversation_is_told(self, write: WriteInput, conversations: object, message: str) -> None:
        assert fault_of_line(write({"conversations": conversations})) == f"1: {message}"

    def test_an_unknown_speaker_is_named(self, write: WriteInput) -> None:
        message = fault_of_line(write({"conversations": [{"from": "function_call", "value": "{}"}]}))
        assert message.startswith("1: `conversations[0].from`: expected one of human, user, gpt, ")
        assert message.endswith('came "function_call"')


class TestFormats:
    LINE = {  # noqa: RUF012 (only read)
        "prompt": "p",
        "messages": [USER],
        "turns": ["t"],
        "conversations": [human("c")],
        "input_ids": [1],
        "custom_id": "batch",
        "body": {"prompt": "b"},
        "responses_create_params": {"input": "r"},
    }

    @pytest.mark.parametrize(
        ("input_format", "taken"),
        [
            ("prompt", "prompt"),
            ("messages", "messages"),
            ("turns", "turns"),
            ("sharegpt", "conversations"),
            ("token-ids", "input_ids"),
            ("nemo-gym", "responses_create_params"),
        ],
    )
    def test_a_fixed_format_makes_the_others_ordinary_fields(
        self, write: WriteInput, input_format: str, taken: str
    ) -> None:
        (task,) = tasks_of(write(self.LINE), input_format=input_format)
        assert task.kind == input_format
        assert task.fields == {name: value for name, value in self.LINE.items() if name != taken}

    def test_a_fixed_batch_takes_the_custom_id(self, write: WriteInput) -> None:
        (task,) = tasks_of(write(self.LINE), input_format="openai-batch")
        assert (task.kind, task.sample_id, task.prompt) == ("openai-batch", "batch", "b")
        assert set(task.fields) == set(self.LINE) - {"custom_id", "body"}

    @pytest.mark.parametrize(
        ("input_format", "expected"),
        [
            ("prompt", "expected `prompt`, "),
            ("messages", "expected `messages` or `prompt` in a line of the format messages, "),
            ("turns", "expected `turns` in a line of the format turns, "),
            ("sharegpt", "expected `conversations` in a line of the format sharegpt, "),
            ("token-ids", "expected `prompt_token_ids` or `input_ids` or `prompt` in a line of the format token-ids, "),
            ("openai-batch", "`body`: expected an object with the parameters of a request, came null"),
            ("nemo-gym", "`responses_create_params`: expected an object with the parameters of a request, came null"),
        ],
    )
    def test_a_line_of_another_format_is_bad(self, write: WriteInput, input_format: str, expected: str) -> None:
        path = write({"other": 1})
        assert fault_of_line(path, input_format=input_format).startswith(f"1: {expected}")

    @pytest.mark.parametrize(
        ("input_format", "prompt", "expected"),
        [
            ("prompt", [USER], "a non-empty string"),
            ("messages", "text", "a list of messages"),
            ("token-ids", [USER], "a list of token ids"),
        ],
    )
    def test_a_prompt_of_another_kind_is_bad(
        self, write: WriteInput, input_format: str, prompt: object, expected: str
    ) -> None:
        message = fault_of_line(write({"prompt": prompt}), input_format=input_format)
        assert message.startswith(f"1: `prompt`: expected {expected}, came ")

    def test_a_named_prompt_field_goes_before_the_format_s_own(self, write: WriteInput) -> None:
        path = write({"chosen": [USER], "messages": [SYSTEM]})
        (task,) = tasks_of(path, input_format="messages", prompt_field="chosen")
        assert (task.messages, task.fields) == ((USER,), {"messages": [SYSTEM]})

    def test_an_ambiguous_line_gets_a_hint(self, write: WriteInput) -> None:
        error = refusal(write({"prompt": "p", "conversations": [human("a")]}))
        assert error.details[0].endswith("`prompt` and `conversations`: expected exactly one of them, came 2")
        assert error.hint is not None
        assert "--input-format" in error.hint

    def test_a_request_wins_over_the_metadata_beside_it(self, write: WriteInput) -> None:
        (gym,) = tasks_of(write({"prompt": "p", "responses_create_params": {"input": "r"}}))
        assert (gym.kind, gym.messages, gym.fields) == (
            "nemo-gym",
            ({"role": "user", "content": "r"},),
            {"prompt": "p"},
        )

    def test_a_named_prompt_field_wins_over_a_request(self, write: WriteInput) -> None:
        record = {"q": "p", "responses_create_params": {"input": "r"}, "body": {"prompt": "b"}, "custom_id": "x"}
        (task,) = tasks_of(write(record), prompt_field="q")
        assert (task.kind, task.prompt) == ("prompt", "p")
        assert task.fields == {name: value for name, value in record.items() if name != "q"}

    def test_a_prompt_field_in_a_format_without_one_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--prompt-field q: lines of --input-format turns have no such field"):
            InputOptions(prompt_field="q", input_format="turns")


def test_tools_may_be_the_json_text_of_a_list(write: WriteInput) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (task,) = tasks_of(write({"messages": [USER], "tools": json.dumps(tools)}))
    assert task.tools == tuple(tools)
    for text in ("no json", '{"a": 1}', "[" * 100_000):
        message = fault_of_line(write({"messages": [USER], "tools": text}))
        assert message.startswith("1: `tools`: expected a list of tool descriptions, came the string ")


def test_what_is_sent_first_of_a_conversation_is_its_first_turn(write: WriteInput) -> None:
    turns, chat, text = tasks_of(
        write({"turns": ["a", "b"], "system": "s"}, {"messages": [USER, ANSWER]}, {"prompt": "p"})
    )
    assert turns.first_messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "a"})
    assert chat.first_messages == (USER, ANSWER)
    assert text.first_messages is None


def test_the_report_counts_every_dialect(write: WriteInput) -> None:
    path = write({"prompt": "a"}, {"prompt": [1]}, {"conversations": [human("a")]}, {"turns": ["a"]}, {"prompt": "b"})
    report = validate_input(path, InputOptions())
    assert report.kinds == {"prompt": 2, "token-ids": 1, "sharegpt": 1, "turns": 1}
    assert (report.samples, report.text_prompts, report.token_prompts, report.chats) == (5, 2, 1, 1)


CONVERSATION = st.lists(st.tuples(st.sampled_from(["human", "gpt"]), st.text(max_size=8)), max_size=6)


@settings(deadline=None, max_examples=60)
@given(turns=CONVERSATION)
def test_what_is_sent_and_what_is_dropped_are_the_whole_conversation(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]]
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "conversations.jsonl"
    turns = [*turns, ("human", "?"), ("gpt", "!")]
    said = [{"from": speaker, "value": value} for speaker, value in turns]
    path.write_text(json.dumps({"conversations": said}) + "\n")
    (task,) = tasks_of(path)
    assert task.messages is not None
    whole = [*task.messages, *task.fields["dropped_turns"]]  # type: ignore[misc]  # a list, as it was put there
    assert [message["content"] for message in whole] == [value for _, value in turns]
    assert task.messages[-1]["content"] == "?"
