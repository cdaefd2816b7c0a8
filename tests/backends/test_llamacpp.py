import functools
from collections.abc import Mapping
from typing import Any

import pytest

from managed_cli.backends.llamacpp import LlamaCppBackend, certain_positions
from managed_cli.errors import ConfigError, PromptRejected, ServerContractError, ServerRefused
from managed_cli.types import LogprobsMode, SamplingParams
from tests.backends.replay import Answer, as_json, ask, recorded, replaying

COMPLETION = "POST /completion"
PROMPT = recorded("llamacpp", "completion_nprobs1").body["prompt"]
HARMLESS_ID = 81


def llamacpp(*completions: Answer) -> Mapping[str, Answer | list[Answer]]:
    return {
        "GET /health": recorded("llamacpp", "get_health").answer,
        "GET /props": recorded("llamacpp", "get_props").answer,
        "GET /v1/models": recorded("llamacpp", "get_v1_models").answer,
        "POST /tokenize": as_json({"tokens": [HARMLESS_ID]}),
        COMPLETION: list(completions),
    }


def rescoring(token: int, logprob: float | None) -> Answer:
    """The answer to a request for the alternatives of one position."""
    entry = {"id": HARMLESS_ID, "logprob": 0.0, "top_logprobs": [{"id": token, "logprob": logprob}]}
    value = {"content": "a", "tokens": [HARMLESS_ID], "stop_type": "limit", "tokens_evaluated": 1}
    return as_json({**value, "completion_probabilities": [entry]})


