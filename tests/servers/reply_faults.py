"""Replies that are well-formed JSON and break the contract, in the wire format of each server."""

import json
from collections.abc import Callable
from typing import Any

from tests.servers.http_messages import Message

NUMBER_TOO_LARGE = "a number that no float holds"
"""Written as 1e999, which no encoder would."""


class Vllm:
    """The choices of one reply; `choice` counts from 0, positions are those of the completion."""

    def __init__(self, reply: Any) -> None:  # Any: JSON
        self.reply = reply

    @property
    def choices(self) -> list[Any]:
        choices: list[Any] = self.reply["choices"]
        return choices

    def ids(self, choice: int) -> list[Any]:
        ids: list[Any] = self.choices[choice]["token_ids"]
        return ids

    def set_id(self, choice: int, position: int, value: object) -> None:
        self.ids(choice)[position] = value

    def logprobs(self, choice: int) -> list[Any]:
        """A list whose entries are a logprob each, in this server's shape."""
        logprobs: list[Any] = self.choices[choice]["logprobs"]["token_logprobs"]
        return logprobs

    def set_logprob(self, choice: int, position: int, value: object) -> None:
        self.logprobs(choice)[position] = value

    def set_finish(self, choice: int, value: str | None) -> None:
        self.choices[choice]["finish_reason"] = value

    def drop_finish(self, choice: int) -> None:
        del self.choices[choice]["finish_reason"]

    def set_echo(self, choice: int, change: Callable[[list[int]], list[int]]) -> None:
        self.choices[choice]["prompt_token_ids"] = change(self.choices[choice]["prompt_token_ids"])

    def set_index(self, choice: int, index: int) -> None:
        self.choices[choice]["index"] = index

    def set_model(self, name: str) -> None:
        self.reply["model"] = name


class Sglang(Vllm):
    @property
    def choices(self) -> list[Any]:
        assert isinstance(self.reply, list)
        return self.reply

    def ids(self, choice: int) -> list[Any]:
        ids: list[Any] = self.choices[choice]["output_ids"]
        return ids

    def set_id(self, choice: int, position: int, value: object) -> None:
        self.ids(choice)[position] = self.logprobs(choice)[position][1] = value

    def logprobs(self, choice: int) -> list[Any]:
        logprobs: list[Any] = self.choices[choice]["meta_info"]["output_token_logprobs"]
        return logprobs

    def set_logprob(self, choice: int, position: int, value: object) -> None:
        self.logprobs(choice)[position][0] = value

    def set_finish(self, choice: int, value: str | None) -> None:
        self.choices[choice]["meta_info"]["finish_reason"] = value if value is None else {"type": value}

    def drop_finish(self, choice: int) -> None:
        del self.choices[choice]["meta_info"]["finish_reason"]


class Llamacpp(Sglang):
    def ids(self, choice: int) -> list[Any]:
        ids: list[Any] = self.choices[choice]["tokens"]
        return ids

    def set_id(self, choice: int, position: int, value: object) -> None:
        ids, entries = self.ids(choice), self.logprobs(choice)
        at = next(place for place, entry in enumerate(entries) if entry["id"] == ids[position])
        ids[position] = entries[at]["id"] = value

    def logprobs(self, choice: int) -> list[Any]:
        logprobs: list[Any] = self.choices[choice]["completion_probabilities"]
        return logprobs

    def set_logprob(self, choice: int, position: int, value: object) -> None:
        self.logprobs(choice)[position]["logprob"] = value

    def set_finish(self, choice: int, value: str | None) -> None:
        self.choices[choice]["stop_type"] = value

    def drop_finish(self, choice: int) -> None:
        del self.choices[choice]["stop_type"]

    def set_echo(self, choice: int, change: Callable[[list[int]], list[int]]) -> None:
        count = self.choices[choice]["tokens_evaluated"]
        self.choices[choice]["tokens_evaluated"] = len(change(list(range(count))))


class Trl(Vllm):
    @property
    def choices(self) -> list[Any]:
        choices: list[Any] = self.reply["completion_ids"]
        return choices

    def ids(self, choice: int) -> list[Any]:
        ids: list[Any] = self.choices[choice]
        return ids

    def set_id(self, choice: int, position: int, value: object) -> None:
        self.ids(choice)[position] = self.reply["logprob_token_ids"][choice][position][0] = value

    def logprobs(self, choice: int) -> list[Any]:
        logprobs: list[Any] = self.reply["logprobs"][choice]
        return logprobs

    def set_logprob(self, choice: int, position: int, value: object) -> None:
        self.logprobs(choice)[position][0] = value

    def set_echo(self, choice: int, change: Callable[[list[int]], list[int]]) -> None:  # noqa: ARG002 (one for all)
        self.reply["prompt_ids"] = [change(ids) for ids in self.reply["prompt_ids"]]


