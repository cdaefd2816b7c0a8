from __future__ import annotations

import pytest

from managed_cli.rollout.tasks import Task
from managed_cli.types import SamplingParams
from tests.rollout.inputs_on_disk import WriteInput, fault_of_line, refusal, tasks_of

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def batch(body: object, **others: object) -> dict[str, object]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body, **others}


def gym(**params: object) -> dict[str, object]:
    return {"responses_create_params": params}


def only(path: object, **options: object) -> Task:
    (task,) = tasks_of(path, **options)  # type: ignore[arg-type]  # a path, from the fixture
    return task


class TestBatch:
    def test_a_chat_request_is_a_sample_under_its_custom_id(self, write: WriteInput) -> None:
        body = {"model": "m", "messages": [USER], "n": 3, "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9}
        task = only(
            write(batch({**body, "seed": 4, "stop": "x", "tools": [{"type": "function", "function": FUNCTION}]}))
        )
        assert (task.kind, task.sample_id, task.messages) == ("openai-batch", "a", (USER,))
        assert task.tools == ({"type": "function", "function": FUNCTION},)
        run = SamplingParams(min_p=0.1)
        expected = SamplingParams(n=3, max_tokens=9, temperature=0.5, top_p=0.9, seed=4, stop=("x",), min_p=0.1)
        assert task.sampling(run) == expected
        assert task.fields == {"method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}

    def test_a_text_request_is_a_text_prompt_or_token_ids(self, write: WriteInput) -> None:
        first, second = batch({"prompt": "a", "max_tokens": 5}), batch({"prompt": [1, 2]}, custom_id="b")
        text, ids = tasks_of(write(first, second))
        assert (text.prompt, text.overrides) == ("a", {"max_tokens": 5})
        assert ids.prompt_ids == (1, 2)

    def test_several_prompts_in_one_request_are_refused(self, write: WriteInput) -> None:
        message = fault_of_line(write(batch({"prompt": ["a", "b"]})))
        assert message == "1: `body.prompt`: expected a non-empty string or a list of token ids, came a list of 2"

    def test_a_responses_request_is_a_chat(self, write: WriteInput) -> None:
        task = only(write(batch({"input": "hi", "instructions": "be brief"}, url="/v1/responses")))
        assert task.messages == ({"role": "system", "content": "be brief"}, USER)

    def test_method_and_url_may_be_left_out(self, write: WriteInput) -> None:
        task = only(write({"custom_id": 7, "body": {"messages": [USER]}}))
        assert (task.kind, task.sample_id, task.fields) == ("openai-batch", "7", {})

    def test_another_id_field_makes_the_custom_id_an_ordinary_one(self, write: WriteInput) -> None:
        task = only(write(batch({"messages": [USER]}, uid="u")), id_field="uid")
        assert (task.sample_id, task.fields["custom_id"]) == ("u", "a")

    def test_the_custom_id_can_be_named_for_other_lines_too(self, write: WriteInput) -> None:
        path = write(batch({"messages": [USER]}), {"custom_id": "b", "prompt": "x"})
        assert [(task.sample_id, "custom_id" in task.fields) for task in tasks_of(path, id_field="custom_id")] == [
            ("a", False),
            ("b", False),
        ]

    def test_a_repeated_custom_id_is_named(self, write: WriteInput) -> None:
        path = write(batch({"messages": [USER]}), batch({"prompt": "x"}))
        assert fault_of_line(path) == '2: `custom_id`: expected an id of its own, came "a", as in line 1'

    def test_the_run_s_system_message_is_put_before_a_chat(self, write: WriteInput) -> None:
        task = only(write(batch({"messages": [USER]})), system="be kind")
        assert task.messages == ({"role": "system", "content": "be kind"}, USER)

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            (batch({"messages": [USER]}, method="GET"), '`method`: expected POST, came the string "GET"'),
            (
                batch({"input": "x"}, url="/v1/embeddings"),
                "`url`: expected an endpoint that ends with /chat/completions, /completions, /responses, "
                'came the string "/v1/embeddings"',
            ),
            (
                batch({"model": "m"}),
                "`body`: expected exactly one of `messages`, `prompt` and `input`, came `model`",
            ),
            (
                batch({"messages": [USER], "prompt": "x"}),
                "`body`: expected exactly one of `messages`, `prompt` and `input`, came `messages` and `prompt`",
            ),
            (
                batch({"messages": [{"role": "user"}]}),
                "`body.messages[0]`: expected `role` and `content`, `content` is missing",
            ),
            (
                batch({"prompt": "x", "tools": [{}]}),
                "`body.tools`: belongs to a chat, and this request has a text prompt",
            ),
            (
                batch({"messages": [USER], "tools": ["f"]}),
                '`body.tools[0]`: expected an object that describes a tool, came the string "f"',
            ),
            (
                batch({"messages": [USER], "max_completion_tokens": 0}),
                "`body.max_completion_tokens`: expected an integer from 1 to 2147483647, came the number 0",
            ),
            (
                batch({"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2}),
                "`body.max_tokens` and `body.max_completion_tokens`: expected one of them, came two values",
            ),
            (
                batch({"messages": [USER], "n": 2, "temperature": 0}),
                "`body.n`: expected n = 1 at temperature 0, came n = 2",
            ),
            (
                batch({"messages": [USER]}, sampling={"n": 2}),
                "`sampling`: has no meaning beside `body`, expected its parameters inside",
            ),
        ],
    )
    def test_a_request_that_cannot_be_meant_is_told(
        self, write: WriteInput, record: dict[str, object], message: str
    ) -> None:
        assert fault_of_line(write(record)) == f"1: {message}"


class TestParameters:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("presence_penalty", 0.5),
            ("frequency_penalty", -1),
            ("logit_bias", {"50256": -100}),
            ("response_format", {"type": "json_object"}),
            ("tool_choice", "required"),
            ("tool_choice", {"type": "function", "function": {"name": "f"}}),
            ("reasoning_effort", "high"),
            ("chat_template_kwargs", {"enable_thinking": False}),
            ("guided_json", {"type": "object"}),
            ("min_tokens", 4),
            ("ignore_eos", True),
            ("suffix", "end"),
            ("add_generation_prompt", False),
            ("continue_final_message", True),
            ("add_special_tokens", True),
        ],
    )
    def test_one_that_changes_what_is_sampled_and_is_not_sent_is_refused(
        self, write: WriteInput, name: str, value: object
    ) -> None:
        error = refusal(write(batch({"messages": [USER], name: value})))
        assert f"`body.{name}`: expected " in error.details[0]
        assert error.details[0].endswith("it would change what is sampled, and is not sent to the server")
        assert error.hint == f'take "{name}" out of the lines if it may be ignored'

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("presence_penalty", 0),
            ("frequency_penalty", 0.0),
            ("logit_bias", {}),
            ("response_format", {"type": "text"}),
            ("response_format", None),
            ("tool_choice", "auto"),
            ("truncation", "disabled"),
            ("reasoning", {"effort": None}),
            ("suffix", ""),
            ("add_generation_prompt", True),
            ("model", "gpt-4o"),
            ("user", "u"),
            ("metadata", {"a": "b"}),
            ("logprobs", True),
            ("stream", False),
            ("parallel_tool_calls", False),
            ("something_new", [1]),
        ],
    )
    def test_one_that_changes_nothing_is_kept_as_a_field(self, write: WriteInput, name: str, value: object) -> None:
        task = only(write(batch({"messages": [USER], name: value})))
        assert task.fields["body"] == {name: value}
        assert task.overrides == {}

    def test_a_continued_answer_may_say_so(self, write: WriteInput) -> None:
        messages = [USER, {"role": "assistant", "content": "Once"}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        assert only(write(batch(body))).continue_final
        assert "`body.add_generation_prompt`" in fault_of_line(
            write(batch({"messages": messages, "add_generation_prompt": True}))
        )

    def test_null_leaves_one_to_the_run(self, write: WriteInput) -> None:
        task = only(write(batch({"messages": [USER], "temperature": None, "max_tokens": None})))
        assert task.overrides == {}


class TestNemoGym:
    def test_a_string_is_the_user_s_message(self, write: WriteInput) -> None:
        task = only(write({**gym(input="hi", instructions="be brief"), "verifier": {"answer": 42}, "id": "x"}))
        assert (task.kind, task.sample_id) == ("nemo-gym", "x")
        assert task.messages == ({"role": "system", "content": "be brief"}, USER)
        assert task.fields == {"verifier": {"answer": 42}}

    def test_messages_keep_what_a_template_may_read(self, write: WriteInput) -> None:
        items = [
            {"role": "developer", "content": "be brief"},
            {"type": "message", "id": "m1", "status": "completed", "role": "user", "name": "Kim", "content": "hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "yes?", "annotations": []}]},
            {"role": "user", "content": [{"type": "input_text", "text": "go "}, {"type": "text", "text": "on"}]},
        ]
        assert only(write(gym(input=items))).messages == (
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "Kim", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "yes?"}]},
            {"role": "user", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]},
        )

    def test_function_calls_and_outputs_become_messages(self, write: WriteInput) -> None:
        calls = [{"type": "function_call", "call_id": i, "name": f"f{i}", "arguments": "{}"} for i in "12"]
        outputs = [{"type": "function_call_output", "call_id": i, "output": f"out {i}"} for i in "12"]
        task = only(write(gym(input=[USER, *calls, *outputs])))
        function_calls = [{"id": i, "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in "12"]
        assert task.messages == (
            USER,
            {"role": "assistant", "content": None, "tool_calls": function_calls},
            {"role": "tool", "tool_call_id": "1", "content": "out 1"},
            {"role": "tool", "tool_call_id": "2", "content": "out 2"},
        )

    def test_a_call_belongs_to_the_words_before_it(self, write: WriteInput) -> None:
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": "x"}
        task = only(write(gym(input=[USER, {"role": "assistant", "content": "wait"}, call, output])))
        assert task.messages is not None
        assert (task.messages[1]["content"], len(task.messages[1]["tool_calls"])) == ("wait", 1)

    def test_flat_tools_take_the_form_that_templates_read(self, write: WriteInput) -> None:
        nested = {"type": "function", "function": FUNCTION}
        task = only(write(gym(input="hi", tools=[{"type": "function", "strict": True, **FUNCTION}, nested])))
        assert task.tools == ({"type": "function", "function": {"strict": True, **FUNCTION}}, nested)

    def test_its_sampling_parameters_go_over_the_run_s(self, write: WriteInput) -> None:
        task = only(write(gym(input="hi", temperature=0.5, top_p=0.9, max_output_tokens=7, parallel_tool_calls=False)))
        assert task.overrides == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
        assert task.fields == {"responses_create_params": {"parallel_tool_calls": False}}

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"input": []}, ".input`: expected a string or a list of messages, came an empty list"),
            ({"input": 3}, ".input`: expected a string or a list of messages, came the number 3"),
            ({}, "`: expected exactly one of `messages`, `prompt` and `input`, came nothing"),
            ({"input": ["x"]}, '.input[0]`: expected a message or another item, an object, came the string "x"'),
            (
                {"input": [{"type": "reasoning", "summary": []}]},
                '.input[0].type`: expected message, function_call or function_call_output, came "reasoning"',
            ),
            ({"input": [{"type": "function_call", "name": "f"}]}, ".input[0].arguments`: expected a string, came null"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                '.input[0].content[0]`: expected a part of type "text", came type "input_image"',
            ),
            ({"input": "hi", "instructions": 3}, ".instructions`: expected a string, came the number 3"),
            (
                {"input": "hi", "tools": [{"type": "web_search"}]},
                ".tools[0].type`: expected function, since no other tool can be described to a model here, "
                'came the string "web_search"',
            ),
            (
                {"input": "hi", "temperature": -1},
                ".temperature`: expected a number of at least 0, came the number -1",
            ),
        ],
    )
    def test_a_request_that_cannot_be_sent_is_told(
        self, write: WriteInput, params: dict[str, object], message: str
    ) -> None:
        assert fault_of_line(write(gym(**params))) == f"1: `responses_create_params{message}"
