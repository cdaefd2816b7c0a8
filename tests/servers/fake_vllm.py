"""vLLM 0.32's wire format: `/v1/completions` with token ids, its tokenizer routes, its errors.

With `--logprobs-mode processed` it is what `trl vllm-serve` starts from TRL 1.11 on.
"""

import hashlib
import json
from typing import Any, ClassVar

from tests.servers.core import Reply
from tests.servers.model import NEGATIVE_INFINITY, Choice, Sampling
from tests.servers.vllm_requests import VllmRequests, refuse, refuse_schema

FLOOR = -9999.0  # vLLM's spelling of -inf
DEFAULT_MAX_TOKENS = 16


class FakeVllm(VllmRequests):
    kind: ClassVar[str] = "vllm"
    generation_paths: ClassVar[frozenset[str]] = frozenset({"/v1/completions", "/v1/chat/completions"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version = self.options.server_version or "0.32.0"
        self.fingerprint = f"vllm-{self.version}-afc0b62b"
        self.routes = {
            "/health": {"GET": lambda _: Reply()},
            "/health/": {"GET": lambda _: Reply()},
            "/ping": {"GET": lambda _: Reply(), "POST": lambda _: Reply()},
            "/version": {"GET": lambda _: Reply({"version": self.version})},
            "/v1/models": {"GET": lambda _: Reply(self.models())},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": lambda body: Reply({"prompt": self.tokenizer.decode(body["tokens"])})},
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat},
            "/inference/v1/generate": {"POST": lambda _: self.scale_out()},
        }

    def guarded(self, path: str) -> bool:
        return path.startswith(("/v1", "/inference"))

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        problem = {
            "type": "json_invalid",
            "loc": f"body.{error.pos}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": error.msg},
        }
        return refuse_schema([problem]).reply

    def scale_out(self) -> Reply:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return refuse(message, status=403, kind="PermissionDeniedError").reply

    def models(self) -> dict[str, object]:
        permission = {
            "id": "modelperm-afc5355353cafc42",
            "object": "model_permission",
            "created": self.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        entry = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "vllm",
            "root": self.root,
            "parent": None,
            "max_model_len": self.limit,
            "permission": [permission],
        }
        return {"object": "list", "data": [entry]}

    def tokenize(self, body: dict[str, Any]) -> Reply:
        if "messages" in body:
            text = self.tokenizer.render(body["messages"], body.get("add_generation_prompt", True))
            ids = self.tokenizer.encode(text, body.get("add_special_tokens", False))
        else:
            ids = self.tokenizer.encode(body["prompt"], body.get("add_special_tokens", True))
        ids = self.tokenized(ids)
        strings = [self.tokenizer.names[i] for i in ids] if body.get("return_token_strs") else None
        return Reply({"count": len(ids), "max_model_len": self.limit, "tokens": ids, "token_strs": strings})

    def completions(self, body: dict[str, Any]) -> Reply:
        prompts = self.prompts(body)
        sampling, n = self.sampling(body, DEFAULT_MAX_TOKENS)
        self.check_model(body)
        logprobs = self.checked_logprobs(body, "logprobs", "sample logprobs")
        prompt_logprobs = self.checked_logprobs(body, "prompt_logprobs", "prompt logprobs")
        truncate = body.get("truncate_prompt_tokens")
        entries: list[dict[str, object]] = []
        prompt_tokens = completion_tokens = 0
        for prompt in prompts:
            if truncate:
                prompt = prompt[-truncate:]
            self.check_prompt(prompt)
            fitting = self.fitting(sampling, prompt)
            choices, echo = self.sample(prompt, fitting, n)
            scored = None if prompt_logprobs is None else self.prompt_logprobs(prompt, prompt_logprobs)
            for choice in choices:
                entry = self.choice(
                    choice, len(entries), logprobs, fitting, bool(body.get("return_tokens_as_token_ids"))
                )
                asked = bool(body.get("return_token_ids"))
                entry["token_ids"] = choice.ids if asked else None
                entry["prompt_logprobs"] = scored
                entry["prompt_token_ids"] = echo if asked else None
                entry["routed_experts"] = None
                entries.append(entry)
                completion_tokens += len(choice.contexts)
            prompt_tokens += len(prompt)
        return Reply(self.envelope("cmpl", "text_completion", entries, prompt_tokens, completion_tokens, raw=prompts))

    def envelope(
        self, prefix: str, kind: str, entries: list[Any], prompt_tokens: int, completion_tokens: int, raw: object
    ) -> dict[str, Any]:
        digest = hashlib.blake2b(repr((raw, self.generations)).encode(), digest_size=8).hexdigest()
        return {
            "id": f"{prefix}-{digest}",
            "object": kind,
            "created": self.created,
            "model": self.name,
            "choices": entries,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "completion_tokens": completion_tokens,
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def text(self, choice: Choice) -> str:
        """The text as vLLM streams it: bytes of a character that is not complete yet are held back."""
        return choice.data.decode("utf-8", "ignore" if _ends_inside_character(choice.data) else "replace")

    def choice(
        self, choice: Choice, index: int, logprobs: int | None, sampling: Sampling, as_ids: bool
    ) -> dict[str, object]:
        return {
            "index": index,
            "text": self.text(choice),
            "logprobs": None if logprobs is None else self.logprobs(choice, logprobs, sampling, as_ids),
            "finish_reason": choice.finish,
            "stop_reason": choice.matched if choice.kind in ("token", "word") else None,
        }

    def logprobs(self, choice: Choice, count: int, sampling: Sampling, as_ids: bool) -> dict[str, object] | None:
        if choice.logprobs is None:
            return None
        offsets, tokens, tops = [], [], []
        offset = 0
        ids = choice.ids or [0] * len(choice.logprobs)
        texts = self.tokenizer.texts
        for position, value in enumerate(choice.logprobs):
            at = min(position, len(ids) - 1)
            token = ids[at]
            name = f"token_id:{token}" if as_ids else texts[token]
            top = {name: value}
            if count > 1:
                top |= self.alternatives(choice, at, name, value, count, sampling, as_ids)
            offsets.append(offset)
            tokens.append(name)
            tops.append(top)
            offset += len(name)
        return {"text_offset": offsets, "token_logprobs": choice.logprobs, "tokens": tokens, "top_logprobs": tops}

    def alternatives(
        self, choice: Choice, at: int, name: str, value: float | None, count: int, sampling: Sampling, as_ids: bool
    ) -> dict[str, float | None]:
        """The sampled token first, then the best `count` others that are not it."""
        top: dict[str, float | None] = {name: value}
        for token, logprob in self.model.top(*choice.contexts[at], count, sampling, self.mode):
            other = f"token_id:{token}" if as_ids else self.tokenizer.texts[token]
            top.setdefault(other, FLOOR if logprob == NEGATIVE_INFINITY else logprob)
        return top

    def prompt_logprobs(self, prompt: list[int], count: int) -> list[object]:
        """Raw logprobs of the prompt: null for its first token, then the token itself and the best `count`."""
        entries: list[object] = [None]
        for (context, last), token in zip(self.model.prompt_positions(prompt), prompt[1:], strict=True):
            ranked = {token: (self.model.rank(context, last, token), self.model.logprob(context, last, token))}
            for rank, (other, logprob) in enumerate(self.model.top(context, last, count), 1):
                ranked.setdefault(other, (rank, logprob))
            texts = self.tokenizer.texts
            entries.append(
                {str(i): {"logprob": lp, "rank": rank, "decoded_token": texts[i]} for i, (rank, lp) in ranked.items()}
            )
        return entries

    def chat(self, body: dict[str, Any]) -> Reply:
        """`/v1/chat/completions`, for clients that compare; the recorder does not use it."""
        self.check_model(body)
        sampling, n = self.sampling(body, self.limit)
        prompt = self.tokenizer.encode(self.tokenizer.render(body["messages"]), add_special_tokens=False)
        self.check_prompt(prompt)
        fitting = self.fitting(sampling, prompt)
        choices, echo = self.sample(prompt, fitting, n)
        asked = bool(body.get("return_token_ids"))
        entries = [self.chat_choice(choice, index, body, asked) for index, choice in enumerate(choices)]
        completion_tokens = sum(len(choice.contexts) for choice in choices)
        reply = self.envelope("chatcmpl", "chat.completion", entries, len(prompt), completion_tokens, raw=prompt)
        reply |= {"prompt_logprobs": None, "prompt_token_ids": echo if asked else None, "prompt_text": None}
        return Reply(reply)

    def chat_choice(self, choice: Choice, index: int, body: dict[str, Any], asked: bool) -> dict[str, object]:
        message = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        content = None
        if body.get("logprobs") and choice.logprobs is not None:
            texts, pieces = self.tokenizer.texts, self.tokenizer.pieces
            content = [
                {"token": texts[token], "logprob": value, "bytes": list(pieces[token]), "top_logprobs": []}
                for token, value in zip(choice.ids or (), choice.logprobs, strict=False)
            ]
        return {
            "index": index,
            "message": {"role": "assistant", "content": self.text(choice), **message},
            "logprobs": None if content is None else {"content": content},
            "finish_reason": choice.finish,
            "stop_reason": choice.matched if choice.kind in ("token", "word") else None,
            "token_ids": choice.ids if asked else None,
            "routed_experts": None,
        }


def _ends_inside_character(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end == len(data) and error.reason == "unexpected end of data"
    return False
