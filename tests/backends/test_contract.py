"""Each way in which a reply can break the contract, on each server: it fails loudly, and nothing of it is data."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from managed_cli.backends.base import Backend
from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.backends.sglang import SGLangBackend
from managed_cli.backends.trl import TRLBackend
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import ServerContractError
from managed_cli.types import GenerationReply, SamplingParams
from tests.backends import test_llamacpp, test_sglang, test_trl, test_vllm
from tests.backends.replay import Answer, ask, recorded, replaying

VOCABULARY = 49152
EOS = 2
Json = Any  # a reply decoded from JSON, to be changed


@dataclasses.dataclass(frozen=True)
class Kind:
    """One server: a healthy reply, and how its ids and logprobs are reached in it."""

    backend: type[Backend]
    routes: Callable[..., Any]
    prompt: list[int]
    reply: Json
    n: int
    ids: Callable[[Json], list[int]]
    set_logprob: Callable[[Json, int, object], None]
    add_logprob: Callable[[Json], None]
    drop_logprob: Callable[[Json], None] | None = None


def sglang_triples(reply: Json) -> Json:
    return reply[1]["meta_info"]["output_token_logprobs"]


def vllm_logprobs(reply: Json) -> Json:
    return reply["choices"][1]["logprobs"]["token_logprobs"]


KINDS = {
    "vllm": Kind(
        backend=VLLMBackend,
        routes=test_vllm.vllm,
        prompt=test_vllm.PROMPT,
        reply=recorded("vllm", "cmpl_n4").response,
        n=4,
        ids=lambda reply: reply["choices"][1]["token_ids"],
        set_logprob=lambda reply, i, value: vllm_logprobs(reply).__setitem__(i, value),
        drop_logprob=lambda reply: vllm_logprobs(reply).pop(),
        add_logprob=lambda reply: vllm_logprobs(reply).append(-0.5),
    ),
    "sglang": Kind(
        backend=SGLangBackend,
        routes=test_sglang.sglang,
        prompt=test_sglang.PROMPT,
        reply=recorded("sglang", "gen_n3").response,
        n=3,
        ids=lambda reply: reply[1]["output_ids"],
        set_logprob=lambda reply, i, value: sglang_triples(reply)[i].__setitem__(0, value),
        drop_logprob=lambda reply: sglang_triples(reply).pop(),
        add_logprob=lambda reply: sglang_triples(reply).append([-0.5, 7, None]),
    ),
    "trl": Kind(
        backend=TRLBackend,
        routes=test_trl.own_server,
        prompt=test_trl.PROMPT,
        reply={**recorded("trl", "gen_sequence_override_n").response},
        n=3,
        ids=lambda reply: reply["completion_ids"][1],
        set_logprob=lambda reply, i, value: reply["logprobs"][1][i].__setitem__(0, value),
        drop_logprob=lambda reply: reply["logprobs"][1].pop(),
        add_logprob=lambda reply: reply["logprobs"][1].append([-0.5]),
    ),
    "llamacpp": Kind(
        backend=LlamaCppBackend,
        routes=test_llamacpp.llamacpp,
        prompt=test_llamacpp.PROMPT,
        reply=[test_llamacpp.with_logprobs(c) for c in recorded("llamacpp", "completion_n2").response],
        n=2,
        ids=lambda reply: reply[1]["tokens"],
        set_logprob=lambda reply, i, value: reply[1]["completion_probabilities"][i].__setitem__("logprob", value),
        add_logprob=lambda reply: reply[1]["completion_probabilities"].append({"id": 7, "logprob": -0.5}),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def replied(kind: Kind, reply: Json, *, n: int | None = None, **config: Any) -> GenerationReply:
    """What the backend makes of `reply`; NaN and Infinity go out as Python's `json` writes them."""
    return replied_bytes(kind, json.dumps(reply).encode(), n=n, **config)


def replied_bytes(kind: Kind, body: bytes, *, n: int | None = None, **config: Any) -> GenerationReply:
    async def generate(backend: Backend) -> GenerationReply:
        backend.limit_vocabulary(VOCABULARY)
        backend.know_end_tokens([EOS])
        longest = max((len(kind.ids(kind.reply)), 1))
        return await backend.generate(kind.prompt, SamplingParams(n=n or kind.n, max_tokens=longest))

    with replaying(kind.routes(Answer(body))) as server:
        return ask(kind.backend, server, generate, **{"context_length": 1024, **config})


