from typing import Any

import pytest

from managed_cli.backends.sglang import SGLangBackend
from managed_cli.errors import ConfigError, PromptRejected, ServerContractError, ServerRefused
from managed_cli.types import LogprobsMode, SamplingParams, ServerInfo
from tests.backends.replay import Answer, Recording, all_recorded, as_json, ask, recorded, replaying

GENERATE = "POST /generate"
PROMPT = recorded("sglang", "gen_n3").body["input_ids"]
VOCABULARY = 49152


def probe_answer(*top: float) -> Answer:
    triples = [[value, token, None] for token, value in enumerate(top)]
    meta = {
        "prompt_tokens": 1,
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": triples[:1],
        "output_top_logprobs": [triples],
    }
    return as_json({"text": "", "output_ids": [0], "meta_info": meta})


TEMPERATURE = (probe_answer(-0.5, -2.0), probe_answer(-0.75, -1.5))


def sglang(*completions: Answer, probes: tuple[Answer, ...] = TEMPERATURE) -> dict[str, Answer | list[Answer]]:
    return {
        "GET /model_info": recorded("sglang", "get_model_info").answer,
        "GET /server_info": recorded("sglang", "get_get_server_info").answer,
        "GET /v1/models": recorded("sglang", "get_v1_models").answer,
        GENERATE: [*probes, *completions],
    }


def changed(path: str, **fields: object) -> Answer:
    """The recorded answer of `path` with some fields changed."""
    name = {"/server_info": "get_get_server_info", "/model_info": "get_model_info"}[path]
    return as_json({**recorded("sglang", name).response, **fields})


