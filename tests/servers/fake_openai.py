"""An OpenAI endpoint as hosted ones are: text in, text out, logprobs by text, no token ids anywhere."""

import hashlib
import json
from typing import Any, ClassVar

from tests.servers.core import FakeServer, Refusal, Reply
from tests.servers.model import Choice, Sampling

DEFAULT_NAME = "gpt-fake"
DEFAULT_MAX_TOKENS = 16  # of /v1/completions; chat has none


def refuse(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> Refusal:
    return Refusal(
        Reply({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}, status)
    )


class FakeOpenai(FakeServer):
    kind: ClassVar[str] = "openai"
    generation_paths: ClassVar[frozenset[str]] = frozenset({"/v1/completions", "/v1/chat/completions"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name = self.options.served_model_name or DEFAULT_NAME
        self.routes = {
            "/v1/models": {"GET": lambda _: Reply(self.models())},
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat},
        }

    def unauthorized(self) -> Reply:
        return refuse("Incorrect API key provided.", code="invalid_api_key", status=401).reply

    def not_found(self) -> Reply:
        return refuse("Invalid URL", status=404).reply

    def method_not_allowed(self) -> Reply:
        return refuse("Not allowed to send this method to this URL.", code="method_not_supported", status=405).reply

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        return refuse(f"We could not parse the JSON body of your request. ({error.msg})").reply

    def models(self) -> dict[str, object]:
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "openai"}
        return {"object": "list", "data": [entry]}

    def check_model(self, body: dict[str, Any]) -> None:
        if not body.get("model"):
            raise refuse("you must provide a model parameter")
        if body["model"] != self.name:
            message = f"The model `{body['model']}` does not exist or you do not have access to it."
            raise refuse(message, "model", "model_not_found", 404)

    def sampling(self, body: dict[str, Any], default_max_tokens: int, prompt: list[int]) -> tuple[Sampling, int]:
        given = {name: value for name, value in body.items() if value is not None}
        stop = given.get("stop", [])
        max_tokens = given.get("max_completion_tokens", given.get("max_tokens", default_max_tokens))
        if len(prompt) >= self.limit:
            message = f"This model's maximum context length is {self.limit} tokens. However, your messages resulted in "
            raise refuse(f"{message}{len(prompt)} tokens.", "messages", "context_length_exceeded")
        sampling = Sampling(
            max_tokens=min(max_tokens, self.limit - len(prompt)),
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            seed=given.get("seed"),
            stop=tuple([stop] if isinstance(stop, str) else stop),
            penalties=(given.get("presence_penalty", 0.0), given.get("frequency_penalty", 0.0)),
            fixed_length=self.options.tokens_per_reply,
        )
        return sampling, given.get("n", 1)

    def envelope(self, prefix: str, kind: str, entries: list[Any], prompt: list[int], choices: list[Choice]) -> Reply:
        digest = hashlib.blake2b(repr((prompt, self.generations)).encode(), digest_size=12).hexdigest()
        completion_tokens = sum(len(choice.contexts) for choice in choices)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion_tokens,
            "total_tokens": len(prompt) + completion_tokens,
        }
        return Reply(
            {
                "id": f"{prefix}-{digest}",
                "object": kind,
                "created": self.created,
                "model": self.name,
                "choices": entries,
                "usage": usage,
                "system_fingerprint": "fp_fake",
            }
        )

    def completions(self, body: dict[str, Any]) -> Reply:
        self.check_model(body)
        if not isinstance(body.get("prompt"), str):
            raise refuse("this endpoint takes one prompt as text", "prompt")
        prompt = self.tokenizer.encode(body["prompt"])
        sampling, n = self.sampling(body, DEFAULT_MAX_TOKENS, prompt)
        choices, _ = self.sample(prompt, sampling, n)
        entries = []
        for index, choice in enumerate(choices):
            text = choice.data.decode("utf-8", "replace")
            logprobs = self.legacy_logprobs(choice) if body.get("logprobs") is not None else None
            entries.append({"text": text, "index": index, "logprobs": logprobs, "finish_reason": choice.finish})
        return self.envelope("cmpl", "text_completion", entries, prompt, choices)

    def legacy_logprobs(self, choice: Choice) -> dict[str, object]:
        texts = [self.tokenizer.texts[token] for token in choice.ids or ()]
        offsets = [sum(map(len, texts[:position])) for position in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": choice.logprobs,
            "top_logprobs": [{text: value} for text, value in zip(texts, choice.logprobs or (), strict=False)],
            "text_offset": offsets,
        }

    def chat(self, body: dict[str, Any]) -> Reply:
        self.check_model(body)
        if not body.get("messages"):
            raise refuse("Invalid 'messages': empty array.", "messages", "empty_array")
        prompt = self.tokenizer.encode(self.tokenizer.render(body["messages"]), add_special_tokens=False)
        sampling, n = self.sampling(body, self.limit, prompt)
        choices, _ = self.sample(prompt, sampling, n)
        entries = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.data.decode("utf-8", "replace"), "refusal": None}
            logprobs = {"content": self.chat_logprobs(choice), "refusal": None} if body.get("logprobs") else None
            entries.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
        return self.envelope("chatcmpl", "chat.completion", entries, prompt, choices)

    def chat_logprobs(self, choice: Choice) -> list[dict[str, object]]:
        """Per token its text and bytes; the end-of-turn token is not told of."""
        texts, pieces = self.tokenizer.texts, self.tokenizer.pieces
        return [
            {"token": texts[token], "logprob": value, "bytes": list(pieces[token]), "top_logprobs": []}
            for token, value in zip(choice.ids or (), choice.logprobs or (), strict=False)
            if token not in self.tokenizer.special_ids
        ]
