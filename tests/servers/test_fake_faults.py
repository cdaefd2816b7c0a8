"""The fakes are one deterministic model behind five wires, and their faults hit what they say they hit."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.servers.core import is_mutated
from tests.servers.fake_llamacpp import complete_length
from tests.servers.model import Model, Sampling
from tests.servers.mutate import NAMES
from tests.servers.process import REPOSITORY, RunningServer, running_server
from tests.servers.tokenizer import FakeTokenizer, shared_tokenizer_directory

PROMPT = [1, 20, 300, 41]
DEADLINE_SECONDS = 10.0
NO_TLS = False  # nothing here speaks TLS, and reading the certificates takes longer than the request
CONNECTION_LOST = (httpx.ReadError, httpx.RemoteProtocolError)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(FakeTokenizer(shared_tokenizer_directory()))


@pytest.fixture(scope="module")
def sound() -> Iterator[RunningServer]:
    with running_server("vllm") as server:
        yield server


def vllm_request(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 24, "logprobs": 0, "return_token_ids": True, "seed": 5, **changes}


def post(server: RunningServer, path: str, request: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=request, timeout=DEADLINE_SECONDS, verify=NO_TLS)


def get(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=DEADLINE_SECONDS, verify=NO_TLS)


def choices(server: RunningServer, **changes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = post(server, "/v1/completions", vllm_request(**changes)).json()["choices"]
    return found


def gone(process: subprocess.Popen[str]) -> bool:
    """Whether the process ends within the deadline."""
    try:
        process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


# One model.


def test_vllm_logprobs_are_those_of_the_model_for_prompt_and_completion(model: Model) -> None:
    with running_server("vllm") as server:
        (choice,) = choices(server, prompt_logprobs=1)
        assert choice["logprobs"]["token_logprobs"] == model.score(PROMPT, choice["token_ids"])
        prompt = [
            entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
        ]
        assert prompt == model.score(PROMPT[:1], PROMPT[1:])
        whole = PROMPT + choice["token_ids"]
        (scored,) = choices(server, prompt=whole, max_tokens=1, prompt_logprobs=0)
        entries = zip(scored["prompt_logprobs"][len(PROMPT) :], choice["token_ids"], strict=True)
        assert [entry[str(token)]["logprob"] for entry, token in entries] == choice["logprobs"]["token_logprobs"]


def test_equal_requests_get_equal_replies_across_servers_and_different_seeds_do_not() -> None:
    with running_server("vllm") as one, running_server("vllm") as other:
        assert choices(one, n=4) == choices(other, n=4)
        assert len({tuple(choice["token_ids"]) for choice in choices(one, n=4)}) == 4
        assert choices(one, seed=5) != choices(one, seed=6)
        assert choices(one, seed=5, temperature=0) == choices(one, seed=6, temperature=0)


def test_the_record_holds_what_was_asked_and_what_was_answered() -> None:
    with running_server("vllm") as server:
        reply = post(server, "/v1/completions", vllm_request())
        (entry,) = server.records()
        assert (entry["body"], entry["reply"], entry["fault"]) == (vllm_request(), reply.json(), None)
        assert server.stats()["generations"] == 1


def test_text_of_all_kinds_of_endings_occurs(model: Model) -> None:
    sampled = [model.sample([1, number], Sampling(max_tokens=48)) for number in range(400)]
    assert {choice.kind for choice in sampled} == {"eos", "limit"}
    assert any(len(choice.ids or ()) == 1 for choice in sampled)
    assert any(complete_length(choice.data) < len(choice.data) for choice in sampled)
    assert any("😀" in choice.data.decode("utf-8", "replace") for choice in sampled)


def test_llamacpp_has_no_entry_for_tokens_that_end_inside_a_character(model: Model) -> None:
    request = {
        "n_predict": 64,
        "n_probs": 1,
        "return_tokens": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    with running_server("llamacpp") as server:
        replies = [
            post(server, "/completion", request | {"prompt": [1, number], "seed": 3}).json() for number in range(40)
        ]
    gaps = 0
    for number, reply in enumerate(replies):
        shown = [entry["id"] for entry in reply["completion_probabilities"]]
        data, expected = b"", []
        for token in reply["tokens"]:
            data += model.pieces[token]
            if complete_length(data) == len(data):
                expected.append(token)
        assert shown == expected
        scores = dict(zip(reply["tokens"], model.score([1, number], reply["tokens"]), strict=True))
        last = reply["completion_probabilities"][-1]
        assert last["logprob"] == scores[last["id"]]
        gaps += len(reply["tokens"]) - len(shown)
    assert gaps > 0


def test_llamacpp_refuses_more_choices_than_slots_and_seeds_choices_one_apart() -> None:
    request = {"prompt": PROMPT, "n_predict": 12, "return_tokens": True, "temperature": 1.0, "seed": 7}
    with running_server("llamacpp") as server:
        refused = post(server, "/completion", request | {"n": 5})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "Field 'n': Value must be between 1 <= value <= 4, but got 5"
        second = post(server, "/completion", request | {"n": 2}).json()[1]
        alone = post(server, "/completion", request | {"seed": 8}).json()
        assert second["tokens"] == alone["tokens"]
        assert len(post(server, "/completion", request | {"n_predict": 0}).json()["tokens"]) == 1


def test_llamacpp_logit_bias_forces_a_token_and_reports_its_own_logprob(model: Model) -> None:
    request = {"prompt": PROMPT, "n_predict": 1, "n_probs": 5, "return_tokens": True, "logit_bias": [[77, 1e6]]}
    with running_server("llamacpp") as server:
        reply = post(server, "/completion", request).json()
    (entry,) = reply["completion_probabilities"]
    assert reply["tokens"] == [77]
    assert entry["logprob"] == model.score(PROMPT, [77])[0]
    assert len(entry["top_logprobs"]) == 5


@pytest.mark.parametrize("dialect", ["1.10", "0.29"])
def test_trl_marks_filtered_tokens_with_null(dialect: str) -> None:
    request = {"prompts": [PROMPT], "logprobs": 3, "top_k": 1, "max_tokens": 2}
    with running_server("trl", "--dialect", dialect) as server:
        reply = post(server, "/generate/", request).json()
    assert reply["logprobs"] == [[[0.0, None, None]] * len(reply["completion_ids"][0])]


def test_trl_024_takes_text_and_gives_one_logprob_per_token() -> None:
    with running_server("trl", "--dialect", "0.24") as server:
        assert post(server, "/generate/", {"prompts": [PROMPT]}).status_code == 422
        reply = post(server, "/generate/", {"prompts": ["What is it?"]}).json()
    assert reply.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    assert [type(value) for value in reply["logprobs"][0]] == [float] * len(reply["completion_ids"][0])


# Deaths.


@pytest.mark.parametrize("prompt", [[5] * 3000, [1, 999999]], ids=["too long", "unknown id"])
def test_trl_hangs_for_ever_on_a_prompt_that_it_should_refuse(prompt: list[int]) -> None:
    with running_server("trl") as server:
        assert get(server, "/health/").json() == {"status": "ok"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/generate/", json={"prompts": [prompt]}, timeout=0.3, verify=NO_TLS)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(server.url + "/health/", timeout=0.3, verify=NO_TLS)


@pytest.mark.parametrize("body", [{"input_ids": [1, 999999]}, {"input_ids": [1, -3]}, {"text": ""}], ids=str)
def test_sglang_dies_of_bad_input(body: dict[str, Any]) -> None:
    with running_server("sglang") as server:
        with pytest.raises(CONNECTION_LOST):
            post(server, "/generate", body)
        assert gone(server.process)
        with pytest.raises(httpx.ConnectError):
            get(server, "/health")


def test_die_after_answers_so_many_requests_and_no_more() -> None:
    with running_server("vllm", "--die-after", 2) as server:
        assert [len(choices(server)) for _ in range(2)] == [1, 1]
        with pytest.raises(CONNECTION_LOST):
            choices(server)
        assert gone(server.process)
        assert [entry["fault"] for entry in server.records()] == [None, None, "die"]


def test_a_fake_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os; from tests.servers.process import running_server\n"
        "with running_server('vllm') as server: print(server.process.pid, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    starter = [sys.executable, "-c", program]
    done = subprocess.run(starter, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    with contextlib.suppress(psutil.NoSuchProcess):  # gone before anybody looked
        psutil.Process(int(done.stdout)).wait(DEADLINE_SECONDS)


# Faults.


def test_every_kth_request_fails_or_is_dropped() -> None:
    with running_server("vllm", "--fail-every", 3, 503, "--retry-after", 7, "--drop-every", 2) as server:
        statuses: list[int | str] = []
        for _ in range(6):
            try:
                reply = post(server, "/v1/completions", vllm_request())
            except CONNECTION_LOST:
                statuses.append("dropped")
            else:
                statuses.append(reply.status_code)
                assert reply.headers.get("Retry-After") == ("7" if reply.status_code == 503 else None)
        assert statuses == [200, "dropped", 503, "dropped", 200, "dropped"]
        assert server.stats()["faults"] == {"drop": 3, "fail:503": 1}


def test_a_loading_server_says_so_and_then_serves() -> None:
    with running_server("llamacpp", "--loading-seconds", 1) as server:
        reply = get(server, "/health")
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "Loading model")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while get(server, "/health").status_code == 503:
            assert time.monotonic() < deadline


def test_a_refusing_server_is_not_there_at_first() -> None:
    with running_server("vllm", "--refuse-seconds", 1) as server:
        with pytest.raises(httpx.ConnectError):
            get(server, "/health")
        transport = httpx.HTTPTransport(retries=5)  # half a second, a second and so on between them
        with httpx.Client(transport=transport) as client:
            assert client.get(server.url + "/health").status_code == 200


def test_garbage_is_html_on_every_route() -> None:
    with running_server("vllm", "--garbage") as server:
        for path in ("/health", "/v1/models", "/nowhere"):
            assert get(server, path).text.startswith("<html>")


def broken(reply: httpx.Response, whole: dict[str, Any]) -> str:
    """How a reply to a request for two choices differs from the one of a sound server."""
    try:
        body = reply.json()
    except json.JSONDecodeError:
        return "truncated_json"
    if len(body["choices"]) != 2:
        return "too_few_choices" if len(body["choices"]) < 2 else "too_many_choices"
    ours, sound = body["choices"][1], whole["choices"][1]
    if ours["prompt_token_ids"] != sound["prompt_token_ids"]:
        return "wrong_prompt_echo"
    if ours["token_ids"] is None:
        return "missing_token_ids"
    if ours["logprobs"] is None:
        return "missing_logprobs"
    if ours["finish_reason"] != sound["finish_reason"]:
        return "null_finish_reason" if ours["finish_reason"] is None else "abort_finish"
    ours, sound = ours["logprobs"]["token_logprobs"], sound["logprobs"]["token_logprobs"]
    if len(ours) != len(sound):
        return "short_logprobs" if len(ours) < len(sound) else "long_logprobs"
    (value,) = [one for one, other in zip(ours, sound, strict=True) if one != other]
    names = {"None": "null_logprob", "nan": "nan_logprob", "0.5": "positive_logprob", "-9999.0": "minus_9999"}
    return names.get(str(value), "float32_min")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "wrong_tokenizer"])
def test_a_breach_is_the_one_asked_for_and_hits_the_prompts_that_it_should(sound: RunningServer, name: str) -> None:
    prompts = [[1, number, 7] for number in range(3, 9)]
    with running_server("vllm", "--mutate", name, "--mutate-fraction", 0.5) as server:
        hit = []
        for prompt in prompts:
            whole = post(sound, "/v1/completions", vllm_request(prompt=prompt, n=2)).json()
            reply = post(server, "/v1/completions", vllm_request(prompt=prompt, n=2))
            if not _same(reply, whole):
                hit.append(prompt)
                assert broken(reply, whole) == name
        assert hit == [prompt for prompt in prompts if is_mutated(prompt, 0.5)]
        assert len(hit) == sum(entry["fault"] is not None for entry in server.records())
        assert 0 < len(hit) < len(prompts)


def _same(reply: httpx.Response, whole: dict[str, Any]) -> bool:
    try:
        return bool(reply.json()["choices"] == whole["choices"])
    except json.JSONDecodeError:
        return False


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_wrong_tokenizer_shifts_ids(kind: str) -> None:
    with running_server(kind) as sound, running_server(kind, "--mutate", "wrong_tokenizer") as server:
        right = post(sound, "/tokenize", {"prompt": "Hello"}).json()["tokens"]
        wrong = post(server, "/tokenize", {"prompt": "Hello"}).json()["tokens"]
    assert wrong == [token + 1 for token in right]


def test_generation_config_fills_what_a_request_leaves_unset() -> None:
    with running_server("vllm", "--generation-config", '{"top_k": 1}') as server:
        left, sent = choices(server, n=3), choices(server, n=3, top_k=-1)
    assert len({tuple(choice["token_ids"]) for choice in left}) == 1
    assert len({tuple(choice["token_ids"]) for choice in sent}) == 3


def test_tokens_per_reply_is_exact() -> None:
    with running_server("vllm", "--tokens-per-reply", 9) as server:
        (whole,), (cut,) = choices(server), choices(server, max_tokens=5)
    assert (len(whole["token_ids"]), whole["finish_reason"]) == (9, "stop")
    assert (len(cut["token_ids"]), cut["finish_reason"]) == (5, "length")


def test_openai_endpoints_know_no_token_ids() -> None:
    request = {"model": "gpt-fake", "messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True}
    with running_server("openai", "--tokens-per-reply", 8) as server:
        text = post(server, "/v1/chat/completions", request).text
        assert get(server, "/v1/models").json()["data"][0]["id"] == "gpt-fake"
    assert "token_id" not in text
    assert [len(choice["logprobs"]["content"]) for choice in json.loads(text)["choices"]] == [7, 7]
