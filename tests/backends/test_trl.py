from typing import Any

import pytest

from managed_cli.backends.trl import TRLBackend
from managed_cli.errors import ConfigError, PromptRejected, ServerContractError, ServerRefused
from managed_cli.types import LogprobsMode, SamplingParams
from tests.backends.replay import Answer, Recording, all_recorded, as_json, ask, recorded, replaying

GENERATE = "POST /generate/"
PROMPT = recorded("trl", "gen_ids").body["prompts"][0]
VOCABULARY = 49152
EOS = 2


def completions(ids: list[int], logprobs: list[list[float | None]], tokens: list[list[int]] | None = None) -> Answer:
    named = tokens or [[token] for token in ids]
    value = {"prompt_ids": [[1]], "completion_ids": [ids], "logprobs": [logprobs], "logprob_token_ids": [named]}
    return as_json(value)


PROCESSED = (completions([5], [[-0.5, -2.0]], [[5, 6]]), completions([5], [[-0.3868, -1.1368]], [[5, 6]]))


def own_server(*answers: Answer, probes: tuple[Answer, ...] = PROCESSED) -> dict[str, Answer | list[Answer]]:
    return {
        "GET /health/": recorded("trl", "health").answer,
        "GET /v1/models": recorded("trl", "models_absent").answer,
        "GET /get_world_size/": recorded("trl", "world_size").answer,
        GENERATE: [*probes, *answers],
    }


def vllm_server(*answers: Answer) -> dict[str, Answer | list[Answer]]:
    top = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -0.5, "token_id:2": -2.0}]}
    probe = as_json({"choices": [{"index": 0, "text": "", "finish_reason": "length", "logprobs": top}]})
    return {
        "GET /health": recorded("trl116", "health").answer,
        "GET /health/": Answer(status=307, headers={"location": "/health"}),
        "GET /v1/models": recorded("trl116", "models").answer,
        "POST /v1/completions": [probe, probe, *answers],
    }


def generate(prompt: list[int], sampling: SamplingParams) -> Any:  # Any: an action for `ask`
    async def action(backend: TRLBackend) -> Any:  # Any: a reply
        backend.limit_vocabulary(VOCABULARY)
        backend.know_end_tokens([EOS])
        return await backend.generate(prompt, sampling)

    return action


def sampling_of(recording: Recording) -> SamplingParams:
    body, extra = recording.body, recording.body.get("generation_kwargs", {})
    return SamplingParams(
        n=extra.get("n", body.get("n", 1)),
        max_tokens=body.get("max_tokens", 16),
        temperature=body.get("temperature", 1.0),
        stop=tuple(extra.get("stop", ())),
        stop_token_ids=tuple(extra.get("stop_token_ids", ())),
    )


def whole(recording: Recording) -> bool:
    """Whether one prompt of ids was sent and logprobs were asked for, and no second n overrode the first."""
    prompts = recording.body["prompts"]
    return len(prompts) == 1 and isinstance(prompts[0], list) and recording.body.get("logprobs", 0) is not None


WHOLE = [r for r in all_recorded("trl", "/generate/") if whole(r)]


def test_there_are_recordings_to_replay() -> None:
    assert len(WHOLE) >= 8


@pytest.mark.parametrize("recording", WHOLE, ids=lambda r: r.name)
def test_every_recorded_reply_becomes_its_choices(recording: Recording) -> None:
    with replaying(own_server(recording.answer)) as server:
        answer = generate(recording.body["prompts"][0], sampling_of(recording))
        reply = ask(TRLBackend, server, answer, context_length=2048)
    response = recording.response
    assert [list(g.token_ids) for g in reply.choices] == response["completion_ids"]
    for index, choice in enumerate(reply.choices):
        rows = zip(choice.token_ids, response["logprob_token_ids"][index], response["logprobs"][index], strict=True)
        assert list(choice.logprobs) == [dict(zip(ids, values, strict=True))[token] for token, ids, values in rows]
        assert choice.text is None
        assert choice.finish_reason_inferred


