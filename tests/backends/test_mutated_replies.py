"""Recorded replies of every server, damaged at random: refused, or data that keeps every rule of the contract.

What was changed into another value that a server could have sent cannot be told, and need not be: the rules must hold.
MANAGED_CLI_MUTATIONS=full tries ten times as many; MANAGED_CLI_MUTATIONS_SEED chooses others.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gzip
import json
import math
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from managed_cli.backends.base import Backend, BackendConfig
from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.backends.sglang import SGLangBackend
from managed_cli.backends.trl import TRLBackend
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import ManagedCliError
from managed_cli.types import LOGPROB_TOLERANCE, GenerationReply, SamplingParams
from tests.backends import test_llamacpp, test_sglang, test_trl, test_vllm
from tests.backends.replay import Answer, Replay, Request, all_recorded, as_json, recorded
from tests.mutations import Json, at_most, damaged_bytes, mutated, replaced_everywhere

VOCABULARY = 49152
EOS = 2
CONTEXT = 2048

REPLIES = 2_000 if os.environ.get("MANAGED_CLI_MUTATIONS") == "full" else 200
"""For each kind of server."""

SEED = int(os.environ.get("MANAGED_CLI_MUTATIONS_SEED", "11"))

SECONDS = 20.0
"""For one reply; it takes milliseconds."""

LEAST = 0.01
"""Of the replies, both of those that are taken and of those that are refused: else the damage shows nothing."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """A healthy reply, and what it replies to."""

    prompt: list[int]
    sampling: SamplingParams
    reply: Json


Said = Sequence[tuple[Json, Json, list[Json]]]
"""For each choice as it stands in a reply: ids, logprobs, and every echo of the prompt (its ids, or how many)."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One server: its answers before the first sample, its replies, and how one is read without the backend."""

    backend: type[Backend]
    routes: Callable[..., Mapping[str, Answer | list[Answer]]]
    path: str
    sent: Sequence[Sent]
    said: Callable[[Json], Said]


def said_by_vllm(reply: Json) -> Said:
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    return [(c["token_ids"], c["logprobs"]["token_logprobs"], [c["prompt_token_ids"]]) for c in choices]


def said_by_sglang(reply: Json) -> Said:
    return [
        (
            choice["output_ids"],
            [triple[0] for triple in choice["meta_info"]["output_token_logprobs"]],
            [choice["meta_info"]["prompt_tokens"], choice.get("prompt_token_ids")],
        )
        for choice in (reply if isinstance(reply, list) else [reply])
    ]


def said_by_trl(reply: Json) -> Said:
    said = []
    for index, ids in enumerate(reply["completion_ids"]):
        rows = reply["logprobs"][index]
        named = reply["logprob_token_ids"][index] if reply.get("logprob_token_ids") else rows
        logprobs = [
            row[named_ids.index(token)] if isinstance(row, list) else row
            for token, row, named_ids in zip(ids, rows, named, strict=True)
        ]
        said.append((ids, logprobs, reply["prompt_ids"]))
    return said


def said_by_llamacpp(reply: Json) -> Said:
    """Logprobs are left out: those that are asked for again are not in the reply."""
    choices = reply if isinstance(reply, list) else [reply]
    choices.sort(key=lambda choice: choice.get("index", 0))
    return [(choice["tokens"], None, [choice["tokens_evaluated"]]) for choice in choices]


def sent_by_llamacpp() -> list[Sent]:
    sent = []
    for name in ("completion_nprobs1", "completion_temp05_nprobs2", "completion_stop"):
        recording = recorded("llamacpp", name)
        sampling = SamplingParams(max_tokens=recording.body["n_predict"], stop=tuple(recording.body.get("stop", ())))
        sent.append(Sent(recording.body["prompt"], sampling, recording.response))
    two = recorded("llamacpp", "completion_n2")
    replies = [test_llamacpp.with_logprobs(completion) for completion in two.response]
    sent.append(Sent(test_llamacpp.PROMPT, SamplingParams(n=2, max_tokens=3), replies))
    return sent