def with_logprobs(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded completion that was not asked for logprobs, as it would be with them."""
    entries = [{"id": token, "logprob": -0.5} for token in completion["tokens"]]
    return {**completion, "completion_probabilities": entries}


@pytest.mark.parametrize("name", ["completion_nprobs1", "completion_temp05_nprobs2"])
def test_every_recorded_reply_becomes_its_choice(name: str) -> None:
    recording = recorded("llamacpp", name)
    sampling = SamplingParams(max_tokens=recording.body["n_predict"])
    with replaying(llamacpp(recording.answer)) as server:
        reply = ask(LlamaCppBackend, server, lambda b: b.generate(recording.body["prompt"], sampling))
    (choice,), response = reply.choices, recording.response
    assert list(choice.token_ids) == response["tokens"]
    assert list(choice.logprobs) == [entry["logprob"] for entry in response["completion_probabilities"]]
    assert choice.text == response["content"]
    assert choice.rescored == ()
    assert reply.logprobs_mode is LogprobsMode.RAW
    expected = ("stop", 2) if response["stop_type"] == "eos" else ("length", None)
    assert (choice.finish_reason, choice.end_token_id) == expected


@pytest.mark.parametrize(("more_than_the_context", "outcome"), [(0, "length"), (1, None)])
def test_a_completion_that_fills_the_context_is_data_and_one_after_a_context_shift_is_not(
    more_than_the_context: int, outcome: str | None
) -> None:
    completion = with_logprobs(recorded("llamacpp", "completion_n2").response[0])
    held = len(PROMPT) + len(completion["tokens"])
    properties = recorded("llamacpp", "get_props").response
    properties["default_generation_settings"]["n_ctx"] = held - more_than_the_context
    answers = {
        **llamacpp(as_json({**completion, "truncated": True, "stop_type": "limit"})),
        "GET /props": as_json(properties),
    }
    with replaying(answers) as server:
        asking = functools.partial(
            ask, LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=3))
        )
        if outcome is None:
            with pytest.raises(ServerContractError, match="dropped a part of the context"):
                asking()
        else:
            (choice,) = asking().choices
            assert (list(choice.token_ids), choice.finish_reason) == (completion["tokens"], outcome)


def test_a_recorded_list_becomes_several_choices() -> None:
    recording = recorded("llamacpp", "completion_n2")
    answer = as_json([with_logprobs(completion) for completion in recording.response])
    with replaying(llamacpp(answer)) as server:
        reply = ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(n=2, max_tokens=3)))
    assert [list(c.token_ids) for c in reply.choices] == [c["tokens"] for c in recording.response]


def test_more_choices_than_slots_go_in_several_requests_with_other_seeds() -> None:
    two = as_json([with_logprobs(completion) for completion in recorded("llamacpp", "completion_n2").response])
    one = as_json(with_logprobs(recorded("llamacpp", "completion_n2").response[0]))
    with replaying(llamacpp(two, one)) as server:
        reply = ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(n=3, max_tokens=3, seed=5)))
        assert [(body["n"], body["seed"]) for body in server.asked("/completion")] == [(2, 5), (1, 7)]
    assert len(reply.choices) == 3


def test_a_reply_to_another_request_is_known_by_its_seed() -> None:
    recording = recorded("llamacpp", "completion_seed")
    sent = recording.response["generation_settings"]["seed"]
    answer = as_json(with_logprobs(recording.response))
    with replaying(llamacpp(answer)) as server:
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=12, seed=sent)))
    with (
        replaying(llamacpp(answer)) as server,
        pytest.raises(ServerContractError, match=f"answered with the seed {sent}, not with {sent + 1} as sent"),
    ):
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=12, seed=sent + 1)))


def test_a_logprob_that_the_stop_word_swallowed_is_asked_for_again_and_marked() -> None:
    recording = recorded("llamacpp", "completion_stop")
    ids = recording.response["tokens"]
    with replaying(llamacpp(recording.answer, rescoring(ids[-1], -0.25))) as server:
        reply = ask(
            LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=12, stop=("France",)))
        )
        again = server.asked("/completion")[-1]
    (choice,) = reply.choices
    sent = [entry["logprob"] for entry in recording.response["completion_probabilities"]]
    assert list(choice.token_ids) == ids
    assert list(choice.logprobs) == [*sent, -0.25]
    assert choice.rescored == (len(ids) - 1,)
    assert (choice.finish_reason, choice.stop_reason, choice.end_token_id) == ("stop", "France", None)
    assert again["prompt"] == [*PROMPT, *ids[:-1]]


def test_a_token_whose_logprob_cannot_be_had_is_refused() -> None:
    recording = recorded("llamacpp", "completion_stop")
    with (
        replaying(llamacpp(recording.answer, rescoring(0, -0.25))) as server,
        pytest.raises(ServerContractError, match="gives no logprob for the token 4649"),
    ):
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=12, stop=("France",))))


@pytest.mark.parametrize(
    ("tokens", "entries", "positions"),
    [
        ([1, 2, 3], [1, 2, 3], {0: 0, 1: 1, 2: 2}),
        ([1, 2, 3], [1, 2], {0: 0, 1: 1}),
        ([1, 2, 3], [1, 3], {0: 0, 2: 1}),
        ([7, 7], [7], {}),
        ([1, 2], [3], None),
        ([1], [1, 1], None),
        ([], [], {}),
    ],
)
def test_only_entries_with_one_possible_place_are_placed(
    tokens: list[int], entries: list[int], positions: dict[int, int] | None
) -> None:
    assert certain_positions(tokens, entries) == positions


def test_the_probe_reads_the_context_of_one_slot_and_the_vocabulary() -> None:
    with replaying(llamacpp()) as server:
        info = ask(LlamaCppBackend, server, lambda b: b.probe(), probed=False)
    model = recorded("llamacpp", "get_v1_models").response["data"][0]
    assert (info.model, info.context_length, info.vocab_size) == (model["id"], 1024, model["meta"]["n_vocab"])


def test_every_sampler_that_the_server_may_have_a_default_for_is_sent() -> None:
    defaults = recorded("llamacpp", "completion_nprobs1").response["generation_settings"]
    with replaying(llamacpp(recorded("llamacpp", "completion_nprobs1").answer)) as server:
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=12)))
        (sent,) = server.asked("/completion")
    expected = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "typical_p": 1.0}
    assert {name: sent[name] for name in expected} == expected
    assert {"top_k", "top_p", "min_p"} <= defaults.keys()


def test_stop_token_ids_are_a_setting_that_llamacpp_has_not() -> None:
    with replaying(llamacpp()) as server, pytest.raises(ConfigError, match="cannot stop at token ids"):
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams(stop_token_ids=(5,))))


@pytest.mark.parametrize("ids", [[1] * 1024, [49152], [-1], []])
def test_a_prompt_that_cannot_be_sent_is_not_sent(ids: list[int]) -> None:
    with replaying(llamacpp()) as server:
        with pytest.raises(PromptRejected):
            ask(LlamaCppBackend, server, lambda b: b.generate(ids, SamplingParams()))
        assert not server.asked("/completion")


@pytest.mark.parametrize("name", ["completion_err_long", "completion_err_vocab", "completion_err_empty"])
def test_a_recorded_refusal_is_told_in_the_servers_words(name: str) -> None:
    recording = recorded("llamacpp", name)
    with replaying(llamacpp(recording.answer)) as server, pytest.raises(ServerRefused) as caught:
        ask(LlamaCppBackend, server, lambda b: b.generate(PROMPT, SamplingParams()))
    assert recording.response["error"]["message"] in caught.value.report()


def test_prompt_logprobs_are_not_offered() -> None:
    with replaying(llamacpp()) as server, pytest.raises(NotImplementedError, match="no logprobs of prompt tokens"):
        ask(LlamaCppBackend, server, lambda b: b.prompt_logprobs(PROMPT, 3))