def test_the_sampled_token_is_found_by_its_id_not_by_its_place() -> None:
    recording = recorded("trl", "gen_logprobs3")
    with replaying(own_server(recording.answer)) as server:
        reply = ask(TRLBackend, server, generate(PROMPT, sampling_of(recording)), context_length=2048)
    first_entries = [row[0] for row in recording.response["logprobs"][0]]
    assert list(reply.choices[0].logprobs) != first_entries


@pytest.mark.parametrize(
    ("ids", "sampling", "expected"),
    [
        ([7, EOS], SamplingParams(max_tokens=9), ("stop", None, EOS)),
        ([7, EOS], SamplingParams(max_tokens=2), ("stop", None, EOS)),
        ([7, 8], SamplingParams(max_tokens=2), ("length", None, None)),
        ([7, 8], SamplingParams(max_tokens=9, stop_token_ids=(8,)), ("stop", 8, 8)),
        ([7, 8], SamplingParams(max_tokens=9, stop=("x",)), ("stop", "x", None)),
        ([7, 8], SamplingParams(max_tokens=9, stop=("x", "y")), ("stop", None, None)),
        ([7, 8], SamplingParams(max_tokens=2, stop=("x",)), ("length", None, None)),
        ([7, EOS], SamplingParams(max_tokens=9, stop=("x",)), ("stop", None, EOS)),
    ],
)
def test_the_finish_reason_is_read_off_the_ids(ids: list[int], sampling: SamplingParams, expected: Any) -> None:
    with replaying(own_server(completions(ids, [[-0.5]] * len(ids)))) as server:
        (choice,) = ask(TRLBackend, server, generate([1], sampling), context_length=2048).choices
    assert (choice.finish_reason, choice.stop_reason, choice.end_token_id) == expected


def test_a_choice_that_ends_early_at_an_unknown_token_is_refused() -> None:
    with (
        replaying(own_server(completions([7, 8], [[-0.5]] * 2))) as server,
        pytest.raises(ServerContractError, match="after 2 of 9 tokens at id 8, which is no end token") as caught,
    ):
        ask(TRLBackend, server, generate([1], SamplingParams(max_tokens=9)), context_length=2048)
    assert "--context-length" in caught.value.report()


def test_a_server_that_sends_one_logprob_a_token_is_read_too() -> None:
    value = {"prompt_ids": [[1]], "completion_ids": [[7, EOS]], "logprobs": [[-0.5, -0.25]]}
    with replaying(own_server(as_json(value))) as server:
        (choice,) = ask(TRLBackend, server, generate([1], SamplingParams()), context_length=2048).choices
    assert list(choice.logprobs) == [-0.5, -0.25]


def test_a_server_that_does_not_echo_its_prompt_is_too_old() -> None:
    value = {"completion_ids": [[7, EOS]], "logprobs": [[-0.5, -0.25]]}
    with (
        replaying(own_server(as_json(value))) as server,
        pytest.raises(ServerContractError, match="did not say which prompt ids it used") as caught,
    ):
        ask(TRLBackend, server, generate([1], SamplingParams()), context_length=2048)
    assert "TRL 0.29" in caught.value.report()


def test_a_server_that_takes_only_text_is_refused_by_the_probe() -> None:
    routes = own_server(probes=(recorded("trl", "gen_err_422_type").answer,))
    with replaying(routes) as server, pytest.raises(ServerRefused, match="takes no token ids") as caught:
        ask(TRLBackend, server, lambda b: b.probe(), probed=False)
    assert "TRL 0.29" in caught.value.report()
    assert caught.value.status == 422


def test_nulls_at_tokens_that_were_not_sampled_do_no_harm() -> None:
    recording = recorded("trl", "gen_topk1_logprobs2_inf")
    with replaying(own_server(recording.answer)) as server:
        (choice,) = ask(TRLBackend, server, generate(PROMPT, sampling_of(recording)), context_length=2048).choices
    assert list(choice.logprobs) == [0.0, 0.0, 0.0]


def test_two_prompts_in_a_reply_to_one_are_refused() -> None:
    recording = recorded("trl", "gen_ids2_n2")
    with (
        replaying(own_server(recording.answer)) as server,
        pytest.raises(ServerContractError, match="echoed 2 prompts"),
    ):
        ask(TRLBackend, server, generate(PROMPT, SamplingParams(n=4, max_tokens=4)), context_length=2048)