def changed(kind: Kind, change: Callable[[Json], object]) -> Json:
    reply = copy.deepcopy(kind.reply)
    change(reply)
    return reply


@each_kind
def test_the_healthy_reply_is_taken(kind: Kind) -> None:
    reply = replied(kind, kind.reply)
    assert len(reply.choices) == kind.n
    assert list(reply.choices[1].token_ids) == kind.ids(kind.reply)


@pytest.mark.parametrize("name", ["vllm", "sglang", "trl"])
def test_a_logprob_too_few_is_refused(name: str) -> None:
    kind = KINDS[name]
    assert kind.drop_logprob is not None  # llama.cpp is asked again for what is missing
    count = len(kind.ids(kind.reply))
    message = rf"^{name} at http://127\.0\.0\.1:\d+ sent {count - 1} logprobs for {count} tokens in choice 1$"
    with pytest.raises(ServerContractError, match=message):
        replied(kind, changed(kind, kind.drop_logprob))


@each_kind
def test_a_logprob_too_many_is_refused(kind: Kind) -> None:
    count = len(kind.ids(kind.reply))
    message = rf"sent {count + 1} logprobs for {count} tokens in choice 1$|logprobs of other tokens than the ones"
    with pytest.raises(ServerContractError, match=message):
        replied(kind, changed(kind, kind.add_logprob))


@each_kind
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_a_literal_that_json_has_not_is_refused(kind: Kind, literal: str) -> None:
    reply = changed(kind, lambda r: kind.set_logprob(r, 1, float(literal.replace("Infinity", "inf"))))
    with pytest.raises(ServerContractError, match=r"that cannot be read: .*JSON is malformed"):
        replied(kind, reply)


@each_kind
@pytest.mark.parametrize("value", [0.5, 1e-5, 1e308])
def test_a_logprob_above_zero_is_refused(kind: Kind, value: float) -> None:
    reply = changed(kind, lambda r: kind.set_logprob(r, 1, value))
    message = f"sent the logprob {re.escape(str(value))} at token 1 of choice 1; it must be 0 or less"
    with pytest.raises(ServerContractError, match=message):
        replied(kind, reply)


@each_kind
@pytest.mark.parametrize("value", [0.0, -0.0, 5e-7, -9997.0])
def test_a_logprob_of_zero_within_rounding_and_a_very_small_one_are_data(kind: Kind, value: float) -> None:
    reply = replied(kind, changed(kind, lambda r: kind.set_logprob(r, 1, value)))
    assert reply.choices[1].logprobs[1] == value


@each_kind
@pytest.mark.parametrize("value", [None, -9999.0, -3.4028234663852886e38], ids=["null", "-9999", "-3.4e38"])
def test_minus_infinity_in_any_spelling_fails_the_sample(kind: Kind, value: float | None) -> None:
    with pytest.raises(ServerContractError, match="sent a logprob of -inf at token 1 of choice 1") as caught:
        replied(kind, changed(kind, lambda r: kind.set_logprob(r, 1, value)))
    assert "--nonfinite keep" in caught.value.report()


@each_kind
@pytest.mark.parametrize("value", [None, -9999.0, -3.4028234663852886e38], ids=["null", "-9999", "-3.4e38"])
def test_minus_infinity_is_kept_where_that_was_asked_for(kind: Kind, value: float | None) -> None:
    reply = replied(kind, changed(kind, lambda r: kind.set_logprob(r, 1, value)), keep_nonfinite=True)
    assert reply.choices[1].logprobs[1] == -math.inf
    assert all(math.isfinite(logprob) for logprob in reply.choices[0].logprobs)


@each_kind
@pytest.mark.parametrize("value", [0.5, 1e-5])
def test_a_logprob_above_zero_is_refused_even_where_minus_infinity_is_kept(kind: Kind, value: float) -> None:
    with pytest.raises(ServerContractError, match="it must be 0 or less"):
        replied(kind, changed(kind, lambda r: kind.set_logprob(r, 1, value)), keep_nonfinite=True)