WIRES: dict[str, type[Vllm]] = {
    "/v1/completions": Vllm,
    "/generate": Sglang,
    "/completion": Llamacpp,
    "/generate/": Trl,
}


def logprob_as(value: object) -> Callable[[Vllm], None]:
    """One logprob in the middle of the last choice is another value."""
    return lambda reply: reply.set_logprob(-1, len(reply.logprobs(-1)) // 2, value)


def id_as(value: object) -> Callable[[Vllm], None]:
    return lambda reply: reply.set_id(-1, 0, value)


def _exchange(reply: Vllm) -> None:
    reply.choices.reverse()


def _same_index(reply: Vllm) -> None:
    reply.set_index(-1, 0)


def _own_prompt_cut(ids: list[int]) -> list[int]:
    return ids[:-1]


def _own_prompt_changed(ids: list[int]) -> list[int]:
    return [*ids[:-1], ids[-1] - 1]


REPLY_FAULTS: dict[str, Callable[[Vllm], None]] = {
    "logprob_nan": logprob_as(float("nan")),
    "logprob_infinity": logprob_as(float("inf")),
    "logprob_too_large": logprob_as(NUMBER_TOO_LARGE),
    "logprob_positive": logprob_as(0.5),
    "logprob_null": logprob_as(None),
    "logprob_minus_infinity": logprob_as(float("-inf")),
    "logprob_minus_9999": logprob_as(-9999.0),
    "logprob_float32_lowest": logprob_as(-3.4028234663852886e38),
    "logprob_text": logprob_as("-0.5"),
    "logprob_true": logprob_as(True),
    "logprobs_one_too_few": lambda reply: reply.logprobs(-1).pop(),
    "logprobs_one_too_many": lambda reply: reply.logprobs(-1).append(reply.logprobs(-1)[-1]),
    "logprobs_none": lambda reply: reply.logprobs(-1).clear(),
    "ids_one_too_few": lambda reply: reply.ids(-1).pop(),
    "ids_one_too_many": lambda reply: reply.ids(-1).append(reply.ids(-1)[-1]),
    "id_outside_the_vocabulary": id_as(10_000_000),
    "id_of_70_bits": id_as(2**70),
    "id_negative": id_as(-1),
    "id_float": id_as(17.0),
    "id_text": id_as("17"),
    "id_null": id_as(None),
    "choices_too_few": lambda reply: reply.choices.pop(),
    "choices_too_many": lambda reply: reply.choices.append(reply.choices[-1]),
    "choices_none": lambda reply: reply.choices.clear(),
    "choices_out_of_order": _exchange,
    "choices_of_one_index": _same_index,
    "echo_cut": lambda reply: reply.set_echo(-1, _own_prompt_cut),
    "echo_changed": lambda reply: reply.set_echo(-1, _own_prompt_changed),
    "finish_reason_missing": lambda reply: reply.drop_finish(-1),
    "finish_reason_null": lambda reply: reply.set_finish(-1, None),
    "finish_reason_abort": lambda reply: reply.set_finish(-1, "abort"),
    "finish_reason_unknown": lambda reply: reply.set_finish(-1, "tired"),
    "model_of_another_name": lambda reply: reply.set_model("another/model"),
}


def doubled_keys(body: bytes) -> bytes:
    """Every key of the reply twice, first with null, then with its value."""

    def written(value: object) -> str:
        if isinstance(value, dict):
            return (
                "{"
                + ",".join(f"{json.dumps(key)}:null,{json.dumps(key)}:{written(of)}" for key, of in value.items())
                + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json.dumps(value)

    return written(json.loads(body)).encode()


def broken_reply(name: str, request: Message, body: bytes) -> bytes:
    """The reply with its fault, as JSON with Python's NaN and Infinity."""
    reply = json.loads(body)
    REPLY_FAULTS[name](WIRES[request.path](reply))
    return json.dumps(reply).replace(json.dumps(NUMBER_TOO_LARGE), "1e999").encode()
