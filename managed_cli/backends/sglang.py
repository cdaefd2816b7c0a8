"""SGLang: its native `/generate` with token ids in and out.

What its replies mean (SGLang 0.5.23, found by asking it and by its source):
- the end-of-turn token is in `output_ids` and has a logprob, but is not in `text`; `matched` is then its id;
- after a stop string, `output_ids` hold the tokens that completed it, and `text` is cut before it;
- an aborted request is HTTP 200 with part of an answer, and where sampling met a NaN the server puts an end token
  in place of the sampled one and says that the string "NaN happened" stopped it: neither is data;
- logprobs are taken after temperature and before top_k, top_p and min_p; greedy ones are raw, and so are all with
  `SGLANG_RETURN_ORIGINAL_LOGPROB=1`. Prompt logprobs are raw;
- behind a prompt that nearly fills the context it samples two tokens fewer than asked for and than would fit;
- `top_k = 1` is greedy too, with logprobs that depend on what else is sampled at the time unless the temperature is 0;
- seeds count only with `--enable-deterministic-inference`; there, choices of one request share their seed, and
  requests without a seed share one as well;
- an id outside the vocabulary ends the server.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar, TypeVar, cast

import msgspec

from managed_cli.backends.base import NOT_PROBED, BackendConfig, HttpBackend
from managed_cli.backends.numbers import logprob_or_minus_inf
from managed_cli.backends.token_logprobs import checked_token_logprobs
from managed_cli.backends.vllm import end_token_id, logprobs_mode_of
from managed_cli.errors import ConfigError, PromptRejected, ServerContractError, ServerRefused
from managed_cli.sent_prompt import NO_ECHO, SentPrompt
from managed_cli.types import (
    Generation,
    GenerationReply,
    LogprobsMode,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

PROBE_IDS = (1,)
"""A prompt that every vocabulary has: the probe compares two answers of one server with each other."""

GREEDY_TOP_K = 1
"""`top_k` that leaves one token to choose from."""

NEUTRAL_SAMPLERS: dict[str, object] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "no_stop_trim": False,
}
"""Settings a server may have other defaults for (`--preferred-sampling-params`); sent, so that none is left to it."""

SEED_NOT_KNOWN = re.compile(r"(unknown field|unexpected keyword argument)\W+sampling_seed")
"""How a server older than seeds refuses the key."""

T = TypeVar("T")

_Triple = tuple[float | None, int, str | None]
"""Logprob, id, and the token's text where it was asked for."""


