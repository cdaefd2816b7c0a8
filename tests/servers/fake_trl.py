"""TRL's own server, before TRL 1.11 handed over to vLLM: `/generate/` on prompts in, ids and logprobs out.

Dialects: 1.10 (ids or text in, logprobs per position and rank), 0.29 (also truncates prompts), 0.24 (text in, one
logprob per position). One request runs at a time, and while it runs nothing else is answered. A prompt that is too long
or holds an unknown id hangs the server for ever.
"""

import array
import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web

from tests.servers.core import FakeServer, Hang, Refusal, Reply
from tests.servers.model import NEGATIVE_INFINITY, Choice, Sampling

OPENAPI = Path(__file__).parents[1] / "wire" / "trl" / "openapi.json"
DEFAULT_MAX_TOKENS = 16
SAMPLING_KEYWORDS = frozenset(
    [
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "bad_words",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "logit_bias",
        "allowed_token_ids",
    ]
)


def refuse_schema(*problems: dict[str, object]) -> Refusal:
    return Refusal(Reply({"detail": list(problems)}, 422))


def refuse_silently() -> Refusal:
    """The answer to sampling parameters that vLLM rejects: an exception that nobody handles."""
    return Refusal(Reply(b"Internal Server Error", 500, content_type="text/plain; charset=utf-8"))


def wrong_type(kind: str, expected: str, value: object, *place: object) -> dict[str, object]:
    return {"type": kind, "loc": ["body", *place], "msg": f"Input should be a valid {expected}", "input": value}


