"""How to reach one server, as users of the Python API write it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from managed_cli.backends.base import BackendConfig
from managed_cli.backends.embedded import DEFAULT_SLOT_CONTEXT, DEFAULT_SLOTS, EngineConfig
from managed_cli.backends.registry import DEFAULT_BASE_URLS
from managed_cli.backends.secrecy import checked_key, refuse_credentials

ServerType = Literal["vllm", "sglang", "trl", "llamacpp", "local", "openai"]


class APIServerConfig(BaseModel):
    """One inference server.

    Attributes:
        server_type: which program answers there; `local` starts the embedded engine.
        base_url: its address; None takes the type's usual one.
        model_name: model to ask for; None takes the one the server has. For `local`, the path of a GGUF file.
        tokenizer_name: directory or Hugging Face name; None takes what the server names.
        api_key: sent as a bearer token, never shown.
        timeout: seconds to wait for a reply; None waits as long as the server generates.
        wait_for_server: seconds to wait for a server that is still loading.
        context_length: most prompt + completion tokens, for servers that do not say.
        nonfinite: `keep` records a sampled -inf; `fail` fails the sample.
        probe_logprobs_mode: sample a token or two to learn the logprobs mode; without, it is recorded as unknown.
        slots, slot_context: for `local`: sequences decoded at once, tokens of context for each.

    Raises:
        ConfigError: `base_url` holds a user name or a password, or `api_key` cannot be sent; neither is shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    server_type: ServerType = "local"
    base_url: str | None = None
    model_name: str | None = None
    tokenizer_name: str | None = None
    api_key: SecretStr | None = None
    timeout: float | None = Field(default=None, gt=0)
    wait_for_server: float = Field(default=0.0, ge=0)
    context_length: int | None = Field(default=None, ge=1)
    nonfinite: Literal["fail", "keep"] = "fail"
    max_connections: int = Field(default=1024, ge=1)
    slots: int = Field(default=DEFAULT_SLOTS, ge=1)
    slot_context: int = Field(default=DEFAULT_SLOT_CONTEXT, ge=64)
    probe_logprobs_mode: bool = True

    @field_validator("base_url")
    @classmethod
    def _without_credentials(cls, base_url: str | None) -> str | None:
        if base_url is not None:
            refuse_credentials(base_url)
        return base_url

    @field_validator("api_key")
    @classmethod
    def _that_can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        key = "" if api_key is None else api_key.get_secret_value()
        return SecretStr(checked_key(key, "api_key")) if key else None

    def backend_config(self) -> BackendConfig:
        """The same, as the backends take it."""
        return BackendConfig(
            base_url=self.base_url or DEFAULT_BASE_URLS[self.server_type],
            model=self.model_name,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            timeout=self.timeout,
            keep_nonfinite=self.nonfinite == "keep",
            max_connections=self.max_connections,
            context_length=self.context_length,
            probe_logprobs_mode=self.probe_logprobs_mode,
        )

    def engine_config(self) -> EngineConfig:
        """The same, for the embedded engine."""
        return EngineConfig(
            model=self.model_name,
            slots=self.slots,
            context_length=self.context_length or self.slot_context,
            keep_nonfinite=self.nonfinite == "keep",
        )