class _FinishReason(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _WeightSpan(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    prompt_tokens: int
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    weight_versions: list[_WeightSpan] | None = None
    output_token_logprobs: list[_Triple] | None = None
    output_top_logprobs: list[list[_Triple] | None] | None = None
    input_token_logprobs: list[_Triple] | None = None
    input_top_logprobs: list[list[_Triple] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    text: str | None = None
    output_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = NO_ECHO


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    weight_version: str | None = None


class _ServerSettings(msgspec.Struct):
    """The few fields wanted of `/server_info`, which also holds the server's keys."""

    model_path: str | None = None
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    context_length: int | None = None
    max_req_input_len: int | None = None
    enable_deterministic_inference: bool = False
    version: str | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Tokens(msgspec.Struct):
    tokens: list[int]


class SGLangBackend(HttpBackend):
    """An SGLang server, without special flags."""

    server_type: ClassVar[str] = "sglang"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._takes_seed = True
        self._deterministic = False
        self._input_limit: int | None = None

    async def probe(self) -> ServerInfo:
        """What the server says of itself, its logprobs mode found by two one-token requests.

        Raises:
            ServerRefused: it does not serve `config.model`, or wants another key.
            ServerContractError: what answers there is not SGLang.
        """
        described = await self._first_answer(("/model_info", "/get_model_info"), _ModelInfo, "its model")
        settings = await self._first_answer(("/server_info", "/get_server_info"), _ServerSettings, "its settings")
        if described is None and settings is None:
            raise ServerContractError(
                f"{self.label} has neither /model_info nor /server_info",
                hint="is --server-type right for the server at this address?",
            )
        described, settings = described or _ModelInfo(), settings or _ServerSettings()
        listed = (await self._first_answer(("/v1/models",), _Models, "a model list") or _Models()).data
        self._deterministic = settings.enable_deterministic_inference
        self._input_limit = settings.max_req_input_len
        self._info = info = self._info_from(described, settings, listed)
        mode, source = await self._probed_logprobs_mode()
        self._info = dataclasses.replace(info, logprobs_mode=mode, logprobs_mode_source=source)
        return self._info

    def _info_from(self, described: _ModelInfo, settings: _ServerSettings, listed: Sequence[_Model]) -> ServerInfo:
        paths = [path for path in (described.model_path, settings.model_path) if path]
        tokenizers = [path for path in (described.tokenizer_path, settings.tokenizer_path) if path]
        names = (described.served_model_name, settings.served_model_name, *(model.id for model in listed))
        contexts = (*(model.max_model_len for model in listed), settings.context_length)
        return ServerInfo(
            server_type=self.server_type,
            base_url=self.base_url,
            model=self._chosen_model([*(name for name in names if name), *paths]),
            tokenizer_name=next(iter([*tokenizers, *paths]), None),
            context_length=next((length for length in contexts if length), None),
            version=settings.version,
            weight_version=described.weight_version,
        )

    async def _first_answer(self, paths: Sequence[str], type: type[T], what: str) -> T | None:
        """The reply of the first path that this version of the server has; None when it has none of them."""
        for path in paths:
            try:
                reply = await self.http.get(path)
            except ServerRefused as error:
                if error.status not in (404, 405):
                    raise
            else:
                return self.http.decode(reply.body, type, what=what, quoted=False)
        return None

    def _chosen_model(self, names: Sequence[str]) -> str:
        if not names:
            raise ServerContractError(f"{self.label} does not say which model it has")
        if self.config.model is None:
            return names[0]
        if self.config.model in names:
            return self.config.model
        raise ServerRefused(
            f"{self.label} does not serve the model {self.config.model!r}",
            status=404,
            details=[f"it serves: {', '.join(dict.fromkeys(names))}"],
            hint="leave --model away to use what the server has",
        )

    async def _probed_logprobs_mode(self) -> tuple[LogprobsMode, str]:
        if not self.config.probe_logprobs_mode:
            return NOT_PROBED
        plain = await self._top_two(SamplingParams(max_tokens=1, seed=0))
        warm = await self._top_two(SamplingParams(max_tokens=1, seed=0, temperature=2.0, top_k=2))
        if plain is None or warm is None:
            return LogprobsMode.UNKNOWN, "the server would not be probed"
        return logprobs_mode_of(plain, warm), "probed at two temperatures"

    async def _top_two(self, sampling: SamplingParams) -> list[float] | None:
        """The two highest logprobs of the token after `PROBE_IDS`, best first; None when refused."""
        try:
            reply = await self.http.post(
                "/generate", {**self._payload(SentPrompt(PROBE_IDS), sampling), "top_logprobs_num": 2}
            )
        except ServerRefused as error:
            if self._takes_seed and any(SEED_NOT_KNOWN.search(line) for line in error.details):
                self._takes_seed = False
                return await self._top_two(sampling)
            if error.status in (401, 403, 404):
                raise
            return None
        rows = self.http.decode(reply.body, _Reply, what="a completion").meta_info.output_top_logprobs or [None]
        return sorted((logprob_or_minus_inf(value) for value, _, _ in rows[0] or ()), reverse=True)[:2]

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The server's own ids of `text`; None where it has no `/tokenize`."""
        payload = {"model": self.info.model, "prompt": text, "add_special_tokens": add_special_tokens}
        try:
            reply = await self.http.post("/tokenize", payload)
        except ServerRefused:
            return None
        return self.http.decode(reply.body, _Tokens, what="tokens").tokens

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError where every choice would come out the same: deterministic inference without a seed."""
        if self._deterministic and sampling.seed is None and not _is_greedy(sampling):
            raise ConfigError(
                f"{self.label} runs with deterministic inference, which gives every unseeded request the same seed",
                hint="give a seed with --seed; each sample and choice then gets its own",
            )

    def admitted(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
        """As for every server; the prompt alone must also stay below SGLang's own limit, `max_req_input_len`."""
        sampling = super().admitted(prompt_ids, sampling)
        if self._input_limit is not None and len(prompt_ids) >= self._input_limit:
            raise PromptRejected(
                f"the prompt has {len(prompt_ids)} tokens, but {self.label} takes fewer than {self._input_limit}"
            )
        return sampling

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """`sampling.n` choices in choice order.

        Raises:
            ConfigError: the vocabulary is not known, or the settings cannot be taken.
            PromptRejected: the prompt must not be sent.
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        self.require_vocabulary()
        self.check_sampling(sampling)
        sampling = self.admitted(prompt_ids, sampling)
        if sampling.top_k == GREEDY_TOP_K:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        sent = SentPrompt.of(prompt_ids)
        reply = await self.http.post("/generate", self._payload(sent, sampling))
        # An object for one choice, a list for several.
        decoded = self.http.decode(sent.cut_from(reply.body), _Reply | list[_Reply], what="a completion")  # type: ignore[arg-type] # mypy takes a union for no type
        replies: list[_Reply] = decoded if isinstance(decoded, list) else [decoded]
        for choice in replies:
            self._check_prompt(sent, choice)
        choices = [self._generation(index, choice, sampling) for index, choice in enumerate(replies)]
        mode = LogprobsMode.RAW if _is_greedy(sampling) else None
        return self.reply_of(sampling, choices, reply.attempts, logprobs_mode=mode)

    def _payload(self, prompt: SentPrompt, sampling: SamplingParams) -> dict[str, object]:
        own_seeds = self._deterministic and sampling.n > 1 and sampling.seed is not None
        fields = self._sampling_fields(sampling)
        seeds = range(sampling.seed or 0, (sampling.seed or 0) + sampling.n)
        return {
            "input_ids": [prompt.raw] * sampling.n if own_seeds else prompt.raw,
            "sampling_params": [{**fields, "n": 1, "sampling_seed": seed} for seed in seeds] if own_seeds else fields,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
            "stream": False,
        }

    def _sampling_fields(self, sampling: SamplingParams) -> dict[str, object]:
        """Every sampling parameter under SGLang's name; a key that it does not know is refused with HTTP 400."""
        fields = {
            **NEUTRAL_SAMPLERS,
            "n": sampling.n,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        return {**fields, "sampling_seed": sampling.seed} if self._takes_seed else fields

    def _check_prompt(self, sent: SentPrompt, reply: _Reply) -> None:
        """Raise ServerContractError unless the server worked on the prompt; older ones echo only its length."""
        if reply.prompt_token_ids != NO_ECHO:
            self.check_echo(sent, reply.prompt_token_ids)
        if reply.meta_info.prompt_tokens != len(sent):
            raise ServerContractError(
                f"{self.label} worked on {reply.meta_info.prompt_tokens} prompt tokens, not on the {len(sent)} sent"
            )

    def _generation(self, index: int, reply: _Reply, sampling: SamplingParams) -> Generation:
        reason, triples = self._finish_reason(index, reply, sampling), reply.meta_info.output_token_logprobs
        if reply.output_ids is None:
            raise ServerContractError(f"{self.label} sent no token ids for choice {index}")
        if triples is None:
            raise ServerContractError(f"{self.label} sent no logprobs for choice {index}")
        ids = reply.output_ids
        if len(ids) == len(triples) and ids != [token for _, token, _ in triples]:
            raise ServerContractError(
                f"{self.label} sent logprobs of other tokens than the ones it sampled in choice {index}"
            )
        matched = reason.matched[-1] if isinstance(reason.matched, list) and reason.matched else reason.matched
        stop_reason = None if isinstance(matched, list) else matched
        return Generation(
            token_ids=ids,
            logprobs=cast("list[float]", [value for value, _, _ in triples]),  # nulls: see `reply_of`
            text=reply.text,
            finish_reason=reason.type,
            stop_reason=stop_reason,
            end_token_id=end_token_id(reason.type, stop_reason, ids),
            weight_version=_weight_version(reply.meta_info),
        )

    def _finish_reason(self, index: int, reply: _Reply, sampling: SamplingParams) -> _FinishReason:
        """Why the choice ended, once it is a reason that leaves data behind."""
        reason = reply.meta_info.finish_reason
        if reason is None:
            raise ServerContractError(f"{self.label} sent no finish reason for choice {index}")
        if reason.type == "abort":
            raise ServerContractError(
                f"{self.label} aborted choice {index} after {len(reply.output_ids or ())} tokens: {reason.message}"
            )
        if reason.type not in ("stop", "length"):
            raise ServerContractError(f"{self.label} ended choice {index} with the unknown reason {reason.type!r}")
        if isinstance(reason.matched, str) and reason.matched not in sampling.stop:
            raise ServerContractError(
                f"{self.label} stopped choice {index} at {reason.matched!r}, which is no stop string of this request"
            )
        return reason

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Top-k alternatives at every position of the prompt, raw (before temperature).

        Raises:
            ConfigError: the vocabulary is not known.
            ServerContractError: a position or an alternative is missing.
        """
        _, alternatives = await self._scored_prompt(prompt_ids, top_k)
        if alternatives is None:
            raise ServerContractError(f"{self.label} sent no prompt logprobs")
        rows = [[(token, logprob_or_minus_inf(value)) for value, token, _ in row or ()] for row in alternatives]
        return self.prompt_logprobs_of(prompt_ids, top_k, rows)

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The raw logprob of every id after those before it: [P - 1]. Raises as `prompt_logprobs` does."""
        own, _ = await self._scored_prompt(token_ids, 0)
        return checked_token_logprobs(self.label, token_ids, [value for value, _, _ in own[1:]])

    async def _scored_prompt(
        self, prompt_ids: Sequence[int], top_k: int
    ) -> tuple[list[_Triple], list[list[_Triple] | None] | None]:
        self.require_vocabulary()
        sampling = self.admitted(prompt_ids, SamplingParams(max_tokens=1, temperature=0.0))
        sent = SentPrompt.of(prompt_ids)
        payload = {
            **self._payload(sent, msgspec.structs.replace(sampling, max_tokens=0)),
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }
        reply = self.http.decode((await self.http.post("/generate", payload)).body, _Reply, what="prompt logprobs")
        self._check_prompt(sent, reply)
        own = reply.meta_info.input_token_logprobs
        if own is None:
            raise ServerContractError(f"{self.label} sent no prompt logprobs")
        if [token for _, token, _ in own] != list(prompt_ids):
            raise ServerContractError(f"{self.label} sent logprobs of another prompt than the one sent")
        return own, reply.meta_info.input_top_logprobs


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0.0 or sampling.top_k == GREEDY_TOP_K


def _weight_version(meta: _Meta) -> str | None:
    """The weights that sampled the choice; `a..b` where they were updated in the middle of it."""
    versions = dict.fromkeys(span.version for span in meta.weight_versions or ())
    return "..".join(versions) or meta.weight_version