def test_a_bare_server_error_is_told_with_its_status() -> None:
    recording = recorded("trl", "gen_err_n2_temp0")
    with replaying(own_server(recording.answer)) as server, pytest.raises(ServerRefused, match="HTTP 500") as caught:
        ask(TRLBackend, server, generate(PROMPT, SamplingParams()), context_length=2048)
    assert "Internal Server Error" in caught.value.report()


def test_several_greedy_choices_are_refused_before_the_server_sees_them() -> None:
    with replaying(own_server()) as server, pytest.raises(ConfigError, match="one choice at temperature 0, not 2"):
        ask(TRLBackend, server, generate(PROMPT, SamplingParams(n=2, temperature=0.0)), context_length=2048)


def test_the_probe_knows_which_dialect_answers() -> None:
    with replaying(own_server()) as server:
        own = ask(TRLBackend, server, lambda b: b.probe(), probed=False, context_length=2048)
    with replaying(vllm_server()) as server:
        vllm = ask(TRLBackend, server, lambda b: b.probe(), probed=False)
    assert (own.server_type, own.model, own.context_length) == ("trl", "unknown", 2048)
    assert (own.logprobs_mode, own.logprobs_mode_source) == (LogprobsMode.PROCESSED, "probed at two temperatures")
    model = recorded("trl116", "models").response["data"][0]
    assert (vllm.server_type, vllm.model, vllm.context_length) == ("trl", model["id"], model["max_model_len"])


@pytest.mark.parametrize("routes", [own_server(), vllm_server()], ids=["own", "vllm"])
def test_either_dialect_is_found_ready(routes: dict[str, Answer]) -> None:
    with replaying(routes) as server:
        ask(TRLBackend, server, lambda b: b.wait_until_ready(0.0), probed=False)


def test_from_trl_1_11_on_replies_are_vllms() -> None:
    prompt = recorded("trl116", "cmpl_temp05_lp50").body["prompt"]
    recording = recorded("trl116", "cmpl_temp05_lp50")
    with replaying(vllm_server(recording.answer)) as server:
        (choice,) = ask(TRLBackend, server, lambda b: b.generate(prompt, SamplingParams(max_tokens=2))).choices
    assert list(choice.token_ids) == recording.response["choices"][0]["token_ids"]
    assert choice.text == recording.response["choices"][0]["text"]
    assert not choice.finish_reason_inferred


def test_a_server_that_is_neither_is_refused() -> None:
    with replaying({}) as server, pytest.raises(ServerContractError, match="neither vLLM's /v1/models nor TRL's"):
        ask(TRLBackend, server, lambda b: b.probe(), probed=False)


@pytest.mark.parametrize(
    ("context", "vocabulary", "ends", "message"),
    [
        (None, VOCABULARY, [EOS], "hangs on a prompt that is too long"),
        (2048, None, [EOS], "its vocabulary is not known"),
        (2048, VOCABULARY, [], "end-of-turn tokens are not known"),
    ],
)
def test_nothing_is_sent_while_what_the_server_does_not_say_is_unknown(
    context: int | None, vocabulary: int | None, ends: list[int], message: str
) -> None:
    async def both(backend: TRLBackend) -> None:
        if vocabulary is not None:
            backend.limit_vocabulary(vocabulary)
        backend.know_end_tokens(ends)
        with pytest.raises(ConfigError, match=message):
            await backend.generate(PROMPT, SamplingParams())
        with pytest.raises(ConfigError, match=message):
            await backend.prompt_logprobs(PROMPT, 3)

    with replaying(own_server()) as server:
        ask(TRLBackend, server, both, context_length=context)
        assert len(server.asked("/generate/")) == len(PROCESSED)


@pytest.mark.parametrize("ids", [[1] * 2048, [999999], [-1], []])
def test_a_prompt_that_would_hang_the_server_is_not_sent(ids: list[int]) -> None:
    with replaying(own_server()) as server:
        with pytest.raises(PromptRejected):
            ask(TRLBackend, server, generate(ids, SamplingParams()), context_length=2048)
        assert len(server.asked("/generate/")) == len(PROCESSED)


