"""SGLang 0.5's native wire format: `/generate`, its information routes, its four shapes of error.

Ids outside the vocabulary and empty text kill the process, as they kill the real one.
"""

import hashlib
import json
import time
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.core import Crash, FakeServer, Refusal, Reply
from tests.servers.model import NEGATIVE_INFINITY, Choice, Sampling

RECORDED = Path(__file__).parents[1] / "wire" / "sglang"
FLOAT32_MIN = -3.4028234663852886e38  # SGLang's spelling of -inf
RESERVED_TOKENS = 6  # of the context, which no prompt may use
DEFAULT_MAX_NEW_TOKENS = 128
FIELD_NAMES = (
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width "
    "watermark choice"
)
SAMPLING_FIELDS = tuple(FIELD_NAMES.split())
FIRST_LINE = 'File "/srv/http_server.py", line 928, in generate_request'


def refuse(message: str) -> Refusal:
    return Refusal(Reply({"error": {"message": message}}, 400))


def refuse_schema(problem: str) -> Refusal:
    message = f"1 validation error:\n  {problem}\n\n  {FIRST_LINE}\n    POST /generate [{problem}]"
    return Refusal(
        Reply({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400)
    )


class FakeSglang(FakeServer):
    kind: ClassVar[str] = "sglang"
    generation_paths: ClassVar[frozenset[str]] = frozenset({"/generate"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version = self.options.server_version or "0.5.23"
        self.weight_version = "default"
        empty = {"GET": lambda _: Reply()}
        model_info = {"GET": lambda _: Reply(self.model_info())}
        server_info = {"GET": lambda _: Reply(self.server_info())}
        tokenize = {"POST": self.tokenize}
        detokenize = {"POST": lambda body: Reply({"text": self.tokenizer.decode(body["tokens"], True)})}
        self.routes = {
            "/": {"GET": lambda _: Reply("SGLang is running")},
            "/health": empty,
            "/health_generate": empty,
            "/ping": empty,
            "/ready": empty,
            "/get_model_info": model_info,
            "/model_info": model_info,
            "/get_server_info": server_info,
            "/server_info": server_info,
            "/v1/models": {"GET": lambda _: Reply(self.models())},
            "/tokenize": tokenize,
            "/v1/tokenize": tokenize,
            "/detokenize": detokenize,
            "/v1/detokenize": detokenize,
            "/update_weight_version": {"POST": self.update_weight_version},
            "/generate": {"POST": self.completions},
        }

    def guarded(self, path: str) -> bool:
        return path not in ("/health", "/health_generate")

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        context = "{'error': 'unexpected character, expected a string key'}"
        return refuse_schema(
            f"{{'type': 'json_invalid', 'loc': ('body', {error.pos}), 'msg': 'JSON decode error', "
            f"'input': {{}}, 'ctx': {context}}}"
        ).reply

    def models(self) -> dict[str, object]:
        entry = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "sglang",
            "root": self.name,
            "parent": None,
            "max_model_len": self.limit,
        }
        return {"object": "list", "data": [entry]}

    def model_info(self) -> dict[str, object]:
        """The recorded reply with this server's facts in it."""
        ours = {"model_path": self.root, "served_model_name": self.name, "tokenizer_path": self.root}
        return _recorded("get_get_model_info") | ours | {"weight_version": self.weight_version}

    def server_info(self) -> dict[str, object]:
        """The recorded reply with this server's facts in it, the key that must not be logged among them."""
        return _recorded("get_get_server_info") | {
            "model_path": self.root,
            "tokenizer_path": self.root,
            "served_model_name": self.name,
            "context_length": self.limit,
            "max_req_input_len": self.limit - RESERVED_TOKENS,
            "api_key": self.options.api_key,
            "enable_deterministic_inference": self.options.deterministic_inference,
            "weight_version": self.weight_version,
            "version": self.version,
        }

    def update_weight_version(self, body: dict[str, Any]) -> Reply:
        self.weight_version = version = body["new_version"]
        return Reply({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    def tokenize(self, body: dict[str, Any]) -> Reply:
        if "messages" in body:
            ids = self.tokenizer.encode(self.tokenizer.render(body["messages"]), add_special_tokens=False)
        else:
            ids = self.tokenizer.encode(body["prompt"], body.get("add_special_tokens", True))
        ids = self.tokenized(ids)
        limit = self.tokenizer.config.get("model_max_length", self.limit)
        return Reply({"tokens": ids, "count": len(ids), "max_model_len": limit})

    # Requests.

    def prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """The prompts, and whether they came as a batch."""
        ids, text = body.get("input_ids"), body.get("text")
        if ids is None and text is None:
            raise refuse("Either text, input_ids or input_embeds should be provided.")
        if ids is None:
            texts = [text] if isinstance(text, str) else text
            if "" in texts:
                raise Crash
            return [self.tokenizer.encode(one) for one in texts], not isinstance(text, str)
        if not isinstance(ids, list):
            kind = type(ids).__name__
            message = f"must be list or null; got {kind}"
            raise refuse_schema(
                f"{{'type': 'value_error', 'loc': ('body', 'input_ids'), 'msg': 'Value error, {message}', "
                f"'input': {ids!r}, 'ctx': {{'error': ValueError('{message}')}}}}"
            )
        if not ids or ids == [[]]:
            raise refuse("input_ids cannot be empty.")
        return (ids, True) if isinstance(ids[0], list) else ([ids], False)

    def sampling(self, body: dict[str, Any]) -> tuple[Sampling, int]:
        """What to sample, and n; n = 0 is one choice."""
        for name in body:
            if name not in SAMPLING_FIELDS:
                expected = ", ".join(f"`{field}`" for field in SAMPLING_FIELDS)
                raise Refusal(Reply({"error": f"unknown field `{name}`, expected one of {expected}"}, 400))
        given = {name: value for name, value in body.items() if value is not None}
        temperature, top_p = given.get("temperature", 1.0), given.get("top_p", 1.0)
        max_new_tokens = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        top_k, stop = given.get("top_k", -1), given.get("stop", [])
        if not temperature >= 0:
            raise refuse(f"temperature must be a non-negative finite number, got {temperature}.")
        if not 0 < top_p <= 1:
            raise refuse(f"top_p must be in (0, 1], got {top_p}.")
        if max_new_tokens < 0:
            raise refuse(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
        sampling = Sampling(
            max_tokens=max_new_tokens,
            temperature=0.0 if top_k == 1 else temperature,  # top_k = 1 is greedy here, and its logprobs are raw
            top_k=top_k,
            top_p=top_p,
            min_p=given.get("min_p", 0.0),
            seed=given.get("sampling_seed"),
            stop=tuple([stop] if isinstance(stop, str) else stop),
            stop_token_ids=frozenset(given.get("stop_token_ids", ())),
            ignore_eos=given.get("ignore_eos", False),
            min_tokens=given.get("min_new_tokens", 0),
            penalties=tuple(given.get(f"{name}_penalty", 0.0) for name in ("repetition", "presence", "frequency")),
            fixed_length=self.options.tokens_per_reply,
            keep_stop=given.get("no_stop_trim", False),
        )
        return sampling, max(1, given.get("n", 1))

    def check_prompt(self, prompt: list[int], max_new_tokens: int, start: int) -> None:
        if any(not 0 <= token < self.tokenizer.size for token in prompt):
            raise Crash
        length, longest = len(prompt), self.limit - RESERVED_TOKENS
        if length >= self.limit:
            raise refuse(
                f"The input ({length} tokens) is longer than the model's context length ({self.limit} tokens)."
            )
        if length + max_new_tokens > self.limit:
            raise refuse(
                f"Requested token count exceeds the model's maximum context length of {self.limit} tokens. "
                f"You requested a total of {length + max_new_tokens} tokens: {length} tokens from the input messages "
                f"and {max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
                "messages or the completion to fit within the limit."
            )
        if length > longest:
            raise refuse(
                f"Input length ({length} tokens) exceeds the maximum allowed length ({longest} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            )
        if start > length:
            raise refuse(
                f"req.logprob_start_len={start} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={length}. Please use a smaller logprob_start_len."
            )

    def completions(self, body: dict[str, Any]) -> Reply:
        prompts, batched = self.prompts(body)
        asked = body.get("sampling_params") or {}
        entries: list[dict[str, Any]] = []
        several = batched
        for number, prompt in enumerate(prompts):
            sampling, n = self.sampling(asked[number] if isinstance(asked, list) else asked)
            start = body.get("logprob_start_len")
            start = -1 if start is None else start
            self.check_prompt(prompt, sampling.max_tokens, start)
            choices, echo = self.sample(prompt, sampling, n, same=self.options.deterministic_inference)
            entries += [self.choice(choice, echo, sampling, body, start, len(entries)) for choice in choices]
            several = several or n > 1
        return Reply(entries if several else entries[0] if entries else {})

    # Replies.

    def choice(
        self, choice: Choice, prompt: list[int], sampling: Sampling, body: dict[str, Any], start: int, index: int
    ) -> dict[str, Any]:
        length = len(choice.contexts)
        digest = hashlib.blake2b(repr((prompt, self.generations, index)).encode(), digest_size=16).hexdigest()
        meta: dict[str, Any] = {
            "id": body.get("rid") or digest,
            "finish_reason": self.finish_reason(choice),
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "num_retractions": 0,
        }
        if body.get("return_logprob") and choice.logprobs is not None:
            meta |= self.logprobs(choice, prompt, sampling, body, start)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": length,
            "cached_tokens": 0,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": length}],
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": self.options.delay_ms / 1000,
            "response_sent_to_client_ts": time.time(),
        }
        entry: dict[str, Any] = {
            "text": choice.data.decode("utf-8", "replace"),
            "output_ids": choice.ids,
            "meta_info": meta,
        }
        if choice.ids is None:
            del entry["output_ids"]
        if body.get("return_prompt_token_ids"):
            entry["prompt_token_ids"] = prompt
        return entry

    def finish_reason(self, choice: Choice) -> dict[str, object] | None:
        if choice.finish is None:
            return None
        if choice.finish == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if choice.finish == "stop":
            return {"type": "stop", "matched": choice.matched}
        return {"type": "length", "length": len(choice.contexts)}

    def logprobs(
        self, choice: Choice, prompt: list[int], sampling: Sampling, body: dict[str, Any], start: int
    ) -> dict[str, object]:
        assert choice.logprobs is not None
        with_text, top = body.get("return_text_in_logprobs"), body.get("top_logprobs_num") or 0
        ids: list[Any] = choice.ids or [None] * len(choice.logprobs)

        def triple(logprob: float | None, token: int | None) -> list[object]:
            text = self.tokenizer.texts[token] if with_text and token is not None else None
            return [FLOAT32_MIN if logprob == NEGATIVE_INFINITY else logprob, token, text]

        scored, scored_top = self.prompt_logprobs(prompt, start, top, triple)
        output = [triple(value, ids[min(at, len(ids) - 1)]) for at, value in enumerate(choice.logprobs)]
        logprobs: dict[str, object] = {
            "input_token_logprobs": scored,
            "output_token_logprobs": output,
            "output_token_logprobs_length": len(output),
        }
        if top:
            logprobs["input_top_logprobs"] = scored_top
            logprobs["output_top_logprobs"] = [
                [triple(logprob, token) for token, logprob in self.model.top(context, last, top, sampling, self.mode)]
                for context, last in choice.contexts
            ]
        return logprobs

    def prompt_logprobs(self, prompt: list[int], start: int, top: int, triple: Any) -> tuple[list[Any], list[Any]]:
        """Raw logprobs of the prompt from `start` on, the first of them unknown; nothing for -1."""
        if start < 0 or start >= len(prompt):
            return [], []
        scored, scored_top = [triple(None, prompt[start])], [None]
        positions = self.model.prompt_positions(prompt)
        for (context, last), token in zip(positions[start:], prompt[start + 1 :], strict=True):
            scored.append(triple(self.model.logprob(context, last, token), token))
            scored_top.append([triple(lp, other) for other, lp in self.model.top(context, last, top)])
        return scored, scored_top


@cache
def _recorded(name: str) -> dict[str, Any]:
    response: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["response"]
    return response
