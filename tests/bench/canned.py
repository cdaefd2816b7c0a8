"""Canned replies: recorded ones of real servers, their arrays lengthened to as many tokens and choices as are wanted.

Ids are those of natural text in a real vocabulary. Logprobs are float32 values printed as doubles, as vLLM, SGLang and
TRL print them, so a token has as many bytes on the wire as it has there. A reply is kept in pieces, between which the
prompt that was sent is put.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

REPOSITORY = Path(__file__).parents[2]
WIRE = REPOSITORY / "tests" / "wire"

PROMPT, PROMPT_LENGTH = "@prompt@", "@prompt length@"
"""Stand in a reply where the prompt's ids and their number belong."""

NEWEST_MODEL = "smollm2"
CONTEXT_LENGTH = 65_536

Json = dict[str, Any]  # Any: JSON values


class Choice:
    """One sampled choice: C ids of a natural text, C logprobs, and its text, special tokens skipped."""

    def __init__(self, material: Material, length: int, source: random.Random) -> None:
        start = source.randrange(len(material.ids) - length)
        self.ids = material.ids[start : start + length]
        self.finish_reason = source.choice(("stop", "length"))
        if self.finish_reason == "stop":
            self.ids[-1] = material.end_id
        self.logprobs = [float32(-8.0 * source.random() ** 4) for _ in range(length)]
        self.pieces = [material.tokenizer.decode([token], skip_special_tokens=False) for token in self.ids]
        self.text = material.tokenizer.decode(self.ids)


class Material:
    """A real tokenizer and natural text in its ids."""

    def __init__(self, directory: Path, *, least: int = 20_000) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.end_id: int = self.tokenizer.token_to_id(config["eos_token"])
        text = "".join((REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md"))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.ids = ids * (least // len(ids) + 1)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class Canned:
    """One reply, to be sent with any prompt."""

    def __init__(self, reply: object) -> None:
        body = msgspec.json.encode(reply)
        parts = body.replace(f'"{PROMPT_LENGTH}"'.encode(), b"\0#\0").replace(f'"{PROMPT}"'.encode(), b"\0@\0")
        self._parts = parts.split(b"\0")

    def sent_with(self, prompt: bytes) -> bytes:
        """The reply's body with `prompt`, a JSON array, where the server echoes it."""
        length = str(prompt.count(b",") + 1).encode()
        return b"".join(prompt if part == b"@" else length if part == b"#" else part for part in self._parts)


def float32(value: float) -> float:
    """The nearest float32, as a double: what a server prints of a float32 logprob."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def recorded(name: str) -> Any:  # Any: JSON
    """The response of a recorded exchange, `vllm/cmpl_n4`."""
    return json.loads((WIRE / f"{name}.json").read_text(encoding="utf-8"))["response"]


def vllm_reply(choices: list[Choice]) -> Json:
    """As `/v1/completions` of vLLM 0.32 with `logprobs: 0` and `return_token_ids`."""
    template = recorded("vllm/cmpl_n4")
    made = []
    for index, choice in enumerate(choices):
        offsets = [0]
        for piece in choice.pieces:
            offsets.append(offsets[-1] + len(piece))
        logprobs = {
            "text_offset": offsets[:-1],
            "token_logprobs": choice.logprobs,
            "tokens": choice.pieces,
            "top_logprobs": [{p: value} for p, value in zip(choice.pieces, choice.logprobs, strict=True)],
        }
        changed = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason,
                   "token_ids": choice.ids, "prompt_token_ids": PROMPT}  # fmt: skip
        made.append(refilled(template["choices"][0], changed))
    return {**template, "choices": made}


def sglang_reply(choices: list[Choice]) -> Json | list[Json]:
    """As `/generate` of SGLang 0.5.23: an object for one choice, a list for several."""
    template = recorded("sglang/gen_n3")[0]
    made = []
    for choice in choices:
        ended = {"type": "stop", "matched": choice.ids[-1]}
        limited = {"type": "length", "length": len(choice.ids)}
        meta = refilled(template["meta_info"], {
            "finish_reason": ended if choice.finish_reason == "stop" else limited,
            "prompt_tokens": PROMPT_LENGTH,
            "output_token_logprobs": [[v, t, None] for v, t in zip(choice.logprobs, choice.ids, strict=True)],
            "output_token_logprobs_length": len(choice.ids),
            "completion_tokens": len(choice.ids),
        })  # fmt: skip
        reply = refilled(template, {"text": choice.text, "output_ids": choice.ids, "meta_info": meta})
        made.append({**reply, "prompt_token_ids": PROMPT})
    return made if len(made) > 1 else made[0]


def trl_reply(choices: list[Choice]) -> Json:
    """As `/generate/` of TRL 1.10 with `logprobs: 0`; the request's `prompts` are its `prompt_ids`."""
    changed = {
        "prompt_ids": PROMPT,
        "completion_ids": [choice.ids for choice in choices],
        "logprobs": [[[value] for value in choice.logprobs] for choice in choices],
        "logprob_token_ids": [[[token] for token in choice.ids] for choice in choices],
    }
    return refilled(recorded("trl/gen_ids2_n2"), changed)


def atropos_reply(choices: list[Choice]) -> Json:
    """As `/generate` of the vLLM server that comes with atroposlib 0.4 (`example_trainer/vllm_api_server.py`)."""
    return {
        "text": [choice.text for choice in choices],
        "prompt": "",
        "finish_reasons": [choice.finish_reason for choice in choices],
        "logprobs": [[[{str(t): v}] for t, v in zip(c.ids, c.logprobs, strict=True)] for c in choices],
        "prompt_token_ids": PROMPT,
        "token_ids": [choice.ids for choice in choices],
    }


SHAPES: dict[str, Callable[[list[Choice]], object]] = {
    "vllm": vllm_reply,
    "sglang": sglang_reply,
    "trl": trl_reply,
    "atropos": atropos_reply,
}


def refilled(template: Json, changed: Json) -> Json:
    """`template` with other values under keys that it has."""
    assert changed.keys() <= template.keys(), changed.keys() - template.keys()
    return {**template, **changed}


def canned(material: Material, shape: str, n: int, tokens: int, number: int) -> Canned:
    """Reply number `number` with n choices of `tokens` ids each; the same at every call."""
    source = random.Random(f"{n} {tokens} {number}")
    return Canned(SHAPES[shape]([Choice(material, tokens, source) for _ in range(n)]))