def test_every_sampling_parameter_is_sent() -> None:
    sampling = SamplingParams(
        max_tokens=12, temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, seed=7, stop=("x",), stop_token_ids=(5,)
    )
    with replaying(own_server(recorded("trl", "gen_ids").answer)) as server:
        ask(TRLBackend, server, generate(PROMPT, sampling), context_length=2048)
        (*_, sent) = server.asked("/generate/")
    assert sent == {
        "prompts": [PROMPT],
        "n": 1,
        "max_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "generation_kwargs": {"seed": 7, "stop": ["x"], "stop_token_ids": [5]},
    }


def prompt_logprobs(prompt: list[int], top_k: int) -> Any:  # Any: an action for `ask`
    async def action(backend: TRLBackend) -> Any:  # Any: PromptLogprobs
        backend.limit_vocabulary(VOCABULARY)
        backend.know_end_tokens([EOS])
        return await backend.prompt_logprobs(prompt, top_k)

    return action


def test_prompt_logprobs_of_the_own_server_leave_out_the_prompts_own_token() -> None:
    prompt = [1, 504, 3575]
    value = {"logprobs": [[[-0.1, -0.2, -9.0], [-0.3, None]]], "logprob_token_ids": [[[7, 8, 504], [9, 3575]]]}
    with replaying({**own_server(), "POST /get_sequence_logprobs/": as_json(value)}) as server:
        top = ask(TRLBackend, server, prompt_logprobs(prompt, 2), context_length=2048)
        (sent,) = server.asked("/get_sequence_logprobs/")
    assert sent == {"sequences": [prompt], "prompt_lengths": [1], "top_logprobs": 2, "temperature": 1.0}
    assert top.topk_token_ids == [[], [7, 8], [9, 3575]]
    assert top.topk_logprobs == [[], [-0.1, -0.2], [-0.3, float("-inf")]]


def test_recorded_sequence_logprobs_are_read() -> None:
    recording = recorded("trl", "seqlogprobs")
    sequence = recording.body["sequences"][0][recording.body["prompt_lengths"][0] - 1 :]
    with replaying({**own_server(), "POST /get_sequence_logprobs/": recording.answer}) as server:
        top = ask(TRLBackend, server, prompt_logprobs(sequence, 3), context_length=2048)
    assert top.topk_token_ids == [[], *recording.response["logprob_token_ids"][0]]
    assert top.topk_logprobs == [[], *recording.response["logprobs"][0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (recorded("trl", "seqlogprobs_binary").response, "sent no prompt logprobs"),
        ({"logprobs": [[[-0.1, -0.2]]], "logprob_token_ids": [[[7, 8]]]}, "sent 2 prompt logprobs for 3 tokens"),
        ({"logprobs": [[[-0.1], [-0.2]]], "logprob_token_ids": [[[7], [8]]]}, "1 alternatives at prompt position 1"),
        ({"logprobs": [[[-0.1], [-0.2]]], "logprob_token_ids": [[[7, 8], [8]]]}, "do not fit their ids"),
    ],
)
def test_sequence_logprobs_that_lack_something_are_refused(value: Any, message: str) -> None:
    routes = {**own_server(), "POST /get_sequence_logprobs/": as_json(value)}
    with replaying(routes) as server, pytest.raises(ServerContractError, match=message):
        ask(TRLBackend, server, prompt_logprobs([1, 504, 3575], 2), context_length=2048)


def test_more_alternatives_than_the_own_server_survives_are_not_asked_for() -> None:
    with replaying(own_server()) as server:
        with pytest.raises(ConfigError, match="at most 20 alternatives, not 21"):
            ask(TRLBackend, server, prompt_logprobs(PROMPT, 21), context_length=2048)
        assert not server.asked("/get_sequence_logprobs/")


def test_only_the_vllm_dialect_can_tokenise() -> None:
    routes = {**vllm_server(), "POST /tokenize": as_json({"tokens": [5, 6]})}
    with replaying(routes) as server:
        assert ask(TRLBackend, server, lambda b: b.tokenize("x", add_special_tokens=False)) == [5, 6]
    with replaying(own_server()) as server:
        assert ask(TRLBackend, server, lambda b: b.tokenize("x", add_special_tokens=False)) is None