@each_kind
def test_fewer_choices_than_asked_for_are_refused(kind: Kind) -> None:
    if kind.backend is TRLBackend:
        reply = changed(kind, lambda r: [r[key].pop() for key in ("completion_ids", "logprobs", "logprob_token_ids")])
    else:
        reply = changed(kind, lambda r: (r["choices"] if isinstance(r, dict) else r).pop())
    with pytest.raises(ServerContractError, match=f"sent {kind.n - 1} choices for n={kind.n}"):
        replied(kind, reply)


@pytest.mark.parametrize("name", ["vllm", "sglang", "trl"])
def test_more_choices_than_asked_for_are_refused(name: str) -> None:
    kind = KINDS[name]
    with pytest.raises(ServerContractError, match=f"sent {kind.n} choices for n={kind.n - 1}"):
        replied(kind, kind.reply, n=kind.n - 1)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
@pytest.mark.parametrize("name", ["vllm", "sglang", "trl"])
def test_a_sampled_id_outside_the_vocabulary_is_refused(name: str, token: int) -> None:
    kind = KINDS[name]

    def put(reply: Json) -> None:
        kind.ids(reply)[0] = token
        if name == "sglang":
            sglang_triples(reply)[0][1] = token
        if name == "trl":
            reply["logprob_token_ids"][1][0] = [token]

    with pytest.raises(ServerContractError, match="sent an id outside its vocabulary in choice 1"):
        replied(kind, changed(kind, put))


BREACHES: list[tuple[str, str, Callable[[Json], object], str]] = [
    ("vllm", "no ids", lambda r: r["choices"][1].pop("token_ids"), "sent no token ids"),
    ("vllm", "null ids", lambda r: r["choices"][1].update(token_ids=None), "sent no token ids"),
    ("vllm", "no echo", lambda r: r["choices"][1].pop("prompt_token_ids"), "sent no token ids"),
    ("vllm", "no logprobs", lambda r: r["choices"][1].update(logprobs=None), "sent no logprobs for choice 1"),
    ("vllm", "no reason", lambda r: r["choices"][1].update(finish_reason=None), "sent no finish reason for choice 1"),
    ("vllm", "wrong echo", lambda r: r["choices"][1]["prompt_token_ids"].__setitem__(3, 9), "difference at position 3"),
    ("vllm", "short echo", lambda r: r["choices"][1]["prompt_token_ids"].pop(), "15 ids for 16"),
    ("vllm", "same index", lambda r: r["choices"][1].update(index=0), r"numbered its choices \[0, 0, 2, 3\]"),
    ("vllm", "ids as text", lambda r: r["choices"][1].update(token_ids=["a"]), r"cannot be read.*token_ids"),
    ("sglang", "no ids", lambda r: r[1].pop("output_ids"), "sent no token ids for choice 1"),
    ("sglang", "no logprobs", lambda r: r[1]["meta_info"].pop("output_token_logprobs"), "no logprobs for choice 1"),
    ("sglang", "no reason", lambda r: r[1]["meta_info"].update(finish_reason=None), "no finish reason for choice 1"),
    (
        "sglang",
        "strange reason",
        lambda r: r[1]["meta_info"].update(finish_reason={"type": "paused"}),
        "ended choice 1 with the unknown reason 'paused'",
    ),
    (
        "sglang",
        "aborted",
        lambda r: r[1]["meta_info"].update(finish_reason={"type": "abort", "message": "Aborted"}),
        "aborted choice 1 after 6 tokens: Aborted",
    ),
    ("sglang", "other ids", lambda r: sglang_triples(r)[2].__setitem__(1, 9), "other tokens .* in choice 1"),
    ("sglang", "wrong count", lambda r: r[1]["meta_info"].update(prompt_tokens=15), "worked on 15 prompt tokens"),
    ("sglang", "wrong echo", lambda r: r[1].update(prompt_token_ids=[1] * 16), "first difference at position 1"),
    ("trl", "no logprobs", lambda r: r.update(logprobs=None), "sent logprobs of 0 choices for 3"),
    ("trl", "no echo", lambda r: r.pop("prompt_ids"), "did not say which prompt ids it used"),
    ("trl", "wrong echo", lambda r: r["prompt_ids"][0].__setitem__(3, 9), "first difference at position 3"),
    ("trl", "no ids", lambda r: r.pop("completion_ids"), "cannot be read.*completion_ids"),
    ("trl", "empty choice", lambda r: r["completion_ids"][1].clear(), "sent no token ids for choice 1"),
    ("trl", "other ids", lambda r: r["logprob_token_ids"][1].__setitem__(0, [9]), "no logprob of the sampled id"),
    ("trl", "ids unnamed", lambda r: r.update(logprob_token_ids=None), "no logprob of the sampled id"),
    ("llamacpp", "no ids", lambda r: r[1].pop("tokens"), "cannot be read.*tokens"),
    ("llamacpp", "empty ids", lambda r: r[1].update(tokens=[]), "logprobs of other tokens"),
    ("llamacpp", "other ids", lambda r: r[1]["tokens"].__setitem__(0, 9), "logprobs of other tokens"),
    ("llamacpp", "no reason", lambda r: r[1].update(stop_type="none"), "the unknown reason 'none'"),
    ("llamacpp", "null reason", lambda r: r[1].update(stop_type=None), "cannot be read.*stop_type"),
    (
        "llamacpp",
        "wrong count",
        lambda r: r[1].update(tokens_evaluated=15),
        "worked on 15 prompt tokens, not on the 16",
    ),
    (
        "llamacpp",
        "truncated",
        lambda r: r[1].update(truncated=True, stop_type="eos"),
        "dropped a part of the context while it generated",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, change, message) for name, _, change, message in BREACHES],
    ids=[f"{name}: {what}" for name, what, *_ in BREACHES],
)
def test_a_reply_that_breaks_a_rule_is_refused(name: str, change: Callable[[Json], object], message: str) -> None:
    kind = KINDS[name]
    with pytest.raises(ServerContractError, match=message) as caught:
        replied(kind, changed(kind, change))
    assert str(caught.value).startswith(f"{name} at http://127.0.0.1:")


