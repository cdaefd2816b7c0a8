from typing import Any

import pytest

from managed_cli.backends.openai import OpenAIBackend, TextChoice
from managed_cli.errors import ConfigError, ServerContractError, ServerRefused
from managed_cli.types import SamplingParams
from tests.backends.replay import Answer, as_json, ask, recorded, replaying

CHAT = "POST /v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def chat_answer(*texts: str | None, finish_reason: str | None = "stop") -> Answer:
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        for i, text in enumerate(texts)
    ]
    return as_json({"choices": choices, "usage": {"prompt_tokens": 9, "completion_tokens": 4}})


def chat(sampling: SamplingParams) -> Any:  # Any: an action for `ask`
    return lambda backend: backend.chat(MESSAGES, sampling)


def test_a_recorded_chat_reply_becomes_text_with_its_usage() -> None:
    recording = recorded("vllm", "chat_plain")
    with replaying({CHAT: recording.answer}) as server:
        reply = ask(OpenAIBackend, server, chat(SamplingParams()), model="m")
    (choice,), usage = recording.response["choices"], recording.response["usage"]
    assert reply.choices == (TextChoice(text=choice["message"]["content"], finish_reason=choice["finish_reason"]),)
    assert (reply.prompt_tokens, reply.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_a_recorded_completion_becomes_text() -> None:
    recording = recorded("vllm", "cmpl_text")
    with replaying({"POST /v1/completions": recording.answer}) as server:
        reply = ask(OpenAIBackend, server, lambda b: b.complete("The", SamplingParams(max_tokens=7)), model="m")
        (sent,) = server.asked("/v1/completions")
    assert reply.choices[0].text == recording.response["choices"][0]["text"]
    assert sent == {"model": "m", "prompt": "The", "max_tokens": 7, "n": 1, "temperature": 1.0, "top_p": 1.0}


def test_only_parameters_that_openai_has_are_sent() -> None:
    sampling = SamplingParams(n=2, max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=("x",))
    with replaying({CHAT: chat_answer("a", "b")}) as server:
        reply = ask(OpenAIBackend, server, chat(sampling), model="m")
        (sent,) = server.asked("/v1/chat/completions")
    assert sent == {
        "model": "m",
        "messages": MESSAGES,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "seed": 3,
        "max_completion_tokens": 7,
    }
    assert [choice.text for choice in reply.choices] == ["a", "b"]


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_max_completion_tokens_is_sent_max_tokens_from_then_on(status: int) -> None:
    refusal = as_json({"error": {"message": "Unrecognized request argument: max_completion_tokens"}}, status)

    async def twice(backend: OpenAIBackend) -> None:
        await backend.chat(MESSAGES, SamplingParams(max_tokens=7))
        await backend.chat(MESSAGES, SamplingParams(max_tokens=7))

    with replaying({CHAT: [refusal, chat_answer("a")]}) as server:
        ask(OpenAIBackend, server, twice, model="m")
        sent = server.asked("/v1/chat/completions")
    assert [("max_completion_tokens" in body, "max_tokens" in body) for body in sent] == [
        (True, False),
        (False, True),
        (False, True),
    ]


def test_any_other_refusal_is_final() -> None:
    with replaying({CHAT: as_json({"error": {"message": "no such model"}}, 400)}) as server:
        with pytest.raises(ServerRefused, match="HTTP 400"):
            ask(OpenAIBackend, server, chat(SamplingParams()), model="m")
        assert len(server.asked("/v1/chat/completions")) == 1


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (SamplingParams(top_k=5), "top_k"),
        (SamplingParams(min_p=0.1, repetition_penalty=1.1), "min_p, repetition_penalty"),
        (SamplingParams(stop_token_ids=(2,)), "stop_token_ids"),
    ],
)
def test_a_setting_that_openai_has_not_is_refused(sampling: SamplingParams, named: str) -> None:
    with replaying({}) as server, pytest.raises(ConfigError, match=f"has no {named}"):
        ask(OpenAIBackend, server, chat(sampling), model="m")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chat_answer("a"), "sent 1 choices for n=2"),
        (chat_answer("a", "b", finish_reason=None), "no finish reason for choice 0"),
        (as_json({"choices": [{"index": i, "finish_reason": "stop"} for i in range(2)]}), "sent no text for choice 0"),
        (Answer(b"<html>hello</html>", content_type="text/html"), "cannot be read"),
    ],
)
def test_a_reply_that_lacks_something_is_refused(answer: Answer, message: str) -> None:
    with replaying({CHAT: answer}) as server, pytest.raises(ServerContractError, match=message):
        ask(OpenAIBackend, server, chat(SamplingParams(n=2)), model="m")


def test_a_message_without_content_is_empty_text() -> None:
    with replaying({CHAT: chat_answer(None, finish_reason="tool_calls")}) as server:
        reply = ask(OpenAIBackend, server, chat(SamplingParams()), model="m")
    assert reply.choices == (TextChoice(text="", finish_reason="tool_calls"),)


def test_token_ids_are_not_offered() -> None:
    async def all_of_them(backend: OpenAIBackend) -> None:
        with pytest.raises(NotImplementedError, match="no token ids"):
            await backend.generate([1], SamplingParams())
        with pytest.raises(NotImplementedError, match="no token ids"):
            await backend.prompt_logprobs([1], 3)
        with pytest.raises(NotImplementedError, match="no token ids"):
            await backend.tokenize("a", add_special_tokens=False)

    with replaying({}) as server:
        ask(OpenAIBackend, server, all_of_them, model="m")


def test_the_only_model_of_a_server_needs_no_name() -> None:
    with replaying({"GET /v1/models": recorded("vllm", "models").answer}) as server:
        info = ask(OpenAIBackend, server, lambda b: b.probe(), probed=False)
    assert info.model == recorded("vllm", "models").response["data"][0]["id"]


def test_one_of_several_models_must_be_named() -> None:
    listed = as_json({"data": [{"id": f"model-{i}"} for i in range(20)]})
    with (
        replaying({"GET /v1/models": listed}) as server,
        pytest.raises(ConfigError, match="20 models; one must") as caught,
    ):
        ask(OpenAIBackend, server, lambda b: b.probe(), probed=False)
    assert "model-7, …" in caught.value.report()
    assert "--model" in caught.value.report()


@pytest.mark.parametrize("answer", [as_json({"data": []}), as_json({"detail": "Not Found"}, 404)])
def test_a_server_that_answers_is_ready_with_or_without_a_model_list(answer: Answer) -> None:
    with replaying({"GET /v1/models": answer}) as server:
        ask(OpenAIBackend, server, lambda b: b.wait_until_ready(0.0), probed=False)


def test_a_wrong_key_is_noticed_before_the_first_request() -> None:
    answer = as_json({"error": {"message": "Incorrect API key provided: sk-secret."}}, 401)
    with replaying({"GET /v1/models": answer}) as server, pytest.raises(ServerRefused, match="HTTP 401") as caught:
        ask(OpenAIBackend, server, lambda b: b.wait_until_ready(0.0), probed=False, api_key="sk-secret")
    assert "sk-secret" not in caught.value.report()
