"""What stands between a model's logits and a recorded logprob, read off what the row says of its sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from managed_cli.types import TOP_K_OFF, LogprobsMode

VLLM_ORDER = ("vllm", "trl")
"""Server types whose order is known: repetition penalty, temperature, min_p, top_k, top_p (vLLM 0.10 to 0.32)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """What is done to the logits before the log-softmax; the defaults do nothing."""

    temperature: float = 1.0
    top_k: int = TOP_K_OFF
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k != TOP_K_OFF or self.top_p < 1.0 or self.min_p > 0.0


RAW = Processing()


def sampling_of(metadata: Mapping[str, Any]) -> Processing | None:  # Any: free-form JSON values
    """The sampling parameters of a row; None where they are not all there."""
    sampling = metadata.get("sampling")
    if not isinstance(sampling, Mapping):
        return None
    names = [field.name for field in dataclasses.fields(Processing)]
    values = {name: sampling.get(name) for name in names}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values.values()):
        return None
    return Processing(**values)  # type: ignore[arg-type] # all of them are numbers


def find_processing(metadata: Mapping[str, Any]) -> Processing | str:  # Any: as above
    """How the row's logprobs come from the logits, or in words why that cannot be known here."""
    if metadata.get("dummy_tokens"):
        return "placeholders of the OpenAI dummy, not logprobs"
    mode, server_type = metadata.get("logprobs_mode", LogprobsMode.UNKNOWN), metadata.get("server_type")
    sampling = sampling_of(metadata)
    penalised = sampling is not None and sampling.repetition_penalty != 1.0
    if server_type == "sglang" and penalised:
        return "SGLang puts its repetition penalty into every logprob, over tokens that are not recorded"
    if mode == LogprobsMode.RAW or sampling == RAW:
        return RAW
    if sampling is None:
        return "the row does not say how it was sampled"
    temperature = sampling.temperature or 1.0  # greedy logprobs are taken at 1
    if mode == LogprobsMode.TEMPERATURE and not penalised:
        return Processing(temperature=temperature)
    if mode == LogprobsMode.PROCESSED and server_type in VLLM_ORDER:
        if sampling.temperature == 0.0 and sampling.filters:
            return "greedy, with filters that vLLM applies or not depending on what else it samples at the time"
        return dataclasses.replace(sampling, temperature=temperature)
    if mode in (LogprobsMode.PROCESSED, LogprobsMode.TEMPERATURE):
        return f"taken after filters, in an order that is not known of {server_type or 'its server'}"
    return "it is not known whether they were taken before or after temperature and filters"
