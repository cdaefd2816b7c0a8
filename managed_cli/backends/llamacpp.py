"""llama.cpp's own server: `/completion` with token ids in, ids and raw logprobs out.

What its replies mean (llama.cpp of October 2026, found by asking it):
- the end-of-turn token is in `tokens` and has a logprob, but is not in `content`;
- logprobs are those of the model before temperature and filters;
- choice j of one request samples with seed + j, and a request cannot have more choices than the server has slots;
- `completion_probabilities` lacks entries that `tokens` has: after a stop word as many as the word has tokens, and
  every token that leaves an unfinished UTF-8 character at the end of the text (two of three tokens of an emoji).

Nothing is made up for the missing ones. Each entry names its id, so it is known which tokens they belong to; the
others are asked for again: the same ids as the prompt, one token on, with enough alternatives to hold the sampled
one. Such positions are marked in the row (`rescored`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from managed_cli.backends.base import HttpBackend
from managed_cli.backends.numbers import logprob_or_minus_inf
from managed_cli.backends.token_logprobs import SCORING_HINT
from managed_cli.errors import ConfigError, ServerContractError, ServerRefused
from managed_cli.sent_prompt import SentPrompt
from managed_cli.types import (
    Generation,
    GenerationReply,
    LogprobsMode,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}
"""llama.cpp's `stop_type` in OpenAI's words."""

NEUTRAL_SAMPLERS: dict[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
    "ignore_eos": False,
}
"""Samplers a server may have been started with; each is switched off, so that what was sent is what sampled."""

ALTERNATIVES_ASKED = (256, 4096)
"""How many alternatives a rescoring request asks for before it asks for the whole vocabulary."""

FORCING_BIAS = 1e6
"""Logit bias that makes a token certain; logprobs are taken before it."""

SEED_NOT_GIVEN = 2**32 - 1
"""How llama.cpp names the seed of a request without one."""

HARMLESS_TEXT = "a"
"""A complete character, forced so that the reply has an entry whose alternatives can be read."""


class _Alternative(msgspec.Struct):
    id: int
    logprob: float | None


class _Probability(msgspec.Struct):
    id: int
    logprob: float | None
    top_logprobs: list[_Alternative] = []


class _Sampling(msgspec.Struct):
    seed: int | None = None


class _Completion(msgspec.Struct):
    content: str
    tokens: list[int]
    stop_type: str
    tokens_evaluated: int
    index: int = 0
    stopping_word: str = ""
    truncated: bool = False
    completion_probabilities: list[_Probability] = []
    generation_settings: _Sampling = msgspec.field(default_factory=_Sampling)


class _Meta(msgspec.Struct):
    n_vocab: int
    n_ctx_train: int | None = None


class _Model(msgspec.Struct):
    id: str
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Settings
    total_slots: int
    build_info: str = ""
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class LlamaCppBackend(HttpBackend):
    """A llama.cpp server, external or embedded in this process."""

    server_type: ClassVar[str] = "llamacpp"
    slots: int = 1
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    _harmless_id: int | None = None

    async def probe(self) -> ServerInfo:
        """What the server says of itself; the context is that of one slot.

        Raises:
            ServerRefused: it does not serve `config.model`.
            ServerContractError: what answers there is not llama.cpp.
        """
        props = self.http.decode((await self.http.get("/props")).body, _Props, what="its properties")
        models = self.http.decode((await self.http.get("/v1/models")).body, _Models, what="a model list").data
        if not models:
            raise ServerContractError(f"{self.label} lists no model")
        model = models[0]
        if self.config.model is not None and self.config.model not in {m.id for m in models}:
            raise ServerRefused(
                f"{self.label} does not serve the model {self.config.model!r}",
                status=404,
                details=[f"it serves: {', '.join(m.id for m in models)}"],
                hint="leave --model away to use what the server has",
            )
        self.slots = max(1, props.total_slots)
        self.chat_template, self.bos_token, self.eos_token = props.chat_template, props.bos_token, props.eos_token
        self._info = ServerInfo(
            server_type=self.server_type,
            base_url=self.base_url,
            model=model.id,
            context_length=props.default_generation_settings.n_ctx,
            vocab_size=model.meta.n_vocab if model.meta else None,
            version=props.build_info or None,
            logprobs_mode=LogprobsMode.RAW,
            logprobs_mode_source="llama.cpp gives logprobs before temperature",
        )
        return self._info

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The server's own ids of `text`."""
        payload = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return self.http.decode((await self.http.post("/tokenize", payload)).body, _Tokens, what="tokens").tokens

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for what llama.cpp has not: stop token ids."""
        if sampling.stop_token_ids:
            raise ConfigError(f"{self.label} cannot stop at token ids", hint="use --stop with the token's text instead")

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """`sampling.n` choices in choice order; more than the server has slots go in several requests.

        Raises:
            PromptRejected: the prompt must not be sent.
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        self.check_sampling(sampling)
        sampling = self.admitted(prompt_ids, sampling)
        choices: list[Generation] = []
        attempts = 0
        while len(choices) < sampling.n:
            part = msgspec.structs.replace(
                sampling,
                n=min(self.slots, sampling.n - len(choices)),
                seed=None if sampling.seed is None else sampling.seed + len(choices),
            )
            completions, sends = await self._complete(prompt_ids, part)
            attempts = max(attempts, sends)
            choices += [await self._generation(prompt_ids, completion) for completion in completions]
        return self.reply_of(sampling, choices, attempts)

    async def _complete(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> tuple[list[_Completion], int]:
        payload = {
            **NEUTRAL_SAMPLERS,
            "prompt": SentPrompt.of(prompt_ids).raw,
            "n": sampling.n,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),  # off is 0 here, -1 elsewhere
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            # The penalty covers prompt and completion, as on other servers.
            "repeat_last_n": len(prompt_ids) + sampling.max_tokens,
            "seed": -1 if sampling.seed is None else sampling.seed % 2**32,
            "stop": list(sampling.stop),
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
        }
        reply = await self.http.post("/completion", payload)
        completions = (
            [self.http.decode(reply.body, _Completion, what="a completion")]
            if sampling.n == 1
            else self.http.decode(reply.body, list[_Completion], what="completions")
        )
        completions.sort(key=lambda completion: completion.index)
        if len(completions) != sampling.n:
            raise ServerContractError(f"{self.label} sent {len(completions)} choices for n={sampling.n}")
        if sorted(completion.index for completion in completions) != list(range(sampling.n)):
            raise ServerContractError(f"{self.label} numbered its choices {[c.index for c in completions]}")
        seed = completions[0].generation_settings.seed
        if sampling.seed is not None and seed not in (payload["seed"], SEED_NOT_GIVEN, None):
            raise ServerContractError(f"{self.label} answered with the seed {seed}, not with {payload['seed']} as sent")
        for completion in completions:
            if completion.tokens_evaluated != len(prompt_ids):
                raise ServerContractError(
                    f"{self.label} worked on {completion.tokens_evaluated} prompt tokens, "
                    f"not on the {len(prompt_ids)} sent"
                )
            if completion.truncated and not self._filled_its_context(prompt_ids, completion):
                raise ServerContractError(f"{self.label} dropped a part of the context while it generated")
        return completions, reply.attempts

    def _filled_its_context(self, prompt_ids: Sequence[int], completion: _Completion) -> bool:
        """Whether `truncated` says no more than that generation ended at the last free token.

        llama.cpp says it of a completion that fills the context to its last token, from which nothing was dropped, and
        of one for which a context shift made room, which is longer than the context.
        """
        held = len(prompt_ids) + len(completion.tokens)
        return completion.stop_type == "limit" and held <= (self.info.context_length or 0)

    async def _generation(self, prompt_ids: Sequence[int], completion: _Completion) -> Generation:
        finish_reason = FINISH_REASONS.get(completion.stop_type)
        if finish_reason is None:
            raise ServerContractError(
                f"{self.label} ended a completion with the unknown reason {completion.stop_type!r}"
            )
        entries = completion.completion_probabilities
        known = certain_positions(completion.tokens, [entry.id for entry in entries])
        if known is None:
            raise ServerContractError(f"{self.label} sent logprobs of other tokens than the ones it sampled")
        logprobs = [0.0] * len(completion.tokens)
        missing = []
        for position, token in enumerate(completion.tokens):
            if position in known:
                logprobs[position] = logprob_or_minus_inf(entries[known[position]].logprob)
            else:
                missing.append(position)
                context = [*prompt_ids, *completion.tokens[:position]]
                logprobs[position] = await self._rescored(context, token)
        return Generation(
            token_ids=completion.tokens,
            logprobs=logprobs,
            text=completion.content,
            finish_reason=finish_reason,
            stop_reason=completion.stopping_word or None,
            end_token_id=completion.tokens[-1] if completion.stop_type == "eos" and completion.tokens else None,
            rescored=tuple(missing),
        )

    async def _rescored(self, context: Sequence[int], token: int) -> float:
        """The raw logprob of `token` after `context`, from the alternatives of a forced one-token completion."""
        if self._harmless_id is None:
            ids = await self.tokenize(HARMLESS_TEXT, add_special_tokens=False)
            if not ids:
                raise ServerContractError(f"{self.label} has no token for {HARMLESS_TEXT!r}")
            self._harmless_id = ids[-1]
        for alternatives in (*ALTERNATIVES_ASKED, self.info.vocab_size or ALTERNATIVES_ASKED[-1]):
            payload = {
                "prompt": context,
                "n_predict": 1,
                "temperature": 0.0,
                "logit_bias": [[self._harmless_id, FORCING_BIAS]],
                "n_probs": alternatives,
                "return_tokens": True,
                "cache_prompt": True,
            }
            reply = await self.http.post("/completion", payload)
            entries = self.http.decode(reply.body, _Completion, what="a completion").completion_probabilities
            for entry in entries[:1]:
                for alternative in entry.top_logprobs:
                    if alternative.id == token:
                        return logprob_or_minus_inf(alternative.logprob)
        raise ServerContractError(f"{self.label} gives no logprob for the token {token} that it sampled")

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Not offered: llama.cpp's server has no prompt logprobs."""
        raise NotImplementedError(f"{self.label}: llama.cpp's server gives no logprobs of prompt tokens")

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Not offered, likewise."""
        raise NotImplementedError(
            f"{self.label}: llama.cpp's server gives no logprobs of prompt tokens; {SCORING_HINT}"
        )


def certain_positions(tokens: Sequence[int], entry_ids: Sequence[int]) -> dict[int, int] | None:
    """Position in `tokens` → index of the entry that surely belongs to it; None when the entries do not fit at all.

    The entries are a subsequence of the tokens. An entry whose earliest and latest possible place agree belongs there;
    the others could belong to several, so none is assigned.
    """
    if list(tokens) == list(entry_ids):
        return {position: position for position in range(len(tokens))}
    earliest = _earliest_places(tokens, entry_ids)
    backwards = _earliest_places(tokens[::-1], entry_ids[::-1])
    if earliest is None or backwards is None:
        return None
    latest = [len(tokens) - 1 - place for place in reversed(backwards)]
    return {first: index for index, (first, last) in enumerate(zip(earliest, latest, strict=True)) if first == last}


def _earliest_places(tokens: Sequence[int], entry_ids: Sequence[int]) -> list[int] | None:
    places: list[int] = []
    position = 0
    for entry_id in entry_ids:
        while position < len(tokens) and tokens[position] != entry_id:
            position += 1
        if position == len(tokens):
            return None
        places.append(position)
        position += 1
    return places