def sampling_of(recording: Recording) -> SamplingParams:
    sent = recording.body["sampling_params"]
    stop = sent.get("stop", ())
    return SamplingParams(
        n=sent.get("n", 1),
        max_tokens=sent["max_new_tokens"],
        temperature=sent.get("temperature", 1.0),
        top_k=sent.get("top_k", -1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def generate(prompt: list[int], sampling: SamplingParams) -> Any:  # Any: an action for `ask`
    async def action(backend: SGLangBackend) -> Any:  # Any: a reply
        backend.limit_vocabulary(VOCABULARY)
        return await backend.generate(prompt, sampling)

    return action


def whole(recording: Recording) -> bool:
    """Whether one prompt of ids was sent and logprobs were asked for."""
    ids = recording.body.get("input_ids")
    return bool(ids) and isinstance(ids[0], int) and recording.body.get("return_logprob") is True


RECORDINGS = [r for r in all_recorded("sglang", "/generate") if isinstance(r.body.get("sampling_params"), dict)]
ABORTED = recorded("sglang", "abort_target")
WHOLE = [r for r in RECORDINGS if whole(r) and r.name != ABORTED.name and r.body["sampling_params"]["max_new_tokens"]]


def test_there_are_recordings_to_replay() -> None:
    assert len(WHOLE) >= 15


@pytest.mark.parametrize("recording", WHOLE, ids=lambda r: r.name)
def test_every_recorded_reply_becomes_its_choices(recording: Recording) -> None:
    with replaying(sglang(recording.answer)) as server:
        reply = ask(SGLangBackend, server, generate(recording.body["input_ids"], sampling_of(recording)))
    choices = recording.response if isinstance(recording.response, list) else [recording.response]
    metas = [c["meta_info"] for c in choices]
    assert [list(g.token_ids) for g in reply.choices] == [c["output_ids"] for c in choices]
    assert [list(g.logprobs) for g in reply.choices] == [[t[0] for t in m["output_token_logprobs"]] for m in metas]
    assert [g.text for g in reply.choices] == [c["text"] for c in choices]
    assert [g.finish_reason for g in reply.choices] == [m["finish_reason"]["type"] for m in metas]
    assert [g.stop_reason for g in reply.choices] == [m["finish_reason"].get("matched") for m in metas]
    assert [g.weight_version for g in reply.choices] == [m["weight_version"] for m in metas]


@pytest.mark.parametrize(
    "recording",
    [r for r in RECORDINGS if r.body.get("input_ids") and not whole(r) and isinstance(r.body["input_ids"][0], int)],
    ids=lambda r: r.name,
)
def test_a_recorded_reply_without_logprobs_is_refused(recording: Recording) -> None:
    answer = generate(recording.body["input_ids"], sampling_of(recording))
    with replaying(sglang(recording.answer)) as server, pytest.raises(ServerContractError, match="sent no logprobs"):
        ask(SGLangBackend, server, answer)


def test_an_aborted_request_is_no_data() -> None:
    answer = generate(ABORTED.body["input_ids"], sampling_of(ABORTED))
    with (
        replaying(sglang(ABORTED.answer)) as server,
        pytest.raises(ServerContractError, match="aborted choice 0 after 21 tokens: Aborted"),
    ):
        ask(SGLangBackend, server, answer)


def test_an_end_token_put_in_place_of_a_nan_is_no_data() -> None:
    value = recorded("sglang", "gen_ids_logprob").response
    value["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    answer = generate(PROMPT, SamplingParams(stop=("France",)))
    with replaying(sglang(as_json(value))) as server, pytest.raises(ServerContractError, match="'NaN happened'"):
        ask(SGLangBackend, server, answer)


def test_the_end_of_turn_token_is_named_and_a_stop_string_is_not_one() -> None:
    replies = []
    for name in ("gen_ids_logprob", "gen_stop_tok", "gen_stop_str", "gen_temp05"):
        recording = recorded("sglang", name)
        with replaying(sglang(recording.answer)) as server:
            replies.append(ask(SGLangBackend, server, generate(PROMPT, sampling_of(recording))))
    assert [reply.choices[0].end_token_id for reply in replies] == [2, 4649, None, None]


def test_an_end_of_several_tokens_is_named_by_its_last() -> None:
    value = recorded("sglang", "gen_ids_logprob").response
    value["meta_info"]["finish_reason"] = {"type": "stop", "matched": [30, 2]}
    with replaying(sglang(as_json(value))) as server:
        (choice,) = ask(SGLangBackend, server, generate(PROMPT, SamplingParams(max_tokens=12))).choices
    assert (choice.stop_reason, choice.end_token_id) == (2, 2)


def test_weights_updated_in_the_middle_of_a_choice_show() -> None:
    value = recorded("sglang", "gen_ids_logprob").response
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 8}]
    value["meta_info"]["weight_versions"] = spans
    with replaying(sglang(as_json(value))) as server:
        (choice,) = ask(SGLangBackend, server, generate(PROMPT, SamplingParams(max_tokens=12))).choices
    assert choice.weight_version == "7..8"


def test_the_probe_reads_model_tokenizer_context_and_version() -> None:
    with replaying(sglang()) as server:
        info = ask(SGLangBackend, server, lambda b: b.probe(), probed=False)
    described = recorded("sglang", "get_model_info").response
    assert info == ServerInfo(
        server_type="sglang",
        base_url=server.base_url,
        model=described["served_model_name"],
        tokenizer_name=described["tokenizer_path"],
        context_length=2048,
        version="0.5.23",
        weight_version="default",
        logprobs_mode=LogprobsMode.TEMPERATURE,
        logprobs_mode_source="probed at two temperatures",
    )


@pytest.mark.parametrize(
    "missing",
    [
        ("GET /v1/models",),
        ("GET /server_info",),
        ("GET /model_info",),
        ("GET /v1/models", "GET /model_info"),
        ("GET /v1/models", "GET /server_info"),
    ],
)
def test_an_older_server_that_lacks_some_endpoints_is_probed_all_the_same(missing: tuple[str, ...]) -> None:
    routes = {path: answer for path, answer in sglang().items() if path not in missing}
    with replaying(routes) as server:
        info = ask(SGLangBackend, server, lambda b: b.probe(), probed=False)
    assert info.model == "smollm2"
    assert info.tokenizer_name == recorded("sglang", "get_model_info").response["tokenizer_path"]


def test_the_older_names_of_the_endpoints_are_tried() -> None:
    routes = sglang()
    renamed = {"GET /model_info": "GET /get_model_info", "GET /server_info": "GET /get_server_info"}
    with replaying({renamed.get(path, path): answer for path, answer in routes.items()}) as server:
        info = ask(SGLangBackend, server, lambda b: b.probe(), probed=False)
    assert (info.model, info.version, info.context_length) == ("smollm2", "0.5.23", 2048)


def test_a_server_that_describes_nothing_is_not_sglang() -> None:
    routes = {"GET /v1/models": recorded("vllm", "models").answer}
    with replaying(routes) as server, pytest.raises(ServerContractError, match="neither /model_info nor") as caught:
        ask(SGLangBackend, server, lambda b: b.probe(), probed=False)
    assert "--server-type" in caught.value.report()


def test_settings_that_cannot_be_read_are_not_quoted() -> None:
    routes = {**sglang(), "GET /server_info": as_json({"api_key": "hush", "context_length": "long"})}
    with replaying(routes) as server, pytest.raises(ServerContractError, match="cannot be read") as caught:
        ask(SGLangBackend, server, lambda b: b.probe(), probed=False)
    assert "hush" not in caught.value.report()


@pytest.mark.parametrize(
    ("warm", "mode"),
    [
        ((-0.5, -2.0), LogprobsMode.RAW),
        ((-0.75, -1.5), LogprobsMode.TEMPERATURE),
        ((-0.3868, -1.1368), LogprobsMode.PROCESSED),
    ],
)
def test_the_logprobs_mode_is_learnt_from_two_temperatures(warm: tuple[float, float], mode: LogprobsMode) -> None:
    with replaying(sglang(probes=(probe_answer(-0.5, -2.0), probe_answer(*warm)))) as server:
        assert ask(SGLangBackend, server, lambda b: b.probe(), probed=False).logprobs_mode is mode


def test_a_greedy_reply_is_raw_whatever_the_server_does_to_others() -> None:
    recording = recorded("sglang", "gen_temp05")
    greedy, warm = SamplingParams(max_tokens=3, temperature=0.0), SamplingParams(max_tokens=3, temperature=0.5)
    with replaying(sglang(recording.answer)) as server:

        async def modes(backend: SGLangBackend) -> list[LogprobsMode]:
            backend.limit_vocabulary(VOCABULARY)
            return [(await backend.generate(PROMPT, sampling)).logprobs_mode for sampling in (greedy, warm)]

        assert ask(SGLangBackend, server, modes) == [LogprobsMode.RAW, LogprobsMode.TEMPERATURE]


def test_top_k_of_one_is_sent_as_greedy_so_that_its_logprobs_are_raw() -> None:
    recording = recorded("sglang", "gen_temp2_topk1")
    with replaying(sglang(recording.answer)) as server:
        reply = ask(SGLangBackend, server, generate(PROMPT, sampling_of(recording)))
        assert server.asked("/generate")[-1]["sampling_params"]["temperature"] == 0.0
    assert (reply.sampling.temperature, reply.logprobs_mode) == (0.0, LogprobsMode.RAW)


def test_every_sampling_parameter_is_sent_under_a_name_that_sglang_knows() -> None:
    refusal = recorded("sglang", "gen_err_unknown_sp").response["error"]
    sampling = SamplingParams(
        n=3, max_tokens=6, temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, seed=7, stop=("x",), stop_token_ids=(5,)
    )
    with replaying(sglang(recorded("sglang", "gen_n3").answer)) as server:
        ask(SGLangBackend, server, generate(PROMPT, sampling))
        (*_, sent) = server.asked("/generate")
    assert sent["input_ids"] == PROMPT
    assert sent["return_logprob"] is True
    params = sent["sampling_params"]
    assert all(f"`{name}`" in refusal for name in params)
    expected = {
        "n": 3,
        "max_new_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "sampling_seed": 7,
        "stop": ["x"],
        "stop_token_ids": [5],
    }
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": "unknown field `sampling_seed`, expected one of `max_new_tokens`, `n`"},
        {"error": {"message": "SamplingParams.__init__() got an unexpected keyword argument 'sampling_seed'"}},
    ],
)
def test_a_server_older_than_seeds_is_sent_none_from_then_on(refusal: dict[str, Any]) -> None:
    routes = sglang(recorded("sglang", "gen_n3").answer, probes=(as_json(refusal, 400), *TEMPERATURE))
    with replaying(routes) as server:
        ask(SGLangBackend, server, generate(PROMPT, SamplingParams(n=3, max_tokens=6, seed=7)))
        sent = ["sampling_seed" in body["sampling_params"] for body in server.asked("/generate")]
    assert sent == [True, False, False, False]


