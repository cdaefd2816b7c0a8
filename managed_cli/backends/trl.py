"""TRL's `trl vllm-serve`, which is two servers.

Up to TRL 1.10 it is a server of TRL's own; from 1.11 on it starts `vllm serve`. Whichever answers is found out by
asking. The own server (TRL 0.29 to 1.10, by its source and by asking 1.10.0):
- takes ids from 0.29 on; before, it takes text and encodes it itself, so nothing can be recorded there;
- answers with ids and logprobs alone: no text, no finish reason, no model name, no limits;
- its alternatives are sorted by rank, so the sampled token need not come first; from TRL 0.23 to 0.28 there is one
  logprob per token instead;
- logprobs are those after temperature and filters: it starts vLLM with `logprobs_mode="processed_logprobs"`;
- -inf arrives as null, as JSON has no such number;
- it answers nothing else while it generates, `/health/` included, and takes one request at a time;
- a prompt that is too long, an id outside the vocabulary, or more alternatives than vLLM allows hang it for good:
  such requests must never be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from managed_cli.backends.base import NOT_PROBED, BackendConfig
from managed_cli.backends.numbers import logprob_or_minus_inf
from managed_cli.backends.token_logprobs import check_positions, checked_token_logprobs
from managed_cli.backends.vllm import VLLMBackend, logprobs_mode_of
from managed_cli.errors import ConfigError, ServerContractError, ServerRefused
from managed_cli.sent_prompt import SentPrompt
from managed_cli.types import (
    UNNAMED_MODEL,
    Generation,
    GenerationReply,
    LogprobsMode,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

OWN_HEALTH_PATH = "/health/"
"""With its slash: FastAPI answers the path without it with a redirect, and vLLM the path with it."""

VLLM_HEALTH_PATH = "/health"

NOT_THERE = (307, 308, 404, 405)
"""Statuses of a path that this dialect spells otherwise or has not."""

MOST_ALTERNATIVES = 20
"""vLLM's default `max_logprobs`, which TRL's own server leaves as it is; asking for more hangs it."""

PROBE_IDS = (1,)
"""A prompt that every vocabulary has."""

TRL_WITH_IDS = "TRL 0.29 or newer takes token ids and sends the ids it used; upgrade the server"


class _WorldSize(msgspec.Struct):
    world_size: int


class _Completions(msgspec.Struct):
    completion_ids: list[list[int]]
    prompt_ids: list[msgspec.Raw] | None = None
    logprobs: list[list[list[float | None] | float | None]] | None = None
    logprob_token_ids: list[list[list[int]]] | None = None


class _SequenceLogprobs(msgspec.Struct):
    logprobs: list[list[list[float | None]]] | None = None
    logprob_token_ids: list[list[list[int]]] | None = None


class TRLBackend(VLLMBackend):
    """`trl vllm-serve` of any version that takes token ids."""

    server_type: ClassVar[str] = "trl"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._own_server = False

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the health endpoint of either dialect answers 2xx.

        Raises:
            ServerUnreachable: it does not within `seconds` (0: one look).
            ServerRefused: it answers with an error that waiting will not change.
        """
        self.health_path = OWN_HEALTH_PATH
        try:
            await super().wait_until_ready(seconds)
        except ServerRefused as error:
            if error.status not in NOT_THERE:
                raise
            self.health_path = VLLM_HEALTH_PATH
            await super().wait_until_ready(seconds)

    async def probe(self) -> ServerInfo:
        """What the server says of itself: much where it is vLLM, next to nothing where it is TRL's own.

        Raises:
            ServerRefused: it takes no token ids, or does not serve `config.model`.
            ServerContractError: what answers there is neither.
        """
        try:
            await self.http.get("/v1/models")
        except ServerRefused as error:
            if error.status not in NOT_THERE:
                raise
            self._own_server = True
        else:
            self._own_server = False
        self.answers_while_generating = not self._own_server
        return await (self._probe_own_server() if self._own_server else super().probe())

    async def _probe_own_server(self) -> ServerInfo:
        try:
            reply = await self.http.get("/get_world_size/")
        except ServerRefused as error:
            raise ServerContractError(
                f"{self.label} has neither vLLM's /v1/models nor TRL's /get_world_size/",
                hint="is --server-type right for the server at this address?",
            ) from error
        self.http.decode(reply.body, _WorldSize, what="its world size")
        mode, source = await self._own_logprobs_mode()
        self._info = ServerInfo(
            server_type=self.server_type,
            base_url=self.base_url,
            model=self.config.model or UNNAMED_MODEL,
            context_length=self.config.context_length,
            logprobs_mode=mode,
            logprobs_mode_source=source,
        )
        return self._info

    async def _own_logprobs_mode(self) -> tuple[LogprobsMode, str]:
        if not self.config.probe_logprobs_mode:
            return NOT_PROBED
        plain = await self._own_top_two(SamplingParams(max_tokens=1, seed=0))
        warm = await self._own_top_two(SamplingParams(max_tokens=1, seed=0, temperature=2.0, top_k=2))
        mode = logprobs_mode_of(plain, warm)
        if mode is LogprobsMode.UNKNOWN:
            return mode, "the server sends no alternatives to probe with"
        return mode, "probed at two temperatures"

    async def _own_top_two(self, sampling: SamplingParams) -> list[float]:
        """The two highest logprobs of the token after `PROBE_IDS`, best first; fewer where the server sends fewer."""
        completions, _ = await self._complete({**_payload(SentPrompt(PROBE_IDS), sampling), "logprobs": 2})
        row = completions.logprobs[0][0] if completions.logprobs and completions.logprobs[0] else None
        values = [logprob_or_minus_inf(value) for value in row] if isinstance(row, list) else []
        return sorted(values, reverse=True)[:2]

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The server's own ids of `text`; None from TRL's own server, which has no way to tell."""
        return None if self._own_server else await super().tokenize(text, add_special_tokens=add_special_tokens)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for what the own server answers with a bare HTTP 500 (several greedy choices) or never."""
        if not self._own_server:
            return
        self.require_limits()
        if sampling.n > 1 and sampling.temperature == 0.0:
            raise ConfigError(
                f"{self.label} gives one choice at temperature 0, not {sampling.n}", hint="use -n 1 or a temperature"
            )

    def require_limits(self) -> None:
        """Raise ConfigError while something is not known without which the own server hangs or cannot be read."""
        if self.context_length is None:
            raise ConfigError(
                f"{self.label} hangs on a prompt that is too long, and does not say what is too long",
                hint="say it with --context-length (the server's --max-model-len)",
            )
        self.require_vocabulary()
        if not self.end_token_ids:
            raise ConfigError(
                f"{self.label} gives no finish reason, and the model's end-of-turn tokens are not known",
                hint="name its tokenizer with --tokenizer",
            )

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """`sampling.n` choices in choice order.

        Raises:
            ConfigError: a limit that the own server does not name is not known, or the settings cannot be taken.
            PromptRejected: the prompt must not be sent.
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        if not self._own_server:
            return await super().generate(prompt_ids, sampling)
        self.check_sampling(sampling)
        sampling = self.admitted(prompt_ids, sampling)
        sent = SentPrompt.of(prompt_ids)
        completions, attempts = await self._complete(_payload(sent, sampling))
        self._check_whole(sent, completions)
        choices = [
            self._own_generation(index, completions, sampling) for index in range(len(completions.completion_ids))
        ]
        return self.reply_of(sampling, choices, attempts)

    def _check_whole(self, sent: SentPrompt, completions: _Completions) -> None:
        """Raise ServerContractError unless the reply is to this prompt and has logprobs for each of its choices."""
        if completions.prompt_ids is None:
            raise ServerContractError(f"{self.label} did not say which prompt ids it used", hint=TRL_WITH_IDS)
        if len(completions.prompt_ids) != 1:
            raise ServerContractError(f"{self.label} echoed {len(completions.prompt_ids)} prompts for one")
        self.check_echo(sent, completions.prompt_ids[0])
        expected = len(completions.completion_ids)
        for values in (completions.logprobs or (), completions.logprob_token_ids):
            if values is not None and len(values) != expected:
                raise ServerContractError(f"{self.label} sent logprobs of {len(values)} choices for {expected}")

    async def _complete(self, payload: Mapping[str, object]) -> tuple[_Completions, int]:
        try:
            reply = await self.http.post("/generate/", payload)
        except ServerRefused as error:
            if error.status != 422:
                raise
            raise ServerRefused(
                f"{self.label} takes no token ids", status=422, details=error.details, hint=TRL_WITH_IDS
            ) from error
        return self.http.decode(reply.body, _Completions, what="completions"), reply.attempts

    def _own_generation(self, index: int, completions: _Completions, sampling: SamplingParams) -> Generation:
        ids = completions.completion_ids[index]
        finish_reason, stop_reason = self._inferred_finish(index, ids, sampling)
        return Generation(
            token_ids=ids,
            logprobs=self._sampled_logprobs(index, ids, completions),
            text=None,
            finish_reason=finish_reason,
            finish_reason_inferred=True,
            stop_reason=stop_reason,
            end_token_id=ids[-1] if self._ends_here(ids[-1], sampling) else None,
        )

    def _sampled_logprobs(self, index: int, ids: list[int], completions: _Completions) -> list[float]:
        """The logprob of each sampled id, found by the id where there are alternatives to choose from.

        A null among them is for `reply_of` to read as -inf.
        """
        rows = (completions.logprobs or [])[index]
        named = completions.logprob_token_ids[index] if completions.logprob_token_ids else None
        if named is not None and _sole_entries(named) == ids and len(rows) == len(ids):
            values = _sole_entries(rows)
            if values is not None:
                return values
        if len(rows) != len(ids) or (named is not None and len(named) != len(rows)):
            raise ServerContractError(f"{self.label} sent {len(rows)} logprobs for {len(ids)} tokens in choice {index}")
        logprobs = []
        for position, (token, row) in enumerate(zip(ids, rows, strict=True)):
            if not isinstance(row, list):
                logprobs.append(logprob_or_minus_inf(row))
                continue
            alternatives = named[position] if named else []
            if len(alternatives) != len(row) or token not in alternatives:
                raise ServerContractError(
                    f"{self.label} sent no logprob of the sampled id {token} at token {position} of choice {index}"
                )
            logprobs.append(logprob_or_minus_inf(row[alternatives.index(token)]))
        return logprobs

    def _ends_here(self, token: int, sampling: SamplingParams) -> bool:
        return token in self.end_token_ids or token in sampling.stop_token_ids

    def _inferred_finish(
        self, index: int, ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[str, str | int | None]:
        """Finish and stop reason, read off the ids; a stop string completed by the very last token shows as `length`.

        Raises:
            ServerContractError: the choice ended early at a token that ends nothing that is known here.
        """
        if not ids:
            raise ServerContractError(f"{self.label} sent no token ids for choice {index}")
        if self._ends_here(ids[-1], sampling):
            return "stop", None if ids[-1] in self.end_token_ids else ids[-1]
        if len(ids) > sampling.max_tokens:
            raise ServerContractError(
                f"{self.label} sent {len(ids)} tokens in choice {index}, more than the {sampling.max_tokens} asked for"
            )
        if len(ids) == sampling.max_tokens:
            return "length", None
        if sampling.stop:
            return "stop", sampling.stop[0] if len(sampling.stop) == 1 else None
        raise ServerContractError(
            f"{self.label} ended choice {index} after {len(ids)} of {sampling.max_tokens} tokens "
            f"at id {ids[-1]}, which is no end token known here",
            hint="is --context-length above the server's --max-model-len, or --tokenizer not the model's?",
        )

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Top-k alternatives at every position of the prompt, raw (before temperature).

        Raises:
            ConfigError: more alternatives than the own server survives, or a limit is not known.
            ServerRefused: TRL before 1.9 has no such endpoint.
            ServerContractError: a position or an alternative is missing.
        """
        if not self._own_server:
            return await super().prompt_logprobs(prompt_ids, top_k)
        if top_k > MOST_ALTERNATIVES:
            raise ConfigError(f"{self.label} gives at most {MOST_ALTERNATIVES} alternatives, not {top_k}")
        values, tokens = await self._sequence_logprobs(prompt_ids, top_k)
        # The prompt's own token stands behind the ranks 1 … k where it is not one of them.
        rows = [
            [(token, logprob_or_minus_inf(value)) for token, value in zip(ids[:top_k], row[:top_k], strict=True)]
            for ids, row in zip(tokens, values, strict=True)
        ]
        return self.prompt_logprobs_of(prompt_ids, top_k, [[], *rows])

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The raw logprob of every id after those before it: [P - 1]. Raises as `prompt_logprobs` does."""
        if not self._own_server:
            return await super().token_logprobs(token_ids)
        own = []
        values, tokens = await self._sequence_logprobs(token_ids, 1)
        check_positions(self.label, token_ids, len(values))
        for token, row, ids in zip(token_ids[1:], values, tokens, strict=True):
            if token not in ids:
                raise ServerContractError(f"{self.label} sent no logprob of the prompt's own id {token}")
            own.append(row[ids.index(token)])
        return checked_token_logprobs(self.label, token_ids, own)

    async def _sequence_logprobs(
        self, prompt_ids: Sequence[int], top_k: int
    ) -> tuple[list[list[float | None]], list[list[int]]]:
        """Logprobs and ids of every position from 1 on: the ranks 1 … `top_k`, then the prompt's own token."""
        self.require_limits()
        self.admitted(prompt_ids, SamplingParams(max_tokens=1))
        # Position 0 has none, so the "prompt" that needs no logprobs is one token long.
        payload = {"sequences": [prompt_ids], "prompt_lengths": [1], "top_logprobs": top_k, "temperature": 1.0}
        body = (await self.http.post("/get_sequence_logprobs/", payload)).body
        sent = self.http.decode(body, _SequenceLogprobs, what="prompt logprobs")
        if not sent.logprobs or not sent.logprob_token_ids:
            raise ServerContractError(f"{self.label} sent no prompt logprobs")
        values, tokens = sent.logprobs[0], sent.logprob_token_ids[0]
        if [len(row) for row in values] != [len(row) for row in tokens]:
            raise ServerContractError(f"{self.label} sent prompt logprobs that do not fit their ids")
        return values, tokens


def _sole_entries(rows: Sequence[Any]) -> list[Any] | None:  # Any: ids, or logprobs and nulls
    """What stands in each row, where each is a list of one; None where one is not. The usual reply, in a tenth."""
    try:
        return [entry for (entry,) in rows]
    except (TypeError, ValueError):
        return None


def _payload(prompt: SentPrompt, sampling: SamplingParams) -> dict[str, object]:
    """Every sampling parameter under the own server's name; what it has no field for goes to vLLM as it is."""
    return {
        "prompts": [prompt.raw],
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": 0,
        "generation_kwargs": {
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        },
    }
