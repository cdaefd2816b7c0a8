"""vLLM: `/v1/completions` with token ids in and out, as a stock `vllm serve` offers it.

What its replies mean (vLLM 0.32, and 0.17 to 0.27 by their source):
- the end-of-turn token is in `token_ids` and has a logprob, but is not in `text`; then `stop_reason` is null,
  or the id when it is not the first end-of-turn id of the model;
- after a stop string, `token_ids` hold the tokens that completed it, and `text` is cut before it;
- `prompt_logprobs` is keyed by id, holds the prompt's own token first and then the ranks 1 … k, and is never
  affected by temperature; position 0 is null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import msgspec

from managed_cli.backends.base import NOT_PROBED, HttpBackend
from managed_cli.backends.numbers import logprob_or_minus_inf
from managed_cli.backends.token_logprobs import check_positions, checked_token_logprobs
from managed_cli.backends.vllm_on_cpu import StepBudget, runs_on_cpu
from managed_cli.errors import ServerContractError, ServerRefused
from managed_cli.sent_prompt import NO_ECHO, SentPrompt
from managed_cli.types import (
    Generation,
    GenerationReply,
    LogprobsMode,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

PROBE_PROMPT = "The"
"""Any short text does: the probe compares two answers of one server with each other."""

PROBE_TOLERANCE = 1e-3
"""Far above the noise between two identical requests, far below what a temperature of 2 does to a logprob."""

TOKEN_ID_PREFIX = "token_id:"
"""How vLLM writes a token when asked for ids instead of text (`return_tokens_as_token_ids`)."""


class _SampledLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _SampledChoice(msgspec.Struct):
    """A choice with what a row needs of it: what is not named here is passed over unread, in half the time."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: _SampledLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = NO_ECHO