def sent_by_vllm(kind: str) -> list[Sent]:
    names = {recording.name for recording in all_recorded(kind, "/v1/completions")}
    return [
        Sent(recording.body["prompt"], test_vllm.sampling_of(recording), recording.response)
        for recording in test_vllm.WHOLE
        if recording.name in names
    ]


KINDS = {
    "vllm": Kind(VLLMBackend, test_vllm.vllm, "/v1/completions", sent_by_vllm("vllm"), said_by_vllm),
    "sglang": Kind(
        SGLangBackend,
        test_sglang.sglang,
        "/generate",
        [Sent(r.body["input_ids"], test_sglang.sampling_of(r), r.response) for r in test_sglang.WHOLE],
        said_by_sglang,
    ),
    "trl": Kind(
        TRLBackend,
        test_trl.own_server,
        "/generate/",
        [Sent(r.body["prompts"][0], test_trl.sampling_of(r), r.response) for r in test_trl.WHOLE],
        said_by_trl,
    ),
    "trl on vllm": Kind(TRLBackend, test_trl.vllm_server, "/v1/completions", sent_by_vllm("trl116"), said_by_vllm),
    "llamacpp": Kind(LlamaCppBackend, test_llamacpp.llamacpp, "/completion", sent_by_llamacpp(), said_by_llamacpp),
}


class Damaged(Replay):
    """A server that answers one path with `answer_now`, and llama.cpp's second requests with `rescoring`."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind.routes())
        self.path = kind.path
        self.answer_now: Answer | None = None
        self.rescoring = NOT_ASKED

    def answer(self, request: Request) -> Answer:
        if self.answer_now is None or request.path != self.path:
            return super().answer(request)
        return self.rescoring if "logit_bias" in request.body else self.answer_now


@contextmanager
def damaged_server(kind: Kind) -> Iterator[Damaged]:
    server = Damaged(kind)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def damaged_answer(reply: Json, chance: random.Random) -> Answer:
    """`reply` damaged: mostly its JSON, now and then how it is encoded or framed."""
    body = mutated(reply, chance)
    how = chance.randrange(40)
    if how == 0:
        return Answer(body, headers={"content-encoding": chance.choice(["gzip", "deflate", "br", "zstd", "none"])})
    if how == 1:
        return Answer(gzip.compress(body, mtime=0), headers={"content-encoding": "gzip"})
    if how == 2:
        packed = damaged_bytes(gzip.compress(body, mtime=0), chance)
        return Answer(packed, headers={"content-encoding": "gzip"})
    if how == 3:
        return Answer(body, headers={"transfer-encoding": "chunked", "connection": "close"})
    if how == 4:
        return Answer(body, chance.choice([204, 206, 299, 302, 400, 404, 422, 500, 503]))
    if how == 5:
        return Answer(
            body, content_type=chance.choice(["text/html; charset=utf-16", "application/json; charset=x", ""])
        )
    return Answer(body)


def rescoring_of(reply: Json) -> Json:
    """An answer to any of llama.cpp's second requests about `reply`: all of its tokens are alternatives."""
    tokens = [token for choice in (reply if isinstance(reply, list) else [reply]) for token in choice["tokens"]]
    top = [{"id": token, "logprob": -0.25} for token in tokens]
    entry = {"id": test_llamacpp.HARMLESS_ID, "logprob": 0.0, "top_logprobs": top}
    value = {"content": "a", "tokens": [test_llamacpp.HARMLESS_ID], "stop_type": "limit", "tokens_evaluated": 1}
    return {**value, "completion_probabilities": [entry]}


def decoded(answer: Answer) -> Json:
    """What Python's own reader makes of an answer that was taken; it is asked to be no stricter than the client."""
    body = answer.body
    if answer.headers.get("content-encoding") == "gzip":
        body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(
            body
        )  # of several members, HTTP clients read the first
    text = body.decode("utf-8", "replace")
    return json.loads(text, strict=False, parse_int=lambda digits: int(digits) if len(digits) < 400 else math.inf)


