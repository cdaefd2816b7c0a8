"""The fake servers answer what the recorded servers answered: same status, same keys, same types, same nesting."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.process import RunningServer, running_server
from tests.servers.tokenizer import VOCABULARY_SIZE

WIRE = Path(__file__).parents[1] / "wire"
RECORDED_VOCABULARY = 49152  # of the recorded model; the fake's is smaller, so ids are mapped
SPECIAL_IDS = 3
EVERY_TOKEN = list(range(VOCABULARY_SIZE))

SERVERS: dict[str, tuple[object, ...]] = {
    "vllm": ("vllm", "--served-model-name", "smollm2"),
    "vllm processed": ("vllm", "--served-model-name", "smollm2", "--logprobs-mode", "processed"),
    "vllm guarded": ("vllm", "--served-model-name", "smollm2", "--api-key", "secret-key"),
    "trl116": ("vllm", "--served-model-name", "/models/smollm2-135m", "--max-logprobs", -1),
    "sglang": ("sglang", "--served-model-name", "smollm2"),
    "sglang guarded": ("sglang", "--served-model-name", "smollm2", "--api-key", "secret-key"),
    "trl": ("trl",),
    "trl029": ("trl", "--dialect", "0.29"),
    "llamacpp": ("llamacpp", "--max-model-len", 1024, "--slots", 2),
}
NOT_OURS = {  # recorded for the clients' sake; the fakes cannot be made to answer so by a request
    "sglang/abort_target": "aborted by another request",
    "sglang/orig_regex_top5": "regex",
    "trl029/gen_ids": "that server was broken by a newer vLLM",
}


def recorded_replies() -> list[Any]:
    replies = []
    for file in sorted(WIRE.glob("*/*.json")):
        name = f"{file.parent.name}/{file.stem}"
        if file.parent.name in SERVERS and name not in NOT_OURS:
            reply = json.loads(file.read_text(encoding="utf-8"))
            if reply["status"] is not None:  # deaths and hangs have tests of their own
                replies.append(pytest.param(file.parent.name, reply, id=name))
    return replies


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RunningServer]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(running_server(*options)) for name, options in SERVERS.items()}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


def error_message(response: Any) -> str | None:
    """What a server says is wrong; None for answers, and for reports of schema errors, which go into every detail."""
    error = response.get("error") if isinstance(response, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return None if message is None or "validation error" in message or "parse error" in message else message


def mapped_ids(value: Any) -> Any:
    """Ids of the recorded model as ids of the fake one; ids outside either vocabulary stay outside."""
    if isinstance(value, list):
        return [mapped_ids(item) for item in value]
    if not isinstance(value, int) or value < 0:
        return value
    if value >= RECORDED_VOCABULARY:
        return VOCABULARY_SIZE + value - RECORDED_VOCABULARY
    return SPECIAL_IDS + value % (VOCABULARY_SIZE - SPECIAL_IDS)


def mapped_request(body: Any) -> Any:
    """The recorded request with ids of the fake model and stops that the fake model runs into."""
    if not isinstance(body, dict):
        return body
    mapped = {}
    for name, value in body.items():
        if name in ("prompt", "prompts", "input_ids", "tokens", "allowed_token_ids", "sequences"):
            mapped[name] = mapped_ids(value)
        elif name == "stop_token_ids":
            mapped[name] = EVERY_TOKEN
        elif name == "stop" and value in (["France"], "ari", ["ari"]):
            mapped[name] = ["e"]
        elif name in ("sampling_params", "generation_kwargs"):
            mapped[name] = mapped_request(value)
        else:
            mapped[name] = value
    return mapped


def shape(value: Any, name: str = "") -> Any:
    """Keys, types and nesting; a list's elements count as one, and None as something that can be anything."""
    if isinstance(value, dict):
        if name == "finish_reason":
            return "finish reason"
        if name == "prompt_logprobs" or (name == "top_logprobs" and not {"id", "token"} & value.keys()):
            return {"any token": merged([shape(item) for item in value.values()])}
        return {key: shape(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [merged([shape(item, name) for item in value])]
    return None if value is None else type(value).__name__


def merged(shapes: list[Any]) -> Any:
    """The one shape that all have; differing shapes stay side by side, and None gives way."""
    unified: list[Any] = []
    for one in shapes:
        for place, other in enumerate(unified):
            if not differences(one, other):
                unified[place] = other if one is None else one
                break
        else:
            unified.append(one)
    return unified[0] if len(unified) == 1 else tuple(map(json.dumps, unified)) or None


def differences(ours: Any, theirs: Any, place: str = "reply") -> list[str]:
    """Where two shapes disagree; None agrees with anything."""
    if ours is None or theirs is None:
        return []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = [f"{place}.{key} is missing" for key in theirs.keys() - ours.keys()]
        unknown = [f"{place}.{key} is unknown" for key in ours.keys() - theirs.keys()]
        both = [differences(ours[key], theirs[key], f"{place}.{key}") for key in ours.keys() & theirs.keys()]
        return [*missing, *unknown, *chain.from_iterable(both)]
    if isinstance(ours, list) and isinstance(theirs, list):
        return differences(ours[0], theirs[0], f"{place}[]")
    return [] if ours == theirs else [f"{place} is {ours}, recorded as {theirs}"]


def server_for(servers: dict[str, RunningServer], kind: str, reply: dict[str, Any]) -> RunningServer:
    if reply["name"].startswith("auth_"):
        return servers[f"{kind} guarded"]
    return servers["vllm processed" if reply["name"].startswith("proc_") else kind]


def ask(client: httpx.Client, server: RunningServer, request: dict[str, Any]) -> httpx.Response:
    if request["raw_body"] is not None:
        content = request["raw_body"].encode()
    else:
        content = b"" if request["body"] is None else json.dumps(mapped_request(request["body"])).encode()
    return client.request(request["method"], server.url + request["path"], content=content, headers=request["headers"])


@pytest.mark.parametrize(("kind", "recorded"), recorded_replies())
def test_fake_reply_has_the_shape_of_the_recorded_reply(
    servers: dict[str, RunningServer], client: httpx.Client, kind: str, recorded: dict[str, Any]
) -> None:
    reply = ask(client, server_for(servers, kind, recorded), recorded["request"])
    assert reply.status_code == recorded["status"], reply.text
    if recorded["response"] is None:
        assert reply.text == (recorded["response_text"] or "")
        return
    assert differences(shape(reply.json()), shape(recorded["response"])) == []


@pytest.mark.parametrize(
    ("kind", "recorded"), [case for case in recorded_replies() if error_message(case.values[1]["response"])]
)
def test_fake_errors_use_the_words_of_the_recorded_ones(
    servers: dict[str, RunningServer], client: httpx.Client, kind: str, recorded: dict[str, Any]
) -> None:
    message = error_message(ask(client, server_for(servers, kind, recorded), recorded["request"]).json())
    assert message is not None
    assert re.sub(r"\d+", "N", message) == re.sub(r"\d+", "N", error_message(recorded["response"]) or "")


def test_finish_reasons_of_sglang_are_those_recorded(servers: dict[str, RunningServer], client: httpx.Client) -> None:
    recorded = json.loads((WIRE / "sglang" / "gen_stop_str.json").read_text(encoding="utf-8"))
    request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20, "temperature": 0, "stop": ["e"]}}
    reply = client.post(servers["sglang"].url + "/generate", json=request).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "e"}
    assert recorded["response"]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "France"}
    request["sampling_params"] = {"max_new_tokens": 3, "ignore_eos": True}
    reply = client.post(servers["sglang"].url + "/generate", json=request).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"index": 1, "text": "b", "stop_reason": 5}, []),
        ({"index": 1, "text": "b"}, ["reply.choices[].stop_reason is missing"]),
        ({"index": 1, "text": "b", "stop_reason": 5, "more": 1}, ["reply.choices[].more is unknown"]),
        ({"index": 1.0, "text": "b", "stop_reason": 5}, ["reply.choices[].index is float, recorded as int"]),
    ],
)
def test_missing_unknown_and_mistyped_keys_are_seen(choice: dict[str, object], found: list[str]) -> None:
    theirs = shape({"choices": [{"index": 0, "text": "a", "stop_reason": None}]})
    assert differences(shape({"choices": [choice]}), theirs) == found


def test_exempted_recordings_exist() -> None:
    assert all((WIRE / f"{name}.json").exists() for name in NOT_OURS)