class FakeTrl(FakeServer):
    kind: ClassVar[str] = "trl"
    generation_paths: ClassVar[frozenset[str]] = frozenset({"/generate/", "/chat/"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dialect: str = self.options.dialect
        self.one_at_a_time = asyncio.Lock()
        self.routes = {
            "/health/": {"GET": lambda _: Reply({"status": "ok"})},
            "/get_world_size/": {"GET": lambda _: Reply({"world_size": 1})},
            "/generate/": {"POST": self.completions},
            "/openapi.json": {"GET": lambda _: Reply(self.openapi())},
        }
        if self.dialect != "0.24":
            self.routes["/chat/"] = {"POST": self.chat}
        if self.dialect == "1.10":
            self.routes["/get_sequence_logprobs/"] = {"POST": self.sequence_logprobs}
        redirects = {path.rstrip("/"): path for path in self.routes if path.endswith("/")}
        for short, path in redirects.items():
            moved = Reply(None, 307, headers={"Location": path})
            self.routes[short] = dict.fromkeys(self.routes[path], lambda _, moved=moved: moved)

    def authorized(self, path: str, header: str) -> bool:  # noqa: ARG002 (it knows no keys)
        return True

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self.one_at_a_time:
            return await super().serve(request)

    def malformed(self, error: json.JSONDecodeError) -> Reply:
        problem: dict[str, object] = {"type": "json_invalid", "loc": ["body", error.pos], "msg": "JSON decode error"}
        return refuse_schema(problem | {"input": {}, "ctx": {"error": error.msg}}).reply

    def openapi(self) -> object:
        document = json.loads(OPENAPI.read_text(encoding="utf-8"))["response"]
        for path in {"/chat/", "/get_sequence_logprobs/"} - self.routes.keys():
            del document["paths"][path]
        return document

    # Requests.

    def prompts(self, body: dict[str, Any]) -> list[list[int]]:
        if "prompts" not in body:
            raise refuse_schema({"type": "missing", "loc": ["body", "prompts"], "msg": "Field required", "input": body})
        prompts = body["prompts"]
        texts, ids = ("list[str]",), ("list[list[int]]",)
        if self.dialect == "0.24":
            texts = ids = ()
        if not isinstance(prompts, list):
            problems = [
                wrong_type("list_type", "list", prompts, "prompts", *place) for place in dict.fromkeys([texts, ids])
            ]
            raise refuse_schema(*problems)
        not_texts = [i for i, one in enumerate(prompts) if not isinstance(one, str)]
        not_ids = [i for i, one in enumerate(prompts) if not isinstance(one, list)]
        if not_texts and (not_ids or self.dialect == "0.24"):
            problems = [wrong_type("string_type", "string", prompts[i], "prompts", *texts, i) for i in not_texts]
            if self.dialect != "0.24":
                problems += [wrong_type("list_type", "list", prompts[i], "prompts", *ids, i) for i in not_ids]
            raise refuse_schema(*problems)
        encoded = [self.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]
        cut = body.get("truncate_prompt_tokens") if self.dialect != "1.10" else None
        return [prompt[-cut:] for prompt in encoded] if cut else encoded

    def sampling(self, body: dict[str, Any]) -> tuple[Sampling, int]:
        """What to sample, and n; `generation_kwargs` override the fields of the request."""
        keywords = body.get("generation_kwargs") or {}
        if not SAMPLING_KEYWORDS.issuperset(keywords):
            raise refuse_silently()
        given = {name: value for name, value in (body | keywords).items() if value is not None}
        n, temperature = given.get("n", 1), given.get("temperature", 1.0)
        top_p, max_tokens = given.get("top_p", 1.0), given.get("max_tokens", DEFAULT_MAX_TOKENS)
        if n < 1 or temperature < 0 or (n > 1 and temperature == 0) or not 0 < top_p <= 1 or max_tokens < 1:
            raise refuse_silently()
        stop, allowed = given.get("stop", []), given.get("allowed_token_ids")
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=given.get("top_k", -1),
            top_p=top_p,
            min_p=given.get("min_p", 0.0),
            seed=given.get("seed"),
            stop=tuple([stop] if isinstance(stop, str) else stop),
            stop_token_ids=frozenset(given.get("stop_token_ids", ())),
            ignore_eos=given.get("ignore_eos", False),
            min_tokens=given.get("min_tokens", 0),
            penalties=tuple(given.get(f"{name}_penalty", 0.0) for name in ("repetition", "presence", "frequency")),
            allowed=frozenset(allowed) if allowed else None,
            fixed_length=self.options.tokens_per_reply,
        )
        return sampling, n

    def completions(self, body: dict[str, Any]) -> Reply:
        return self.answer_prompts(self.prompts(body), body)

    def chat(self, body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            raise refuse_schema(
                {"type": "missing", "loc": ["body", "messages"], "msg": "Field required", "input": body}
            )
        problems = [
            wrong_type("list_type", "list", conversation, "messages", place)
            for place, conversation in enumerate(body["messages"])
            if not isinstance(conversation, list)
        ]
        if problems:
            raise refuse_schema(*problems)
        rendered = [self.tokenizer.render(conversation) for conversation in body["messages"]]
        return self.answer_prompts([self.tokenizer.encode(text, add_special_tokens=False) for text in rendered], body)

    def answer_prompts(self, prompts: list[list[int]], body: dict[str, Any]) -> Reply:
        sampling, n = self.sampling(body)
        count = body.get("logprobs", 0)
        if self.dialect == "0.24":
            count = 0
        echoes: list[list[int]] = []
        choices: list[tuple[Choice, Sampling]] = []
        for prompt in prompts:
            if len(prompt) >= self.limit or not prompt or any(not 0 <= t < self.tokenizer.size for t in prompt):
                raise Hang
            fitting = replace(sampling, max_tokens=min(sampling.max_tokens, self.limit - len(prompt)))
            sampled, echo = self.sample(prompt, fitting, n)
            echoes.append(echo)
            choices += [(choice, fitting) for choice in sampled]
        reply: dict[str, Any] = {"prompt_ids": echoes, "completion_ids": [choice.ids for choice, _ in choices]}
        if any(choice.ids is None for choice, _ in choices):
            del reply["completion_ids"]
        absent = count is None or any(choice.logprobs is None for choice, _ in choices)
        ranked = None if absent else [self.ranked(choice, count, fitting) for choice, fitting in choices]
        if self.dialect == "0.24":
            flat = None if ranked is None else [[position[0][1] for position in one] for one in ranked]
            return Reply(reply | {"logprobs": flat})
        reply["logprobs"] = None if ranked is None else [[[lp for _, lp in at] for at in one] for one in ranked]
        reply["logprob_token_ids"] = None if ranked is None else [[[t for t, _ in at] for at in one] for one in ranked]
        return Reply(reply)

    def ranked(self, choice: Choice, count: int, sampling: Sampling) -> list[list[tuple[int, float | None]]]:
        """Per position the best `count` tokens and the sampled one, by rank; -inf is null, as in strict JSON."""
        assert choice.logprobs is not None
        ids = choice.ids or [0] * len(choice.logprobs)
        positions = []
        for position, value in enumerate(choice.logprobs):
            at = min(position, len(ids) - 1)
            top = self.model.top(*choice.contexts[at], count, sampling, self.mode) if count else []
            entries: list[tuple[int, float | None]] = [(t, None if lp == NEGATIVE_INFINITY else lp) for t, lp in top]
            places = {token: place for place, (token, _) in enumerate(entries)}
            if ids[at] in places:
                entries[places[ids[at]]] = (ids[at], value)
            else:
                entries.append((ids[at], value))
            positions.append(entries)
        return positions

    def sequence_logprobs(self, body: dict[str, Any]) -> Reply:
        """Raw logprobs of given completions: the best `top_logprobs` per position, as JSON or as packed arrays.

        In JSON, the completion's own token stands behind them where it is not one of them.
        """
        count = body.get("top_logprobs", 100)
        tops, actual = [], []
        for sequence, length in zip(body["sequences"], body["prompt_lengths"], strict=True):
            if len(sequence) > self.limit or any(not 0 <= t < self.tokenizer.size for t in sequence):
                raise Hang
            positions = self.model.prompt_positions(sequence)[length - 1 :]
            tops.append([self.model.top(context, last, count) for context, last in positions])
            actual.append((sequence[length:], self.model.score(sequence[:length], sequence[length:])))
        names = "logprobs logprob_token_ids logprobs_b64 token_ids_b64 actual_logprobs_b64 actual_token_ids_b64"
        reply: dict[str, Any] = dict.fromkeys([*names.split(), "shape", "completion_lengths"])
        if body.get("response_format") != "binary":
            ranked = [
                [list(dict([*at, own]).items()) for at, own in zip(one, zip(*scored, strict=True), strict=True)]
                for one, scored in zip(tops, actual, strict=True)
            ]
            reply["logprobs"] = [[[lp for _, lp in at] for at in one] for one in ranked]
            reply["logprob_token_ids"] = [[[t for t, _ in at] for at in one] for one in ranked]
            return Reply(reply)
        lengths = [len(one) for one in tops]
        longest = max(lengths, default=0)
        padded = [[*one, *([[(0, 0.0)] * count] * (longest - len(one)))] for one in tops]
        flat = [entry for one in padded for at in one for entry in at]
        reply["logprobs_b64"] = _packed("f", [lp for _, lp in flat])
        reply["token_ids_b64"] = _packed("i", [t for t, _ in flat])
        rows = [([*ids, *([0] * (longest - len(ids)))], [*lps, *([0.0] * (longest - len(lps)))]) for ids, lps in actual]
        reply["actual_logprobs_b64"] = _packed("f", [lp for _, lps in rows for lp in lps])
        reply["actual_token_ids_b64"] = _packed("i", [t for ids, _ in rows for t in ids])
        return Reply(reply | {"shape": [len(tops), longest, count], "completion_lengths": lengths})


def _packed(code: str, values: list[Any]) -> str:
    return base64.b64encode(array.array(code, values).tobytes()).decode()