def assert_in_order(kind: Kind, sent: Sent, answer: Answer, reply: GenerationReply) -> None:
    """The contract, and that nothing was made up: what was taken stands so in the reply."""
    assert len(reply.choices) == sent.sampling.n
    for choice in reply.choices:
        assert len(choice.token_ids) == len(choice.logprobs)
        assert all(math.isfinite(logprob) and logprob <= LOGPROB_TOLERANCE for logprob in choice.logprobs)
        assert all(type(token) is int and 0 <= token < VOCABULARY for token in choice.token_ids)
        assert isinstance(choice.finish_reason, str)
        assert choice.text is None or choice.text.encode("utf-8") is not None
    said = kind.said(decoded(answer))
    assert len(said) == len(reply.choices)
    for choice, (ids, logprobs, echoes) in zip(reply.choices, said, strict=True):
        assert list(choice.token_ids) == ids
        assert logprobs is None or list(choice.logprobs) == logprobs
        assert all(echo in (None, len(sent.prompt), sent.prompt) for echo in echoes)


NOT_ASKED = Answer(status=404)

Case = tuple[Sent, Answer, Answer]
"""What is asked, what is answered, and what llama.cpp answers to second requests about it."""


def damaged_cases(kind: Kind) -> Iterator[Case]:
    for number in range(REPLIES):
        chance = random.Random(f"{SEED} {kind.path} {kind.backend.__name__} {number}")
        sent = chance.choice(kind.sent)
        answer = damaged_answer(sent.reply, chance)
        if kind.backend is LlamaCppBackend and chance.random() < 0.3:
            yield sent, answer, Answer(mutated(rescoring_of(sent.reply), chance))
        elif kind.backend is LlamaCppBackend:
            yield sent, answer, as_json(rescoring_of(sent.reply))
        else:
            yield sent, answer, NOT_ASKED


def replaced_cases(kind: Kind) -> Iterator[Case]:
    """The shortest reply with each of its values replaced by one of each kind."""
    sent = min(kind.sent, key=lambda one: len(json.dumps(one.reply)))
    answers = [Answer(body) for body in replaced_everywhere(sent.reply)]
    if kind.backend is not LlamaCppBackend:
        return iter([(sent, answer, NOT_ASKED) for answer in answers])
    whole = rescoring_of(sent.reply)
    short = {**sent.reply, "completion_probabilities": []}
    again = [(sent, as_json(short), Answer(body)) for body in replaced_everywhere(whole)]
    return iter([*((sent, answer, as_json(whole)) for answer in answers), *again])


async def generate(kind: Kind, server: Damaged, cases: Iterator[Case]) -> tuple[collections.Counter[str], list[str]]:
    """How the replies were taken, and what should not have come of some of them."""
    outcomes: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    config = BackendConfig(base_url=server.base_url, attempts=1, context_length=CONTEXT)
    backend: Any = kind.backend(config)  # type: ignore[call-arg]  # every backend is made from its config
    await backend.probe()
    backend.limit_vocabulary(VOCABULARY)
    backend.know_end_tokens([EOS])
    for number, (sent, answer, rescoring) in enumerate(cases):
        server.answer_now, server.rescoring = answer, rescoring
        server.requests.clear()
        try:
            with at_most(SECONDS):
                reply = await backend.generate(sent.prompt, sent.sampling)
            assert_in_order(kind, sent, answer, reply)
        except ManagedCliError as error:
            outcomes[type(error).__name__] += bool(error.report())
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what this test looks for)
            faults.append(f"reply {number}: {error!r}\n  {answer.headers} {answer.body[:600]!r}")
        else:
            outcomes["taken"] += 1
    await backend.aclose()
    return outcomes, faults


@pytest.mark.parametrize("cases_of", [damaged_cases, replaced_cases])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_reply_is_refused_or_keeps_the_contract(
    name: str, cases_of: Callable[[Kind], Iterator[Case]]
) -> None:
    kind = KINDS[name]
    assert kind.sent
    with damaged_server(kind) as server:
        outcomes, faults = asyncio.run(generate(kind, server, cases_of(kind)))
    count = outcomes.total() + len(faults)
    print(f"{name}, {cases_of.__name__}, seed {SEED}: {count} replies, {dict(outcomes)}, {len(faults)} faults")
    assert not faults, "\n".join(faults[:10])
    assert LEAST * count < outcomes["taken"] < (1 - LEAST) * count