def test_choices_of_a_deterministic_server_get_a_seed_each() -> None:
    routes = {
        **sglang(recorded("sglang", "gen_n3").answer),
        "GET /server_info": changed("/server_info", enable_deterministic_inference=True),
    }
    with replaying(routes) as server:
        reply = ask(SGLangBackend, server, generate(PROMPT, SamplingParams(n=3, max_tokens=6, seed=7)))
        (*_, sent) = server.asked("/generate")
    assert sent["input_ids"] == [PROMPT] * 3
    assert [(p["n"], p["sampling_seed"]) for p in sent["sampling_params"]] == [(1, 7), (1, 8), (1, 9)]
    assert len(reply.choices) == 3


def test_a_deterministic_server_without_a_seed_would_repeat_itself() -> None:
    routes = {**sglang(), "GET /server_info": changed("/server_info", enable_deterministic_inference=True)}
    with replaying(routes) as server, pytest.raises(ConfigError, match="every unseeded request the same seed"):
        ask(SGLangBackend, server, generate(PROMPT, SamplingParams(max_tokens=6)))


def test_nothing_is_generated_while_the_vocabulary_is_unknown() -> None:
    with replaying(sglang()) as server:
        with pytest.raises(ConfigError, match="its vocabulary is not known"):
            ask(SGLangBackend, server, lambda b: b.generate(PROMPT, SamplingParams()))
        with pytest.raises(ConfigError, match="its vocabulary is not known"):
            ask(SGLangBackend, server, lambda b: b.prompt_logprobs(PROMPT, 2))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, -4], "the negative id -4"),
        ([1, VOCABULARY], "holds id 49152"),
        ([1] * 2048, "has a context of 2048"),
        ([1] * 2042, "takes fewer than 2042"),
    ],
)
def test_a_prompt_that_would_end_the_server_is_not_sent(ids: list[int], message: str) -> None:
    with replaying(sglang()) as server:
        with pytest.raises(PromptRejected, match=message):
            ask(SGLangBackend, server, generate(ids, SamplingParams()))
        assert len(server.asked("/generate")) == len(TEMPERATURE)


