"""OpenAI endpoints: text in, text out. They give no token ids, so nothing can be recorded from them as data.

Only what OpenAI accepts is sent. `/v1/chat/completions` calls the limit `max_completion_tokens`; a server of the same
shape that refuses that name is sent `max_tokens` from then on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from managed_cli.backends._http import Reply
from managed_cli.backends.base import BackendConfig, HttpBackend
from managed_cli.backends.token_logprobs import SCORING_HINT
from managed_cli.errors import ConfigError, ServerContractError, ServerRefused
from managed_cli.types import (
    GenerationReply,
    Message,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

CHAT_LIMIT = "max_completion_tokens"
OLDER_CHAT_LIMIT = "max_tokens"

REFUSED_PARAMETER_STATUSES = (400, 422)
"""How servers refuse a parameter that they do not have."""

NAMED_MODELS = 8
"""How many of a server's models an error message lists."""

NO_TOKEN_IDS = (
    "OpenAI endpoints take and give text, no token ids, so nothing from there can be recorded as token-aligned data; "
    "use a server that gives them: vllm, sglang, trl, llamacpp or local"
)

NEUTRAL = SamplingParams()
"""Settings that change nothing: what OpenAI has no parameter for must be left at these."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice:
    """One choice: its text and its finish reason, in OpenAI's words."""

    text: str
    finish_reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """All choices for one prompt, in choice order.

    Attributes:
        prompt_tokens: as the server counted them; None where it does not say.
        completion_tokens: over all choices; None where it does not say.
        sampling: what was sent.
        server: base URL that answered.
        attempts: HTTP requests it took, retries included.
    """

    choices: tuple[TextChoice, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    sampling: SamplingParams
    server: str
    attempts: int = 1


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    text: str | None = None
    message: _Message | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAIBackend(HttpBackend):
    """OpenAI, or a server that speaks as it does; text only."""

    server_type: ClassVar[str] = "openai"
    health_path = "/v1/models"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._chat_limit = CHAT_LIMIT

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the server answers; a server without a model list is ready too.

        Raises:
            ServerUnreachable: it does not answer within `seconds` (0: one look).
            ServerRefused: it wants another key.
        """
        try:
            await super().wait_until_ready(seconds)
        except ServerRefused as error:
            if error.status not in (404, 405):
                raise

    async def probe(self) -> ServerInfo:
        """The model to ask for: the configured one, else the only one that the server lists.

        Raises:
            ConfigError: no model is configured, and the server lists none or several.
            ServerRefused: it wants another key.
        """
        self._info = ServerInfo(
            server_type=self.server_type,
            base_url=self.base_url,
            model=self.config.model or await self._only_model(),
            context_length=self.config.context_length,
            logprobs_mode_source="OpenAI endpoints give no logprobs of token ids",
        )
        return self._info

    async def _only_model(self) -> str:
        reply = await self.http.get("/v1/models")
        names = [model.id for model in self.http.decode(reply.body, _Models, what="a model list").data]
        if len(names) != 1:
            more = ", …" if len(names) > NAMED_MODELS else ""
            raise ConfigError(
                f"{self.label} serves {len(names)} models; one must be named",
                details=[f"it serves: {', '.join(names[:NAMED_MODELS])}{more}"] if names else [],
                hint="name it with --model",
            )
        return names[0]

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for settings that OpenAI has no parameter for."""
        unknown = [
            name
            for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
            if getattr(sampling, name) != getattr(NEUTRAL, name)
        ]
        if unknown:
            raise ConfigError(
                f"{self.label} has no {', '.join(unknown)}", hint="leave them at their defaults, which change nothing"
            )

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams) -> TextReply:
        """The assistant's next message, `sampling.n` times; `""` where a message has no content.

        Raises:
            ConfigError: a setting that OpenAI does not have.
            ServerUnreachable, ServerRefused, ServerContractError: as their names say.
        """
        self.check_sampling(sampling)
        payload = {"model": self.info.model, "messages": messages, **_fields(sampling)}
        try:
            reply = await self._post_chat(payload, sampling)
        except ServerRefused as error:
            refused = error.status in REFUSED_PARAMETER_STATUSES and any(CHAT_LIMIT in line for line in error.details)
            if not refused or self._chat_limit != CHAT_LIMIT:
                raise
            self._chat_limit = OLDER_CHAT_LIMIT
            reply = await self._post_chat(payload, sampling)
        return self._text_reply(reply, sampling)

    async def _post_chat(self, payload: dict[str, object], sampling: SamplingParams) -> Reply:
        return await self.http.post("/v1/chat/completions", {**payload, self._chat_limit: sampling.max_tokens})

    async def complete(self, prompt: str, sampling: SamplingParams) -> TextReply:
        """What follows `prompt`, `sampling.n` times. Errors as `chat`."""
        self.check_sampling(sampling)
        payload = {
            "model": self.info.model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            **_fields(sampling),
        }
        return self._text_reply(await self.http.post("/v1/completions", payload), sampling)

    def _text_reply(self, reply: Reply, sampling: SamplingParams) -> TextReply:
        completion = self.http.decode(reply.body, _Completion, what="a completion")
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        if len(choices) != sampling.n:
            raise ServerContractError(f"{self.label} sent {len(choices)} choices for n={sampling.n}")
        usage = completion.usage or _Usage()
        return TextReply(
            choices=tuple(self._text_choice(index, choice) for index, choice in enumerate(choices)),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            sampling=sampling,
            server=self.base_url,
            attempts=reply.attempts,
        )

    def _text_choice(self, index: int, choice: _Choice) -> TextChoice:
        if choice.finish_reason is None:
            raise ServerContractError(f"{self.label} sent no finish reason for choice {index}")
        if choice.message is None and choice.text is None:
            raise ServerContractError(f"{self.label} sent no text for choice {index}")
        text = choice.text if choice.message is None else choice.message.content
        return TextChoice(text=text or "", finish_reason=choice.finish_reason)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Not offered: there are no token ids."""
        raise NotImplementedError(NO_TOKEN_IDS)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """Not offered: there are no token ids; `chat` and `complete` give text."""
        raise NotImplementedError(NO_TOKEN_IDS)

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Not offered: there are no token ids."""
        raise NotImplementedError(NO_TOKEN_IDS)

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Not offered: there are no token ids."""
        raise NotImplementedError(f"{NO_TOKEN_IDS}; {SCORING_HINT}")


def _fields(sampling: SamplingParams) -> dict[str, object]:
    """The sampling parameters that OpenAI has, the limit aside, which its endpoints name differently."""
    fields: dict[str, object] = {"n": sampling.n, "temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields
