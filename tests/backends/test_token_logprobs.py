"""`Backend.token_logprobs`: one logprob for every id but the first, from recorded replies, or none at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.backends.openai import OpenAIBackend
from managed_cli.backends.sglang import SGLangBackend
from managed_cli.backends.trl import TRLBackend
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import ServerContractError
from tests.backends.replay import as_json, ask, recorded, replaying
from tests.backends.test_sglang import sglang
from tests.backends.test_trl import own_server
from tests.backends.test_vllm import vllm

VOCABULARY, EOS = 49152, 2

Change = Callable[[Any], object]  # Any: a reply's JSON


def scored(ids: list[int]) -> Any:  # Any: an action for `ask`
    async def action(backend: Any) -> list[float]:  # Any: a backend of any kind
        backend.limit_vocabulary(VOCABULARY)
        backend.know_end_tokens([EOS])
        return await backend.token_logprobs(ids)

    return action


def vllm_reply() -> tuple[list[int], Any]:  # Any: JSON
    recording = recorded("vllm", "cmpl_prompt_logprobs5_tokids")
    return recording.body["prompt"], {"choices": [copy.deepcopy(recording.response["choices"][0])]}


def sglang_reply() -> tuple[list[int], Any]:  # Any: JSON
    recording = recorded("sglang", "gen_ids_logprob_start0_top3")
    return recording.body["input_ids"], copy.deepcopy(recording.response)


def trl_reply() -> tuple[list[int], Any]:  # Any: JSON
    """Behind the ranks stands the prompt's own token, where it is not one of them."""
    return [1, 504, 3575], {"logprobs": [[[-0.1, -9.0], [-0.3]]], "logprob_token_ids": [[[7, 504], [3575]]]}


def test_vllm_gives_the_entry_of_the_prompts_own_id_whatever_its_rank() -> None:
    ids, value = vllm_reply()
    with replaying(vllm(as_json(value))) as server:
        found = ask(VLLMBackend, server, scored(ids))
        sent = server.asked("/v1/completions")[-1]
    assert (sent["prompt"], sent["prompt_logprobs"], sent["max_tokens"]) == (ids, 0, 1)
    entries = value["choices"][0]["prompt_logprobs"]
    assert found == [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]
    assert any(entry[str(token)]["rank"] > 5 for token, entry in zip(ids[1:], entries[1:], strict=True))


def test_sglang_gives_the_logprobs_of_the_input_tokens() -> None:
    ids, value = sglang_reply()
    with replaying(sglang(as_json(value))) as server:
        found = ask(SGLangBackend, server, scored(ids))
        sent = server.asked("/generate")[-1]
    assert (sent["logprob_start_len"], sent["top_logprobs_num"]) == (0, 0)
    assert sent["sampling_params"]["max_new_tokens"] == 0
    assert found == [logprob for logprob, _, _ in value["meta_info"]["input_token_logprobs"][1:]]


def test_trl_gives_the_entry_of_the_sequences_own_id() -> None:
    ids, value = trl_reply()
    with replaying({**own_server(), "POST /get_sequence_logprobs/": as_json(value)}) as server:
        assert ask(TRLBackend, server, scored(ids), context_length=2048) == [-9.0, -0.3]


def entries_of(value: Any) -> Any:  # Any: JSON
    return value["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: entries_of(v).pop(), "prompt logprobs for"),
        (lambda v: entries_of(v).append(entries_of(v)[-1]), "prompt logprobs for"),
        (lambda v: entries_of(v).__setitem__(2, None), "no logprob of the prompt's own id"),
        (lambda v: entries_of(v).__setitem__(2, {"1": {"logprob": -1.0, "rank": 1}}), "of the prompt's own id"),
        (lambda v: [e.update(logprob=0.5) for e in entries_of(v)[2].values()], "the logprob 0.5 for the token at"),
        (lambda v: v["choices"][0].pop("prompt_logprobs"), "sent no prompt logprobs"),
    ],
)
def test_a_vllm_that_leaves_something_out_is_refused(change: Change, message: str) -> None:
    ids, value = vllm_reply()
    change(value)
    with replaying(vllm(as_json(value))) as server, pytest.raises(ServerContractError, match=message):
        ask(VLLMBackend, server, scored(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("input_token_logprobs"), "sent no prompt logprobs"),
        (lambda m: m["input_token_logprobs"].pop(), "of another prompt than the one sent"),
        (lambda m: m["input_token_logprobs"][3].__setitem__(1, 5), "of another prompt than the one sent"),
        (lambda m: m["input_token_logprobs"][3].__setitem__(0, 0.5), "the logprob 0.5 for the token at position 3"),
    ],
)
def test_an_sglang_that_leaves_something_out_is_refused(change: Change, message: str) -> None:
    ids, value = sglang_reply()
    change(value["meta_info"])
    with replaying(sglang(as_json(value))) as server, pytest.raises(ServerContractError, match=message):
        ask(SGLangBackend, server, scored(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: [v[name][0].pop() for name in v], "for 1 positions, not for the 2 behind the first"),
        (lambda v: v["logprob_token_ids"][0].__setitem__(0, [7, 8]), "no logprob of the prompt's own id 504"),
        (lambda v: v["logprobs"][0].__setitem__(1, [0.5]), "the logprob 0.5 for the token at position 2"),
    ],
)
def test_a_trl_that_leaves_something_out_is_refused(change: Change, message: str) -> None:
    ids, value = trl_reply()
    change(value)
    routes = {**own_server(), "POST /get_sequence_logprobs/": as_json(value)}
    with replaying(routes) as server, pytest.raises(ServerContractError, match=message):
        ask(TRLBackend, server, scored(ids), context_length=2048)


def test_minus_infinity_in_any_spelling_is_minus_infinity() -> None:
    ids, value = trl_reply()
    value["logprobs"][0] = [[-0.1, None], [-9999.0]]
    with replaying({**own_server(), "POST /get_sequence_logprobs/": as_json(value)}) as server:
        found = ask(TRLBackend, server, scored(ids), context_length=2048)
    assert found == [float("-inf")] * 2


@pytest.mark.parametrize("backend", [LlamaCppBackend, OpenAIBackend])
def test_servers_that_cannot_say_so_and_name_a_way_out(backend: Any) -> None:  # Any: a class of backends
    with replaying({}) as server, pytest.raises(NotImplementedError, match="--server-type transformers"):
        ask(backend, server, lambda b: b.token_logprobs([1, 2]), probed=False)