def test_input_and_max_new_tokens_together_fit_the_context() -> None:
    with replaying(sglang(recorded("sglang", "gen_ids_logprob").answer)) as server:
        ask(SGLangBackend, server, generate(PROMPT, SamplingParams(max_tokens=5000)))
        assert server.asked("/generate")[-1]["sampling_params"]["max_new_tokens"] == 2048 - len(PROMPT)


@pytest.mark.parametrize("name", ["gen_ids_logprob_start0_top3", "orig_start0_top"])
def test_recorded_prompt_logprobs_have_one_row_for_every_position(name: str) -> None:
    recording = recorded("sglang", name)
    prompt, top_k = recording.body["input_ids"], recording.body["top_logprobs_num"]

    async def top(backend: SGLangBackend) -> Any:  # Any: PromptLogprobs
        backend.limit_vocabulary(VOCABULARY)
        return await backend.prompt_logprobs(prompt, top_k)

    with replaying(sglang(recording.answer)) as server:
        top_logprobs = ask(SGLangBackend, server, top)
        (*_, sent) = server.asked("/generate")
    assert (sent["logprob_start_len"], sent["top_logprobs_num"]) == (0, top_k)
    rows = recording.response["meta_info"]["input_top_logprobs"]
    assert top_logprobs.prompt_tokens == prompt
    assert top_logprobs.topk_token_ids == [[], *([t[1] for t in row] for row in rows[1:])]
    assert top_logprobs.topk_logprobs == [[], *([t[0] for t in row] for row in rows[1:])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("input_top_logprobs"), "sent no prompt logprobs"),
        (lambda m: m["input_top_logprobs"].pop(), "sent 15 prompt logprobs for 16 tokens"),
        (lambda m: m["input_top_logprobs"][3].pop(), "sent 2 alternatives at prompt position 3, not 3"),
        (lambda m: m["input_top_logprobs"].__setitem__(3, None), "sent 0 alternatives at prompt position 3, not 3"),
        (lambda m: m["input_top_logprobs"].__setitem__(0, [[-1.0, 5, None]]), "1 alternatives at prompt position 0"),
        (lambda m: m["input_top_logprobs"][3][0].__setitem__(0, 0.5), "the logprob 0.5 at prompt position 3"),
        (lambda m: m["input_token_logprobs"].pop(), "of another prompt than the one sent"),
    ],
)
def test_prompt_logprobs_that_lack_something_are_refused(change: Any, message: str) -> None:  # Any: a mutation
    value = recorded("sglang", "gen_ids_logprob_start0_top3").response
    change(value["meta_info"])

    async def top(backend: SGLangBackend) -> None:
        backend.limit_vocabulary(VOCABULARY)
        await backend.prompt_logprobs(PROMPT, 3)

    with replaying(sglang(as_json(value))) as server, pytest.raises(ServerContractError, match=message):
        ask(SGLangBackend, server, top)


@pytest.mark.parametrize("name", ["gen_err_2047", "gen_err_max_new_large", "gen_err_unknown_sp", "gen_err_type"])
def test_a_recorded_refusal_is_told_in_the_servers_words(name: str) -> None:
    recording = recorded("sglang", name)
    with replaying(sglang(recording.answer)) as server, pytest.raises(ServerRefused) as caught:
        ask(SGLangBackend, server, generate(PROMPT, SamplingParams()))
    error = recording.response.get("error", recording.response)
    words = error if isinstance(error, str) else error["message"]
    assert caught.value.status == recording.status == 400
    assert " ".join(words.split())[:100] in caught.value.report()


def test_the_servers_own_ids_of_a_text_can_be_asked_for() -> None:
    routes = {**sglang(), "POST /tokenize": recorded("sglang", "tokenize").answer}
    with replaying(routes) as server:
        ids = ask(SGLangBackend, server, lambda b: b.tokenize("Hello world", add_special_tokens=False))
    assert ids == recorded("sglang", "tokenize").response["tokens"]