@each_kind
def test_half_a_reply_is_refused(kind: Kind) -> None:
    body = json.dumps(kind.reply).encode()
    with pytest.raises(ServerContractError, match=r"cannot be read: Input data was truncated"):
        replied_bytes(kind, body[: len(body) // 2])


LONG_PROMPT = list(range(10_000, 11_000))
"""Its echo is longer than anything else in a reply, and is looked for there before the reply is decoded."""

LONG_ECHOES: list[tuple[str, list[int] | None, str | None]] = [
    ("as sent", LONG_PROMPT, None),
    ("another first id", [9, *LONG_PROMPT[1:]], "1000 ids for 1000, first difference at position 0"),
    ("another last id", [*LONG_PROMPT[:-1], 9], "1000 ids for 1000, first difference at position 999"),
    ("an id more", [*LONG_PROMPT, 9], "1001 ids for 1000, first difference at position 1000"),
    ("an id less", LONG_PROMPT[:-1], "999 ids for 1000, first difference at position 999"),
    ("twice", LONG_PROMPT * 2, "2000 ids for 1000, first difference at position 1000"),
    ("null", None, "sent no token ids|did not say which prompt ids"),
]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "with spaces"])
@pytest.mark.parametrize(("echo", "message"), [each[1:] for each in LONG_ECHOES], ids=[each[0] for each in LONG_ECHOES])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_long_echo_is_compared_to_the_last_id(
    name: str, echo: list[int] | None, message: str | None, separators: tuple[str, str]
) -> None:
    kind = KINDS[name]
    reply = (
        {**kind.reply, "choices": [dict(kind.reply["choices"][0])]} if name == "vllm" else copy.deepcopy(kind.reply[0])
    )
    (reply["choices"][0] if name == "vllm" else reply)["prompt_token_ids"] = echo
    if name == "sglang":
        reply["meta_info"]["prompt_tokens"] = len(LONG_PROMPT)
        if echo is None:
            message = None  # older ones echo only the length
    body = json.dumps(reply, separators=separators).encode()
    long = dataclasses.replace(kind, prompt=LONG_PROMPT)
    if message is None:
        assert len(replied_bytes(long, body, n=1, context_length=2048).choices) == 1
        return
    with pytest.raises(ServerContractError, match=message):
        replied_bytes(long, body, n=1, context_length=2048)
