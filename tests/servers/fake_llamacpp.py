"""llama.cpp's own wire format: `/completion`, its tokenizer routes, `/props`.

Its logprobs have gaps, as the real server's have: a token that leaves the text inside a character has no entry, and
after a stop word as many entries are missing as the stop word has tokens.
"""

import json
from typing import Any, ClassVar

from tests.servers.core import FakeServer, Refusal, Reply
from tests.servers.model import Choice, Sampling, float32
from tests.servers.mutate import VALUES

RANDOM_SEED = 4294967295  # what an unset seed is called
FORCING_BIAS = 50.0  # a logit bias from here on leaves no other choice
DEFAULTS: dict[str, Any] = {
    "seed": RANDOM_SEED,
    "temperature": float32(0.8),
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": float32(0.95),
    "min_p": float32(0.05),
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": float32(0.1),
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": float32(0.1),
    "adaptive_target": -1.0,
    "adaptive_decay": float32(0.9),
    "max_tokens": -1,
    "n_predict": -1,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "n_probs": 0,
    "min_keep": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
REQUEST_ONLY: dict[str, Any] = {
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "stop": [],
    "logit_bias": [],
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "reasoning_format": "deepseek",
}
CAPABILITIES = {
    "supports_object_arguments": False,
    "supports_parallel_tool_calls": False,
    "supports_preserve_reasoning": False,
    "supports_reasoning_effort": False,
    "supports_string_content": True,
    "supports_system_role": True,
    "supports_tool_calls": False,
    "supports_tools": False,
    "supports_typed_content": False,
}


def failure(message: str, status: int = 400, kind: str = "invalid_request_error", **more: object) -> Reply:
    return Reply({"error": {"code": status, "message": message, "type": kind, **more}}, status)


def complete_length(data: bytes) -> int:
    """How many bytes of `data` stand before a character that has begun and not ended (llama.cpp's `validate_utf8`)."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        for mask, start, length in ((0xE0, 0xC0, 2), (0xF0, 0xE0, 3), (0xF8, 0xF0, 4)):
            if byte & mask == start:
                return len(data) - back if back < length else len(data)
    return len(data)


class FakeLlamacpp(FakeServer):
    kind: ClassVar[str] = "llamacpp"
    generation_paths: ClassVar[frozenset[str]] = frozenset({"/completion", "/completions"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.path = f"{self.root}/model.gguf"
        self.name = self.options.served_model_name or self.path
        health = {"GET": lambda _: Reply({"status": "ok"})}
        complete = {"POST": self.completions}
        self.routes = {
            "/health": health,
            "/v1/health": health,
            "/props": {"GET": lambda _: Reply(self.props())},
            "/slots": {"GET": lambda _: Reply(self.slots())},
            "/models": {"GET": lambda _: Reply(self.models())},
            "/v1/models": {"GET": lambda _: Reply(self.models())},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": lambda body: Reply({"content": self.tokenizer.decode(body["tokens"])})},
            "/apply-template": {"POST": lambda body: Reply({"prompt": self.tokenizer.render(body["messages"])})},
            "/completion": complete,
            "/completions": complete,
        }

    def guarded(self, path: str) -> bool:
        return path not in ("/health", "/v1/health")

    def unauthorized(self) -> Reply:
        return failure("Invalid API Key", 401, "authentication_error")

    def not_found(self) -> Reply:
        return failure("File Not Found", 404, "not_found_error")

    def method_not_allowed(self) -> Reply:
        return self.not_found()

    def loading(self) -> Reply:
        return failure("Loading model", 503, "unavailable_error")

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        place = f"line {error.lineno}, column {error.colno}"
        return failure(f"[json.exception.parse_error.101] parse error at {place}: syntax error while parsing value")

    def slots(self) -> list[dict[str, object]]:
        slot = {"n_ctx": self.limit, "speculative": False, "is_processing": False}
        return [{"id": number, **slot} for number in range(self.options.slots)]

    def props(self) -> dict[str, object]:
        return {
            "default_generation_settings": {"params": DEFAULTS, "n_ctx": self.limit},
            "total_slots": self.options.slots,
            "model_alias": self.name,
            "model_ftype": "F32",
            "model_path": self.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "media_marker": "<__media_TvuGJqWbrlpPO35aPd7Mcz10qQk3Gbw2__>",
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": False,
            "ui": True,
            "ui_settings": {},
            "chat_template": self.tokenizer.chat_template,
            "chat_template_caps": CAPABILITIES,
            "bos_token": self.tokenizer.bos_text,
            "eos_token": self.tokenizer.eos_text,
            "build_info": self.options.server_version or "b0-unknown",
            "is_sleeping": False,
            "cors_proxy_enabled": False,
        }

    def models(self) -> dict[str, object]:
        details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
        described = {
            "name": self.name,
            "model": self.name,
            **dict.fromkeys(("modified_at", "size", "digest"), ""),
            "type": "model",
            "description": "",
            "tags": [""],
            "capabilities": ["completion"],
            "parameters": "",
            "details": details | {"parameter_size": "", "quantization_level": ""},
        }
        meta = {"vocab_type": 2, "n_vocab": self.tokenizer.size, "n_ctx": self.limit, "n_ctx_train": 8192}
        entry = {
            "id": self.name,
            "aliases": [self.name],
            "tags": [],
            "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": self.created,
            "owned_by": "llamacpp",
            "meta": meta | {"n_embd": 576, "n_params": 134515008, "size": 96576768, "ftype": "F32"},
        }
        return {"models": [described], "object": "list", "data": [entry]}

    def tokenize(self, body: dict[str, Any]) -> Reply:
        """Special tokens in the text count as such unless `parse_special` is false; BOS only with `add_special`."""
        raw = self.tokenizer.raw
        raw.encode_special_tokens = not body.get("parse_special", True)
        ids = self.tokenized(self.tokenizer.encode(body["content"], body.get("add_special", False)))
        raw.encode_special_tokens = False
        if not body.get("with_pieces"):
            return Reply({"tokens": ids})
        return Reply({"tokens": [{"id": i, "piece": _text_or_bytes(self.tokenizer.pieces[i])} for i in ids]})

    # Requests.

    def prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """The prompts, and whether they came as a batch."""
        prompt = body.get("prompt")
        if prompt is None or prompt in ("", []):
            raise Refusal(failure('"prompt" must not be empty'))
        batched = isinstance(prompt, list) and not isinstance(prompt[0], int)
        given = prompt if batched else [prompt]
        prompts = [self.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
        for ids in prompts:
            if any(not 0 <= token < self.tokenizer.size for token in ids):
                raise Refusal(failure("Prompt contains invalid tokens"))
            if len(ids) >= self.limit:
                message = (
                    f"request ({len(ids)} tokens) exceeds the available context size ({self.limit} tokens), "
                    "try increasing it"
                )
                kind, numbers = "exceed_context_size_error", {"n_prompt_tokens": len(ids), "n_ctx": self.limit}
                raise Refusal(failure(message, kind=kind, **numbers))
        return prompts, batched

    def settings(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The generation settings in force, and n."""
        asked = {name: body[name] for name in (DEFAULTS | REQUEST_ONLY) if body.get(name) is not None}
        settings = DEFAULTS | REQUEST_ONLY | asked
        settings |= {name: float(settings[name]) for name, value in DEFAULTS.items() if isinstance(value, float)}
        settings["max_tokens"] = settings["n_predict"] = body.get("n_predict", body.get("max_tokens", -1))
        name = "n_cmpl" if "n_cmpl" in body else "n"
        n = body.get(name, 1)
        if not 1 <= n <= self.options.slots:
            limits = f"Value must be between 1 <= value <= {self.options.slots}, but got {n}"
            raise Refusal(failure(f"Field '{name}': {limits}"))
        return settings, n

    def sampling(self, settings: dict[str, Any], prompt: list[int]) -> Sampling:
        room, wanted = self.limit - len(prompt), settings["n_predict"]
        biases = settings["logit_bias"]
        pairs = biases.items() if isinstance(biases, dict) else biases
        bias = {int(token): -1e9 if value is False else value for token, value in pairs}
        return Sampling(
            max_tokens=room if wanted < 0 else min(room, max(1, wanted)),  # 0 still samples one token
            temperature=max(0.0, settings["temperature"]),
            top_k=settings["top_k"],
            top_p=settings["top_p"],
            min_p=settings["min_p"],
            seed=0 if settings["seed"] in (-1, RANDOM_SEED) else settings["seed"],
            stop=tuple(settings["stop"]),
            ignore_eos=settings["ignore_eos"],
            penalties=tuple(settings[f"{name}_penalty"] for name in ("repeat", "presence", "frequency")),
            forced=next((token for token, value in bias.items() if value >= FORCING_BIAS), None),
            banned=frozenset(token for token, value in bias.items() if value <= -FORCING_BIAS),
            fixed_length=self.options.tokens_per_reply,
        )

    def completions(self, body: dict[str, Any]) -> Reply:
        prompts, batched = self.prompts(body)
        settings, n = self.settings(body)
        entries: list[dict[str, object]] = []
        for prompt in prompts:
            sampling = self.sampling(settings, prompt)
            choices, echo = self.sample(prompt, sampling, n, seed_step=1)
            for number, choice in enumerate(choices):
                seeded = settings
                if settings["seed"] not in (-1, RANDOM_SEED):
                    seeded = settings | {"seed": settings["seed"] + number}
                asked = bool(body.get("return_tokens"))
                entries.append(self.choice(choice, len(entries), echo, seeded, return_tokens=asked))
        return Reply(entries if batched or n > 1 else entries[0] if entries else [])

    # Replies.

    def choice(
        self,
        choice: Choice,
        index: int,
        prompt: list[int],
        settings: dict[str, Any],
        *,
        return_tokens: bool,
    ) -> dict[str, object]:
        count = len(choice.contexts)
        at_limit = len(prompt) + count >= self.limit and choice.kind == "limit"
        text = choice.data.decode("utf-8", "replace")
        stop_type = {"eos": "eos", "word": "word"}.get(choice.kind, "limit")
        entry: dict[str, object] = {
            "index": index,
            "content": text,
            "tokens": (choice.ids or []) if return_tokens else [],
            "id_slot": index % self.options.slots,
            "stop": True,
            "model": self.name,
            "tokens_predicted": count,
            "tokens_evaluated": len(prompt),
            "generation_settings": settings,
            "prompt": self.tokenizer.decode(prompt),
            "has_new_line": "\n" in text,
            "truncated": at_limit,
            "stop_type": {"abort": "none", None: "none"}.get(choice.finish, stop_type),
            "stopping_word": choice.matched if choice.kind == "word" else "",
            "tokens_cached": len(prompt) + count - 1,
            "timings": self.timings(len(prompt), count),
        }
        if settings["n_probs"] > 0 and choice.logprobs is not None:
            entry["completion_probabilities"] = self.probabilities(choice, settings["n_probs"])
        return entry

    @staticmethod
    def timings(prompt_length: int, completion_length: int) -> dict[str, object]:
        timings: dict[str, object] = {"cache_n": 0}
        for name, count in (("prompt", prompt_length), ("predicted", completion_length)):
            milliseconds = 1.5 * count
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": milliseconds,
                f"{name}_per_token_ms": 1.5,
                f"{name}_per_second": 1000 / 1.5,
            }
        return timings

    def probabilities(self, choice: Choice, count: int) -> list[dict[str, object]]:
        """One entry per token that ended at a whole character, less those of the stop word; raw logprobs."""
        ids, pieces = choice.ids or [], self.model.pieces
        entries: list[dict[str, object]] = []
        data, sent = bytearray(), 0
        for token, (context, last) in zip(ids, choice.contexts, strict=False):
            data += pieces[token]
            if complete_length(data[-4:]) < len(data[-4:]):
                continue
            top = [{**_token(t, pieces[t]), "logprob": logprob} for t, logprob in self.model.top(context, last, count)]
            logprob = self.model.logprob(context, last, token)
            entries.append({**_token(token, bytes(data[sent:])), "logprob": logprob, "top_logprobs": top})
            sent = len(data)
        if choice.kind == "word":
            missing = len(self.tokenizer.encode(str(choice.matched), add_special_tokens=False))
            del entries[len(entries) - min(missing, len(entries)) :]
        return self.broken(entries)

    def broken(self, entries: list[dict[str, object]]) -> list[dict[str, object]]:
        """The entries with the breach of this reply, in the middle one; they do not come from the choice's logprobs."""
        middle = len(entries) // 2
        if not entries or self.mutation is None:
            return entries
        if self.mutation == "short_logprobs":
            del entries[middle]
        elif self.mutation == "long_logprobs":
            entries.insert(middle, entries[middle])
        elif self.mutation in VALUES:
            entries[middle] = entries[middle] | {"logprob": VALUES[self.mutation]}
        return entries


def _token(token: int, piece: bytes) -> dict[str, object]:
    shown = piece[: complete_length(piece)].decode("utf-8", "replace")
    return {"id": token, "token": shown, "bytes": list(piece)}


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
