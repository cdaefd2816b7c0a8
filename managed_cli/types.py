"""Values that pass between the rooms. All frozen; none does I/O.

Those that every request makes are structs of msgspec, which are made in a sixth of a frozen dataclass's time;
`msgspec.structs.replace` changes a field of a copy.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

IGNORED_TOKEN_ID = -100
"""Mask value of a position the model did not sample: `ignore_index` of PyTorch's cross-entropy."""

MASKED_LOGPROB = 1.0
"""Logprob of a position the model did not sample. No real logprob is above 0, so it cannot be mistaken."""

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 a sampled logprob may lie: rounding of a float32 log-softmax."""

UNNAMED_MODEL = "unknown"
"""What stands for the model where neither the server nor the user names it."""

TOP_K_OFF = -1
"""`top_k` that filters nothing, as vLLM and SGLang spell it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is told about sampling; every field is sent, so none is left to a server's default.

    Attributes:
        n: choices per prompt.
        max_tokens: most tokens to sample per choice.
        temperature: 0 is greedy.
        top_k: -1 keeps all.
        seed: sent as it is; None only where the caller wants the server's own randomness.
        stop: stop strings; sampling ends once one stands in the text.
        stop_token_ids: ids that end sampling, beside the model's own end tokens.
    """

    n: int = 1
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class LogprobsMode(enum.StrEnum):
    """At which stage of sampling a server takes its logprobs."""

    RAW = "raw"
    TEMPERATURE = "temperature"
    PROCESSED = "processed"
    UNKNOWN = "unknown"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled choice, as the server sent it. C = len(token_ids) = len(logprobs).

    Attributes:
        token_ids: sampled ids, [C], an end-of-turn token included where one was sampled.
        logprobs: natural logs, [C].
        text: the text as the server cut it, specials skipped; None where the server sends none.
        finish_reason: `stop`, `length`, `abort`, … in OpenAI's words.
        stop_reason: the stop string or stop token id that ended it, where the server says so.
        end_token_id: the id of the token that ended it (then `token_ids[-1]`); None where a string or a limit did.
        finish_reason_inferred: the server named no reason; it was read off the ids.
        rescored: positions whose logprob came from a second request to the same server.
        weight_version: the server's own word for its weights, where it has one.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str | None
    finish_reason: str
    stop_reason: str | int | None = None
    end_token_id: int | None = None
    finish_reason_inferred: bool = False
    rescored: tuple[int, ...] = ()
    weight_version: str | None = None


class GenerationReply(msgspec.Struct, frozen=True, kw_only=True):
    """All choices for one prompt, in choice order.

    Attributes:
        attempts: HTTP requests it took, retries included.
        sampling: what was sent, after any clamping to the context.
        server: base URL that answered.
        checked: every id is an `int` and every logprob a `float`, and they keep to the rules of `backends.base`.
    """

    choices: tuple[Generation, ...]
    sampling: SamplingParams
    server: str
    attempts: int = 1
    logprobs_mode: LogprobsMode = LogprobsMode.UNKNOWN
    checked: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Top-k alternatives at every prompt position. P = len(prompt_tokens).

    Attributes:
        topk_token_ids: [P][k], best first; `[]` at position 0, which nothing precedes.
        topk_logprobs: [P][k], natural logs, aligned with the ids.
    """

    prompt_tokens: list[int]
    topk_token_ids: list[list[int]]
    topk_logprobs: list[list[float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself before the first request.

    Attributes:
        model: the name to send in requests.
        tokenizer_name: path or hub name of its tokenizer, where it says so.
        context_length: most prompt + completion tokens; None where the server does not say.
        vocab_size: ids at or above it must not be sent; None where unknown.
        logprobs_mode_source: how the mode was learnt, in words.
    """

    server_type: str
    base_url: str
    model: str
    tokenizer_name: str | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    version: str | None = None
    weight_version: str | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.UNKNOWN
    logprobs_mode_source: str = "not known"


Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else its chat template reads."""


class Tokenizer(Protocol):
    """What tracking and rendering need of a tokenizer; all methods are synchronous.

    Attributes:
        name: path or hub name, for people.
        vocab_size: ids are 0 … vocab_size - 1.
        eos_token_ids: tokens that end a turn.
        over_network: each call is a request, so it belongs in a thread.
        decodes_bytes: the text of ids is that of their bytes one after the other, so that it can be continued.
    """

    @property
    def decodes_bytes(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def over_network(self) -> bool: ...

    def prompt_text(self, text: str) -> str:
        """A text prompt as the model sees it: with the text of BOS in front, once, where the model has one."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt that stands at the start of the context: BOS once, where the model has one."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of text a chat template has written: nothing is added."""
        ...

    def encode_suffix(self, text: str) -> list[int]:
        """Ids of text that follows other tokens: no BOS, no dummy space before it."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; a split UTF-8 character shows as U+FFFD."""
        ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as its chat template writes it."""
        ...

    def chat_template_hash(self) -> str | None:
        """SHA-256 of the chat template, hex; None without one."""
        ...
