"""Breaches of the contract between server and client: what a real server should never send, and once did."""

import math

from tests.servers.model import Choice

NAMES = (
    "missing_token_ids",
    "missing_logprobs",
    "short_logprobs",
    "long_logprobs",
    "nan_logprob",
    "positive_logprob",
    "null_logprob",
    "minus_9999",
    "float32_min",
    "too_few_choices",
    "too_many_choices",
    "wrong_prompt_echo",
    "null_finish_reason",
    "abort_finish",
    "truncated_json",
    "wrong_tokenizer",
)
VALUES: dict[str, float | None] = {
    "nan_logprob": math.nan,
    "positive_logprob": 0.5,
    "null_logprob": None,
    "minus_9999": -9999.0,
    "float32_min": -3.4028234663852886e38,
}


def mutate_choices(choices: list[Choice], name: str) -> list[Choice]:
    """The choices with the breach applied: to the middle token of the last choice, or to their number."""
    last = choices[-1]
    middle = len(last.logprobs or ()) // 2
    if name == "too_few_choices":
        return choices[:-1]
    if name == "too_many_choices":
        return [*choices, last]
    if name == "missing_token_ids":
        last.ids = None
    elif name == "missing_logprobs":
        last.logprobs = None
    elif name == "null_finish_reason":
        last.finish = None
    elif name == "abort_finish":
        last.finish = "abort"
    elif last.logprobs:
        if name == "short_logprobs":
            del last.logprobs[middle]
        elif name == "long_logprobs":
            last.logprobs.insert(middle, last.logprobs[middle])
        elif name in VALUES:
            last.logprobs[middle] = VALUES[name]
    return choices


def broken_echo(prompt: list[int]) -> list[int]:
    """A prompt that is not the one sent: its last token is missing."""
    return prompt[:-1]