class _Sampled(msgspec.Struct):
    choices: list[_SampledChoice]
    model: str | None = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float | None
    rank: int | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: _Logprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = NO_ECHO
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class VLLMBackend(HttpBackend):
    """A `vllm serve` of any recent version, without special flags."""

    server_type: ClassVar[str] = "vllm"
    _step_budget: StepBudget | None = None
    _served: frozenset[str] = frozenset()

    async def probe(self) -> ServerInfo:
        """What the server says of itself, its logprobs mode found by two one-token requests.

        Raises:
            ServerRefused: it does not serve `config.model`; the message lists what it serves.
            ServerContractError: what answers there is not a vLLM server.
        """
        models = self.http.decode((await self.http.get("/v1/models")).body, _Models, what="a model list").data
        model = self._chosen_model(models)
        self._served = frozenset(listed.id for listed in models)
        base = next((m for m in models if m.id == model.parent), model)
        info = ServerInfo(
            server_type=self.server_type,
            base_url=self.base_url,
            model=model.id,
            tokenizer_name=base.root or base.id,
            context_length=model.max_model_len or base.max_model_len,
            version=await self._version(),
        )
        self._info = info
        self._step_budget = StepBudget() if await self._runs_on_cpu() else None
        mode, source = await self._probed_logprobs_mode(info.model)
        self._info = dataclasses.replace(info, logprobs_mode=mode, logprobs_mode_source=source)
        return self._info

    async def _runs_on_cpu(self) -> bool:
        try:
            return runs_on_cpu((await self.http.get("/metrics")).body.decode("utf-8", "replace"))
        except ServerRefused:
            return False  # it has no metrics, or guards them

    def _chosen_model(self, models: Sequence[_Model]) -> _Model:
        if not models:
            raise ServerContractError(f"{self.label} lists no model")
        if self.config.model is None:
            return next((m for m in models if m.parent is None), models[0])
        for model in models:
            if model.id == self.config.model:
                return model
        served = ", ".join(m.id for m in models)
        raise ServerRefused(
            f"{self.label} does not serve the model {self.config.model!r}",
            status=404,
            details=[f"it serves: {served}"],
            hint="leave --model away to use what the server has",
        )

    async def _version(self) -> str | None:
        try:
            reply = await self.http.get("/version")
        except ServerRefused:
            return None
        return self.http.decode(reply.body, _Version, what="a version").version

    async def _probed_logprobs_mode(self, model: str) -> tuple[LogprobsMode, str]:
        if not self.config.probe_logprobs_mode:
            return NOT_PROBED
        plain = await self._top_two(model, temperature=1.0, top_k=-1)
        warm = await self._top_two(model, temperature=2.0, top_k=2)
        if plain is None or warm is None:
            return LogprobsMode.UNKNOWN, "the server would not be probed"
        return logprobs_mode_of(plain, warm), "probed at two temperatures"

    async def _top_two(self, model: str, *, temperature: float, top_k: int) -> list[float] | None:
        """The two highest logprobs of the token after `PROBE_PROMPT`, best first; None when refused."""
        payload = {
            "model": model,
            "prompt": PROBE_PROMPT,
            "max_tokens": 1,
            "n": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": 0,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }
        try:
            reply = await self.http.post("/v1/completions", payload)
        except ServerRefused as error:
            if error.status in (401, 403, 404):
                raise
            return None
        choices = self.http.decode(reply.body, _Completion, what="a completion").choices
        if not choices or choices[0].logprobs is None or not choices[0].logprobs.top_logprobs:
            return None
        best = choices[0].logprobs.top_logprobs[0] or {}
        return sorted(map(logprob_or_minus_inf, best.values()), reverse=True)[:2]

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The server's own ids of `text`; None where it has no `/tokenize`."""
        payload = {"model": self.info.model, "prompt": text, "add_special_tokens": add_special_tokens}
        try:
            reply = await self.http.post("/tokenize", payload)
        except ServerRefused:
            return None
        return self.http.decode(reply.body, _Tokens, what="tokens").tokens

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """`sampling.n` choices in choice order.

        Raises:
            PromptRejected: the prompt must not be sent.
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        sampling = self.admitted(prompt_ids, sampling)
        budget = self._step_budget
        if budget is None:
            return await self._generate(prompt_ids, sampling)
        needed = budget.needed(len(prompt_ids), sampling.n)
        if needed > budget.tokens:
            sampling = msgspec.structs.replace(sampling, seed=None)
        async with budget.taken(needed):
            return await self._generate(prompt_ids, sampling)

    async def _generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        sent = SentPrompt.of(prompt_ids)
        reply = await self.http.post("/v1/completions", self._payload(sent, sampling))
        sampled = self.http.decode(sent.cut_from(reply.body), _Sampled, what="a completion")
        if sampled.model is not None and sampled.model not in self._served:
            raise ServerContractError(f"{self.label} answered with the model {sampled.model!r}, which it does not list")
        choices = sampled.choices
        numbers = [choice.index for choice in choices]
        if len(choices) == sampling.n and numbers != list(range(sampling.n)):
            if sorted(numbers) != list(range(sampling.n)):
                raise ServerContractError(f"{self.label} numbered its choices {numbers}")
            choices.sort(key=lambda choice: choice.index)
        for choice in choices:
            if choice.token_ids is None or choice.prompt_token_ids == NO_ECHO:
                raise ServerContractError(
                    f"{self.label} sent no token ids for choice {choice.index}",
                    hint="vLLM sends them (`return_token_ids`) from 0.10.2 on",
                )
            self.check_echo(sent, choice.prompt_token_ids, choice=choice.index)
        return self.reply_of(sampling, [self._generation(choice) for choice in choices], reply.attempts)

    def _payload(self, prompt: SentPrompt, sampling: SamplingParams) -> dict[str, object]:
        return {
            "model": self.info.model,
            "prompt": prompt.raw,
            **sampling_fields(sampling),
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _generation(self, choice: _SampledChoice) -> Generation:
        if choice.logprobs is None or choice.token_ids is None:
            raise ServerContractError(f"{self.label} sent no logprobs for choice {choice.index}")
        if choice.finish_reason is None:
            raise ServerContractError(f"{self.label} sent no finish reason for choice {choice.index}")
        return Generation(
            token_ids=choice.token_ids,
            logprobs=cast("list[float]", choice.logprobs.token_logprobs),  # nulls: see `reply_of`
            text=choice.text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            end_token_id=end_token_id(choice.finish_reason, choice.stop_reason, choice.token_ids),
        )

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Top-k alternatives at every position of the prompt, raw (before temperature).

        Raises:
            ServerContractError: a position or a rank is missing.
        """
        entries = await self._scored_prompt(prompt_ids, top_k)
        rows = [self._ranked(entry, top_k, position) for position, entry in enumerate(entries)]
        return self.prompt_logprobs_of(prompt_ids, top_k, rows)

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The raw logprob of every id after those before it: [P - 1]. One token more must fit into the context.

        Raises:
            ServerContractError: a position is missing, or holds no logprob of its own token.
        """
        entries, own = await self._scored_prompt(token_ids, 0), []
        check_positions(self.label, token_ids, len(entries) - 1)
        for token, entry in zip(token_ids[1:], entries[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise ServerContractError(f"{self.label} sent no logprob of the prompt's own id {token}")
            own.append(entry[str(token)].logprob)
        return checked_token_logprobs(self.label, token_ids, own)

    async def _scored_prompt(
        self, prompt_ids: Sequence[int], top_k: int
    ) -> Sequence[Mapping[str, _PromptLogprob] | None]:
        """What the reply holds for each position: the prompt's own token, and the ranks 1 … `top_k`."""
        sampling = self.admitted(prompt_ids, SamplingParams(max_tokens=1, temperature=0.0))
        sent = SentPrompt.of(prompt_ids)
        payload = {**self._payload(sent, sampling), "prompt_logprobs": top_k}
        async with contextlib.AsyncExitStack() as held:
            if self._step_budget is not None:
                await held.enter_async_context(self._step_budget.taken(StepBudget.needed(len(prompt_ids), 1)))
            reply = await self.http.post("/v1/completions", payload)
        choices = self.http.decode(reply.body, _Completion, what="prompt logprobs").choices
        if len(choices) != 1 or choices[0].prompt_logprobs is None:
            raise ServerContractError(f"{self.label} sent no prompt logprobs")
        self.check_echo(sent, choices[0].prompt_token_ids)
        return choices[0].prompt_logprobs

    def _ranked(self, entry: Mapping[str, _PromptLogprob] | None, top_k: int, position: int) -> list[tuple[int, float]]:
        if position == 0:
            return []
        ranked = sorted(
            (value.rank, int(token), logprob_or_minus_inf(value.logprob))
            for token, value in (entry or {}).items()
            if value.rank is not None and value.rank <= top_k
        )
        if [rank for rank, _, _ in ranked] != list(range(1, top_k + 1)):
            raise ServerContractError(
                f"{self.label} sent the ranks {[rank for rank, _, _ in ranked]} at prompt position {position}, "
                f"not 1 to {top_k}"
            )
        return [(token, logprob) for _, token, logprob in ranked]


def sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    """Every sampling parameter under vLLM's name; none is left to the server's generation config."""
    return {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def end_token_id(finish_reason: str, stop_reason: int | str | None, token_ids: Sequence[int]) -> int | None:
    """The id that ended a choice: the last one, unless a stop string or a limit ended it."""
    if finish_reason != "stop" or isinstance(stop_reason, str) or not token_ids:
        return None
    return token_ids[-1]


def logprobs_mode_of(plain: Sequence[float], warm: Sequence[float]) -> LogprobsMode:
    """The mode, from the two best logprobs at temperature 1 and at temperature 2 with top_k = 2.

    The same values: raw. All probability on the two that top_k keeps: processed. Else only the temperature acted.
    """
    if len(plain) < 2 or len(warm) < 2:
        return LogprobsMode.UNKNOWN
    if all(abs(a - b) <= PROBE_TOLERANCE for a, b in zip(plain, warm, strict=True)):
        return LogprobsMode.RAW
    if abs(math.fsum(math.exp(value) for value in warm) - 1.0) <= PROBE_TOLERANCE:
        return LogprobsMode.PROCESSED
    return LogprobsMode.TEMPERATURE
