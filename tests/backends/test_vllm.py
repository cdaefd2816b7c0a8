import msgspec
import pytest

from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import PromptRejected, ServerContractError, ServerRefused
from managed_cli.types import LogprobsMode, SamplingParams
from tests.backends.replay import Answer, Recording, all_recorded, as_json, ask, recorded, replaying

COMPLETIONS = "POST /v1/completions"
PROMPT = recorded("vllm", "cmpl_n4").body["prompt"]


def probe_answer(*top: float) -> Answer:
    ranked = {f"token_id:{i}": value for i, value in enumerate(top)}
    logprobs = {"token_logprobs": [top[0]], "top_logprobs": [ranked]}
    return as_json({"choices": [{"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}]})


RAW = (probe_answer(-0.5, -2.0), probe_answer(-0.5, -2.0))


def vllm(*completions: Answer, probes: tuple[Answer, ...] = RAW) -> dict[str, list[Answer]]:
    return {
        "GET /v1/models": [recorded("vllm", "models").answer],
        "GET /version": [recorded("vllm", "version").answer],
        COMPLETIONS: [*probes, *completions],
    }


def as_of_the_listed_model(recording: Recording) -> Answer:
    """The recorded reply under the name that `vllm` lists; the recordings are of several servers."""
    return as_json({**recording.response, "model": recorded("vllm", "models").response["data"][0]["id"]})


def sampling_of(recording: Recording) -> SamplingParams:
    body = recording.body
    return SamplingParams(n=body.get("n", 1), max_tokens=int(body.get("max_tokens") or 16))


def whole(recording: Recording) -> bool:
    """Whether the reply was asked for everything that this client asks for."""
    body = recording.body
    return (
        isinstance(body["prompt"], list)
        and isinstance(body["prompt"][0], int)
        and body.get("return_token_ids") is True
        and body.get("logprobs") is not None
        and not body.get("echo")
        and all(value > -9998 for c in recording.response["choices"] for value in c["logprobs"]["token_logprobs"])
    )


RECORDINGS = all_recorded("vllm", "/v1/completions") + all_recorded("trl116", "/v1/completions")
WHOLE = [r for r in RECORDINGS if whole(r)]


def test_there_are_recordings_to_replay() -> None:
    assert len(WHOLE) >= 15


@pytest.mark.parametrize("recording", WHOLE, ids=lambda r: r.name)
def test_every_recorded_reply_becomes_its_choices(recording: Recording) -> None:
    with replaying(vllm(as_of_the_listed_model(recording))) as server:
        reply = ask(VLLMBackend, server, lambda b: b.generate(recording.body["prompt"], sampling_of(recording)))
    choices = recording.response["choices"]
    assert [list(g.token_ids) for g in reply.choices] == [c["token_ids"] for c in choices]
    assert [list(g.logprobs) for g in reply.choices] == [c["logprobs"]["token_logprobs"] for c in choices]
    assert [g.text for g in reply.choices] == [c["text"] for c in choices]
    assert [g.finish_reason for g in reply.choices] == [c["finish_reason"] for c in choices]
    assert [g.stop_reason for g in reply.choices] == [c["stop_reason"] for c in choices]
    assert reply.attempts == 1


@pytest.mark.parametrize("recording", [r for r in RECORDINGS if not whole(r)], ids=lambda r: r.name)
def test_a_recorded_reply_that_lacks_something_is_refused(recording: Recording) -> None:
    prompt = recording.body["prompt"]
    ids = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else PROMPT
    answer = as_of_the_listed_model(recording)
    with replaying(vllm(answer)) as server, pytest.raises(ServerContractError, match="vllm at http"):
        ask(VLLMBackend, server, lambda b: b.generate(ids, sampling_of(recording)))


def test_the_probe_reads_model_context_and_version() -> None:
    with replaying(vllm()) as server:
        info = ask(VLLMBackend, server, lambda b: b.probe(), probed=False)
    model = recorded("vllm", "models").response["data"][0]
    assert (info.model, info.context_length) == (model["id"], model["max_model_len"])
    assert info.tokenizer_name == model["root"]
    assert info.version == recorded("vllm", "version").response["version"]


@pytest.mark.parametrize(
    ("warm", "mode"),
    [
        ((-0.5, -2.0), LogprobsMode.RAW),
        ((-0.75, -1.5), LogprobsMode.TEMPERATURE),
        ((-0.3868, -1.1368), LogprobsMode.PROCESSED),
    ],
)
def test_the_logprobs_mode_is_learnt_from_two_temperatures(warm: tuple[float, float], mode: LogprobsMode) -> None:
    with replaying(vllm(probes=(probe_answer(-0.5, -2.0), probe_answer(*warm)))) as server:
        info = ask(VLLMBackend, server, lambda b: b.probe(), probed=False)
    assert (info.logprobs_mode, info.logprobs_mode_source) == (mode, "probed at two temperatures")


def test_a_server_that_refuses_the_probe_has_an_unknown_mode() -> None:
    with replaying(vllm(probes=(as_json({"error": {"message": "no logprobs here"}}, 400),))) as server:
        info = ask(VLLMBackend, server, lambda b: b.probe(), probed=False)
    assert info.logprobs_mode is LogprobsMode.UNKNOWN


def test_every_sampling_parameter_is_sent() -> None:
    sampling = SamplingParams(n=4, max_tokens=12, temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, seed=7, stop=("x",))
    with replaying(vllm(recorded("vllm", "cmpl_n4").answer)) as server:
        ask(VLLMBackend, server, lambda b: b.generate(PROMPT, sampling))
        (*_, sent) = server.asked("/v1/completions")
    for name, value in msgspec.structs.asdict(sampling).items():
        assert sent[name] == (list(value) if isinstance(value, tuple) else value), name
    assert sent["prompt"] == PROMPT
    assert sent["logprobs"] == 0
    assert sent["return_token_ids"] is True


def test_max_tokens_is_cut_to_the_room_behind_the_prompt() -> None:
    with replaying(vllm(recorded("vllm", "cmpl_ids_logprobs0").answer)) as server:
        reply = ask(VLLMBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=5000)))
        assert server.asked("/v1/completions")[-1]["max_tokens"] == 2048 - len(PROMPT)
    assert reply.sampling.max_tokens == 2048 - len(PROMPT)


def test_a_configured_context_length_below_the_servers_holds() -> None:
    with replaying(vllm(recorded("vllm", "cmpl_ids_logprobs0").answer)) as server:
        ask(VLLMBackend, server, lambda b: b.generate(PROMPT, SamplingParams(max_tokens=500)), context_length=100)
        assert server.asked("/v1/completions")[-1]["max_tokens"] == 100 - len(PROMPT)


def test_the_end_of_turn_token_is_named_and_a_stop_string_is_not_one() -> None:
    eos, stopped = recorded("vllm", "cmpl_ids_logprobs0"), recorded("vllm", "cmpl_stop_string")
    with replaying(vllm(eos.answer, stopped.answer)) as server:

        async def both(backend: VLLMBackend) -> list[int | None]:
            replies = [await backend.generate(PROMPT, SamplingParams(max_tokens=12)) for _ in range(2)]
            return [reply.choices[0].end_token_id for reply in replies]

        assert ask(VLLMBackend, server, both) == [2, None]


def test_choices_are_put_into_their_order() -> None:
    recording = recorded("vllm", "cmpl_n4")
    shuffled = {**recording.response, "choices": recording.response["choices"][::-1]}
    with replaying(vllm(as_json(shuffled))) as server:
        reply = ask(VLLMBackend, server, lambda b: b.generate(PROMPT, SamplingParams(n=4)))
    assert [list(g.token_ids) for g in reply.choices] == [c["token_ids"] for c in recording.response["choices"]]


@pytest.mark.parametrize("name", ["cmpl_prompt_logprobs5_tokids", "x_prompt_logprobs_n2"])
def test_recorded_prompt_logprobs_have_one_row_for_every_position(name: str) -> None:
    recording = recorded("vllm", name)
    choice = recording.response["choices"][0]
    prompt, top_k = recording.body["prompt"], recording.body["prompt_logprobs"]
    with replaying(vllm(as_json({"choices": [choice]}))) as server:
        top = ask(VLLMBackend, server, lambda b: b.prompt_logprobs(prompt, top_k))
    assert top.prompt_tokens == prompt
    assert top.topk_token_ids[0] == top.topk_logprobs[0] == []
    for position, entry in list(enumerate(choice["prompt_logprobs"]))[1:]:
        assert len(top.topk_token_ids[position]) == len(top.topk_logprobs[position]) == top_k
        for token, logprob in zip(top.topk_token_ids[position], top.topk_logprobs[position], strict=True):
            assert entry[str(token)]["logprob"] == logprob
        assert top.topk_logprobs[position] == sorted(top.topk_logprobs[position], reverse=True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, -4], "the negative id -4"),
        ([1, 49152], "holds id 49152, but vllm at .* has a vocabulary of 49152"),
        ([1] * 2048, "the prompt has 2048 tokens, but vllm at .* has a context of 2048"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_not_sent(ids: list[int], message: str) -> None:
    async def generate(backend: VLLMBackend) -> None:
        backend.limit_vocabulary(49152)
        with pytest.raises(PromptRejected, match=message):
            await backend.generate(ids, SamplingParams())

    with replaying(vllm(recorded("vllm", "cmpl_n4").answer)) as server:
        ask(VLLMBackend, server, generate)
        assert len(server.asked("/v1/completions")) == len(RAW)


@pytest.mark.parametrize(
    "name", ["err_prompt_too_long", "err_invalid_token", "err_n2_greedy", "err_unknown_model", "cmpl_logprobs21"]
)
def test_a_recorded_refusal_is_told_in_the_servers_words(name: str) -> None:
    recording = recorded("vllm", name)
    with replaying(vllm(recording.answer)) as server, pytest.raises(ServerRefused) as caught:
        ask(VLLMBackend, server, lambda b: b.generate(PROMPT, SamplingParams()))
    assert caught.value.status == recording.status
    assert recording.response["error"]["message"].split("\n")[0][:100] in caught.value.report()


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with replaying(vllm()) as server, pytest.raises(ServerRefused, match="does not serve the model 'llama'") as caught:
        ask(VLLMBackend, server, lambda b: b.probe(), probed=False, model="llama")
    assert recorded("vllm", "models").response["data"][0]["id"] in caught.value.report()


def test_the_servers_own_ids_of_a_text_can_be_asked_for() -> None:
    recording = recorded("vllm", "tokenize_prompt")
    routes = {**vllm(), "POST /tokenize": [recording.answer]}
    with replaying(routes) as server:
        ids = ask(VLLMBackend, server, lambda b: b.tokenize("Hello", add_special_tokens=False))
        assert server.asked("/tokenize")[0]["add_special_tokens"] is False
    assert ids == recording.response["tokens"]


def test_a_server_without_tokenize_has_no_ids_to_compare() -> None:
    with replaying(vllm()) as server:
        assert ask(VLLMBackend, server, lambda b: b.tokenize("Hello", add_special_tokens=False)) is None
