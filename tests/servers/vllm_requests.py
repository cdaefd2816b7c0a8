"""How vLLM reads a request to its OpenAI routes, and how it refuses one."""

import json
from dataclasses import replace
from typing import Any

from tests.servers.core import FakeServer, Refusal, Reply
from tests.servers.model import Sampling

STOP_LIMIT = 4  # entries in `stop`
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def refuse(message: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError") -> Refusal:
    return Refusal(Reply({"error": {"message": message, "type": kind, "param": param, "code": status}}, status))


def refuse_schema(problems: list[dict[str, object]]) -> Refusal:
    """vLLM's report of requests that do not fit the schema."""
    head = "1 validation error" if len(problems) == 1 else f"{len(problems)} validation errors"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return refuse(f"{head}:\n{lines}", str(problems[0]["loc"]), kind="Bad Request")


def refuse_value(message: str, param: str, value: object) -> Refusal:
    return refuse(f"{message} (parameter={param}, value={value})", param)


class VllmRequests(FakeServer):
    """The half of the server that reads; parameters left unset come from `--generation-config`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.defaults = SAMPLING_DEFAULTS | json.loads(self.options.generation_config or "{}")

    def prompts(self, body: dict[str, Any]) -> list[list[int]]:
        prompt = body.get("prompt")
        if prompt is None or prompt == "":
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise refuse(message, "prompt")
        if not prompt:
            raise refuse("You must pass at least one prompt")
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        special = body.get("add_special_tokens", True)
        return [self.tokenizer.encode(one, special) if isinstance(one, str) else one for one in prompt]

    def check_prompt(self, prompt: list[int]) -> None:
        for position, token in enumerate(prompt):
            if token < 0:
                raise refuse_schema(
                    [
                        {
                            "type": "greater_than_equal",
                            "loc": f"body.prompt.{position}",
                            "msg": "Input should be greater than or equal to 0",
                            "input": str(token),
                            "ctx": {"ge": 0},
                        }
                    ]
                )
            if token >= self.tokenizer.size:
                raise refuse(f"Token id {token} is out of vocabulary")
        if len(prompt) > self.limit:
            message = (
                f"This model's maximum context length is {self.limit} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            raise refuse_value(message, "input_tokens", len(prompt))
        if len(prompt) == self.limit:
            raise refuse_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)

    def number(self, body: dict[str, Any], name: str, default: Any = None, whole: bool = False) -> Any:
        """A parameter; unset ones come from the model's generation config, and numbers may come as strings."""
        value = body.get(name)
        if value is None:
            return self.defaults.get(name, default)
        try:
            return int(value) if whole else float(value)
        except ValueError:
            problem = {
                "type": "int_parsing",
                "loc": f"body.{name}",
                "msg": "Input should be a valid integer, unable to parse string as an integer",
                "input": value,
            }
            raise refuse_schema([problem]) from None

    def stops(self, body: dict[str, Any]) -> tuple[str, ...]:
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > STOP_LIMIT:
            shown, loc = f"<list of {len(stop)} items>", "body.stop"
            too_long = {
                "type": "too_long",
                "loc": loc,
                "msg": f"List should have at most {STOP_LIMIT} items after validation, not {len(stop)}",
                "input": shown,
                "ctx": {"field_type": "List", "max_length": STOP_LIMIT, "actual_length": len(stop)},
            }
            not_text = {"type": "string_type", "loc": loc, "msg": "Input should be a valid string", "input": shown}
            raise refuse_schema([not_text, too_long])
        if "" in stop:
            raise refuse("stop cannot contain an empty string.")
        return tuple(stop)

    def sampling(self, body: dict[str, Any], default_max_tokens: int | None) -> tuple[Sampling, int]:
        """What to sample, and n."""
        n = self.number(body, "n", 1, whole=True)
        stops = self.stops(body)
        temperature = self.number(body, "temperature")
        top_p = self.number(body, "top_p")
        max_tokens = self.number(body, "max_tokens", default_max_tokens, whole=True)
        if "max_tokens" in body and body["max_tokens"] is None:
            max_tokens = None
        if n < 1:
            raise refuse(f"n must be at least 1, got {n}.")
        if temperature < 0:
            raise refuse_value(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if not 0 < top_p <= 1:
            raise refuse_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
        if max_tokens is not None and max_tokens < 1:
            raise refuse_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
        if max_tokens is not None and max_tokens > self.limit:
            message = f"max_tokens={max_tokens} cannot be greater than max_model_len={self.limit}."
            raise refuse_value(f"{message} Please request fewer output tokens.", "max_tokens", max_tokens)
        if n > 1 and temperature == 0:
            raise refuse(f"n must be 1 when using greedy sampling, got {n}.")
        allowed = body.get("allowed_token_ids")
        sampling = Sampling(
            max_tokens=self.limit if max_tokens is None else max_tokens,
            temperature=temperature,
            top_k=self.number(body, "top_k", whole=True),
            top_p=top_p,
            min_p=self.number(body, "min_p"),
            seed=body.get("seed"),
            stop=stops,
            stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
            ignore_eos=bool(body.get("ignore_eos")),
            min_tokens=body.get("min_tokens") or 0,
            penalties=(
                self.number(body, "repetition_penalty"),
                self.number(body, "presence_penalty", 0.0),
                self.number(body, "frequency_penalty", 0.0),
            ),
            allowed=frozenset(allowed) if allowed else None,
            fixed_length=self.options.tokens_per_reply,
            keep_stop=bool(body.get("include_stop_str_in_output")),
        )
        return sampling, n

    def checked_logprobs(self, body: dict[str, Any], name: str, described: str) -> int | None:
        """How many alternatives are asked for; None means no logprobs at all."""
        count = body.get(name)
        if count is None:
            return None
        count = self.tokenizer.size if count == -1 else int(count)
        if 0 <= self.options.max_logprobs < count:
            allowed = self.options.max_logprobs
            message = f"Requested {described} of {count}, which is greater than max allowed: {allowed}"
            raise refuse_value(message, name, count)
        return count

    def check_model(self, body: dict[str, Any]) -> None:
        if body.get("model") not in (None, self.name):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.name}."
            raise refuse(message, "model", status=404, kind="NotFoundError")

    def fitting(self, sampling: Sampling, prompt: list[int]) -> Sampling:
        """The sampling whose `max_tokens` fits behind the prompt: vLLM shortens it without a word."""
        room = self.limit - len(prompt)
        if sampling.max_tokens <= room:
            return sampling
        return replace(sampling, max_tokens=room)
