"""Two-turn conversations on every real server: one row per conversation, true to the wire and to the model.

`run.sh KIND` runs the tests of that kind alone; each starts its server once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.export import rewards
from tests.export.recordings import expected
from tests.export.test_formats import READERS

from . import checks, servers
from .recording_proxy import Exchange, recording

CHOICES = 2
"""On the last turn; the first has one answer, which both continue."""

MAX_TOKENS = 32
QUESTIONS = 20
END_OF_TURN = 2
"""`<|im_end|>` of SmolLM2: ChatML ends every message with it."""

LAST_SPECIAL = 16
"""Ids from 0 to this one are special tokens of SmolLM2."""

MOST_FORKED = 3
"""Of the conversations."""

TOP_K = 5
SCORED_AGAIN = 4
"""Rows that `verify` looks at: all of them are compared with a forward pass beside it."""

SCORED_TEXT = "The capital of France is Paris. 2 + 2 = 4, and the sky is blue 🦜."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How one kind of server is asked, and how exact it is.

    Attributes:
        recipe: of `servers.RECIPES`; None for the embedded engine.
        options: further options of `managed-cli rollout`.
        most, mean: nats by which a recorded logprob may differ from the forward pass.
        tempered: its logprobs are those after temperature.
        names_tokenizer: it says which tokenizer it has.
    """

    server_type: str
    recipe: str | None
    options: tuple[object, ...] = ()
    most: float = checks.MOST_NATS
    mean: float = checks.MEAN_NATS
    tempered: bool = False
    names_tokenizer: bool = True


KINDS = {
    "vllm": Kind(server_type="vllm", recipe="vllm"),
    "sglang": Kind(server_type="sglang", recipe="sglang", tempered=True),
    "trl": Kind(
        server_type="trl",
        recipe="trl",
        options=("--context-length", servers.CONTEXT_LENGTH),
        tempered=True,
        names_tokenizer=False,
    ),
    "trl-vllm": Kind(server_type="trl", recipe="trl-vllm", tempered=True),
    # llama.cpp computes otherwise than torch: with float32 weights and attention they agree to 3e-4 at worst.
    "llamacpp": Kind(server_type="llamacpp", recipe="llamacpp-exact", most=5e-3, mean=1e-3),
    "local": Kind(server_type="local", recipe=None, most=5e-3, mean=1e-3),
}

pytestmark = [
    pytest.mark.real_server("every"),
    pytest.mark.parametrize("kind", os.environ.get("MANAGED_CLI_REAL_KINDS", "").split(), scope="module"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A running server, or the embedded engine and its weights."""

    kind: Kind
    base_url: str | None
    weights: Path
    tokenizer: Path

    def arguments(self, base_url: str | None) -> tuple[object, ...]:
        where = ("--model", self.weights) if base_url is None else ("--base-url", base_url)
        tokenizer = () if self.kind.names_tokenizer else ("--tokenizer", self.tokenizer)
        return ("--server-type", self.kind.server_type, *where, *tokenizer, *self.kind.options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """One finished run; `exchanges` is empty for the embedded engine, whose wire is inside the process."""

    path: Path
    rows: list[checks.Row]
    exchanges: list[Exchange]

    @property
    def whole_rows(self) -> list[checks.Row]:
        """Those of conversations that stayed one row: of all but a few, where the model samples no special tokens."""
        forked = {row["sample_id"] for row in self.rows if fork_reason_of(row)}
        return [row for row in self.rows if row["sample_id"] not in forked]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversations")


@pytest.fixture(scope="module")
def target(kind: str, environment: Path, log_folder: Path) -> Iterator[Target]:
    chosen = KINDS[kind]
    weights = environment / "models" / "smollm2-135m-f32.gguf"
    tokenizer = environment / "models" / "smollm2-135m"
    if chosen.recipe is None:
        yield Target(kind=chosen, base_url=None, weights=weights, tokenizer=tokenizer)
        return
    with servers.running(chosen.recipe, environment=environment, log_folder=log_folder) as server:
        yield Target(kind=chosen, base_url=server.base_url, weights=weights, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def questions(folder: Path) -> Path:
    """Two-turn questions, and nothing else: of MT-Bench where it lies beside the checkout, else the examples'."""
    source = checks.SHARED_DATA / "mt_bench_question.jsonl"
    lines = (source if source.exists() else checks.EXAMPLES / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = folder / "questions.jsonl"
    turns = [{"turns": json.loads(line)["turns"][:2]} for line in lines[:QUESTIONS]]
    chosen.write_text("".join(f"{json.dumps(record)}\n" for record in turns), encoding="utf-8")
    return chosen


@pytest.fixture(scope="module")
def recorded(target: Target, questions: Path, folder: Path, kind: str) -> Recorded:
    out = folder / f"{kind}.parquet"
    sampling = ("-n", CHOICES, "--max-tokens", MAX_TOKENS, "--seed", 11, "--out", out)
    with contextlib.ExitStack() as stack:
        proxy = None
        if target.base_url is not None:
            proxy = stack.enter_context(recording(target.base_url, folder / f"{kind}.wire.jsonl"))
        where = target.arguments(proxy.base_url if proxy else None)
        checks.managed_cli("rollout", questions, *where, *sampling)
        exchanges = proxy.exchanges() if proxy else []
    return Recorded(path=out, rows=checks.read_rows(out), exchanges=exchanges)


def turns_of(row: checks.Row) -> list[dict[str, Any]]:
    return list(json.loads(row["metadata"])["turns"])


def fork_reason_of(row: checks.Row) -> str | None:
    reason: str | None = json.loads(row["metadata"]).get("fork_reason")
    return reason


def test_each_conversation_is_one_row_per_choice(recorded: Recorded, questions: Path) -> None:
    """But where the first answer has what the text that is sent back lacks: special tokens, or half a character."""
    asked = [json.loads(line)["turns"] for line in questions.read_text(encoding="utf-8").splitlines()]
    samples: dict[str, list[checks.Row]] = {}
    for row in recorded.rows:
        samples.setdefault(row["sample_id"], []).append(row)
    assert len(samples) == len(asked)
    whole = {row["sample_id"] for row in recorded.whole_rows}
    assert len(whole) >= len(asked) - MOST_FORKED
    for sample_id, rows in samples.items():
        if sample_id not in whole:
            (first,) = (row for row in rows if not fork_reason_of(row))
            assert {fork_reason_of(row) for row in rows if row is not first} <= {
                "special_tokens_dropped",
                "text_mismatch",
            }
            answer, is_cut = first["tokens"][first["prompt_length"] :], "\ufffd" in turns_of(first)[0]["text"]
            assert is_cut or any(token <= LAST_SPECIAL for token in answer)
            rows.remove(first)
            assert [row["choice_index"] for row in rows] == list(range(CHOICES))
            continue
        assert [row["choice_index"] for row in rows] == list(range(CHOICES))
        first = {tuple(row["tokens"][: turns_of(row)[0]["end"]]) for row in rows}
        assert len(first) == 1, "the choices of the last turn continue the same first answer"
        assert {len(turns_of(row)) for row in rows} == {2}


def test_every_answer_stays_trainable_and_nothing_else_is(recorded: Recorded) -> None:
    for row in recorded.rows:
        spans = turns_of(row)
        inside = [any(span["start"] <= t < span["end"] for span in spans) for t in range(len(row["tokens"]))]
        assert [mask != checks.NOT_SAMPLED for mask in row["masked_tokens"]] == inside
        assert all(span["end"] > span["start"] for span in spans)


def test_the_end_of_turn_token_stands_once_per_turn(recorded: Recorded) -> None:
    for row in recorded.rows:
        messages = row["full_text"].count("<|im_start|>")
        unfinished = 0 if turns_of(row)[-1]["finish_reason"] == "stop" else 1
        assert row["tokens"].count(END_OF_TURN) == messages - unfinished
        for span in turns_of(row):
            if span["finish_reason"] == "stop":
                assert row["tokens"][span["end"] - 1] == END_OF_TURN
                assert row["masked_tokens"][span["end"] - 1] == END_OF_TURN


def test_the_second_prompt_is_what_the_template_gives(
    recorded: Recorded, questions: Path, environment: Path, kind: str
) -> None:
    from managed_cli.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(environment / "models" / "smollm2-135m"))
    asked = {
        turns[0]: turns for turns in (json.loads(line)["turns"] for line in questions.read_text("utf-8").splitlines())
    }
    identical = 0
    for row in recorded.whole_rows:
        spans = turns_of(row)
        turns = next(turns for first, turns in asked.items() if first in row["full_text"])
        messages: list[dict[str, str]] = []
        for content, span in zip(turns, spans, strict=True):
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": span["text"]}]
        rendered = tokenizer.render_chat(messages[:-1])
        sent = row["tokens"][: spans[-1]["start"]]
        assert tokenizer.decode(sent) == rendered
        first = row["tokens"][spans[0]["start"] : spans[0]["end"]]
        if tokenizer.encode_rendered(tokenizer.decode(first)) == first:
            assert sent == tokenizer.encode_rendered(rendered)
            identical += 1
    print(f"{kind}: {identical} of {len(recorded.whole_rows)} second prompts compared id by id")
    assert identical >= len(recorded.whole_rows) // 2


def test_what_was_sent_and_sampled_is_what_is_recorded(recorded: Recorded) -> None:
    if not recorded.exchanges:
        pytest.skip("the embedded engine has no wire to listen to; its ids are covered by the forward pass")
    sampled = checks.wire_choices_by_ids(recorded.exchanges)
    for row in recorded.rows:
        for span in turns_of(row):
            prompt, answer = row["tokens"][: span["start"]], row["tokens"][span["start"] : span["end"]]
            sent = sampled[tuple(prompt), tuple(answer)]
            logprobs = row["logprobs"][span["start"] : span["end"]]
            assert any(checks.same_logprobs(choice.logprobs, logprobs) for choice in sent)


def test_a_long_prompt_is_echoed_to_the_byte_and_stands_in_the_row_as_it_was_sent(
    target: Target, environment: Path, folder: Path, kind: str
) -> None:
    from managed_cli.sent_prompt import SentPrompt
    from managed_cli.tokenizers import load_tokenizer

    if target.base_url is None:
        pytest.skip("the embedded engine has no wire to listen to")
    text = " ".join(f"{number} and {number} make {2 * number}." for number in range(100, 200))
    prompts, out = folder / f"{kind}-long.jsonl", folder / f"{kind}-long.parquet"
    prompts.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
    with recording(target.base_url, folder / f"{kind}-long.wire.jsonl") as proxy:
        sampling = ("--max-tokens", 4, "--seed", 1, "--out", out)
        checks.managed_cli("rollout", prompts, *sampling, *target.arguments(proxy.base_url))
        exchanges = proxy.exchanges()
    (row,) = checks.read_rows(out)
    ids = load_tokenizer(str(environment / "models" / "smollm2-135m")).encode_prompt(text)
    assert row["tokens"][: row["prompt_length"]] == ids
    assert (tuple(ids), tuple(row["tokens"][len(ids) :])) in {
        (choice.prompt, choice.tokens) for choice in checks.wire_choices(exchanges)
    }
    if kind in ("vllm", "sglang"):  # whose long echoes are compared as they stand
        bodies = [exchange.reply.encode() for exchange in exchanges]
        assert any(SentPrompt(ids).cut_from(body) is not body for body in bodies)


def test_every_logprob_of_both_turns_is_that_of_a_forward_pass(
    recorded: Recorded, target: Target, environment: Path, folder: Path, kind: str
) -> None:
    report = checks.forward_report(recorded.path, environment=environment, report=folder / f"{kind}.truth.json")
    checks.assert_true(report, len(recorded.rows), most=target.kind.most, mean=target.kind.mean)
    checks.managed_cli("inspect", recorded.path, "--check")


def test_a_temperature_is_in_the_logprobs_where_the_rows_say_so(
    target: Target, environment: Path, folder: Path, kind: str
) -> None:
    out = folder / f"{kind}-cold.parquet"
    prompts = (checks.EXAMPLES / "chat.jsonl", "--limit", 3, "--temperature", 0.7, "--max-tokens", 24, "--seed", 3)
    lines = [line for line in prompts[0].read_text(encoding="utf-8").splitlines() if '"sampling"' not in line]
    chosen = folder / f"{kind}-cold.jsonl"
    chosen.write_text("\n".join(lines) + "\n", encoding="utf-8")
    checks.managed_cli("rollout", chosen, *prompts[1:], *target.arguments(target.base_url), "--out", out)
    rows = checks.read_rows(out)
    modes = {json.loads(row["metadata"])["logprobs_mode"] for row in rows}
    assert modes == ({"temperature"} if kind == "sglang" else {"processed"} if target.kind.tempered else {"raw"})
    report = checks.forward_report(
        out,
        environment=environment,
        report=folder / f"{kind}-cold.truth.json",
        temperature=0.7 if target.kind.tempered else 1.0,
    )
    checks.assert_true(report, len(rows), most=target.kind.most, mean=target.kind.mean)


def test_a_stop_string_ends_the_text_and_leaves_ids_and_logprobs_whole(
    target: Target, environment: Path, folder: Path, kind: str
) -> None:
    out = folder / f"{kind}-stop.parquet"
    prompts = folder / f"{kind}-stop.jsonl"
    prompts.write_text(json.dumps({"prompt": "Monday, Tuesday, Wednesday,", "id": "days"}) + "\n", encoding="utf-8")
    sampling = ("-n", 4, "--max-tokens", 24, "--stop", "day", "--seed", 5)
    checks.managed_cli("rollout", prompts, *sampling, *target.arguments(target.base_url), "--out", out)
    rows = checks.read_rows(out)
    stopped = [row for row in rows if json.loads(row["metadata"])["stop_reason"] == "day"]
    assert stopped, [row["full_text"] for row in rows]
    for row in stopped:
        assert "day" not in turns_of(row)[-1]["text"]
        assert "day" in row["full_text"][len("Monday, Tuesday, Wednesday,") :]
    report = checks.forward_report(out, environment=environment, report=folder / f"{kind}-stop.truth.json")
    checks.assert_true(report, len(rows), most=target.kind.most, mean=target.kind.mean)


def test_prompt_logprobs_are_those_of_a_forward_pass_or_are_refused(
    target: Target, environment: Path, folder: Path, kind: str
) -> None:
    scored = asyncio.run(prompt_logprobs(target))
    if target.kind.server_type in ("llamacpp", "local"):
        assert scored is None
        return
    assert scored is not None
    assert set(scored) == {"prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs"}
    truth = checks.forward_topk(scored["prompt_tokens"], environment, folder / f"{kind}.topk.json")
    assert scored["prompt_topk_token_ids"][0] == scored["prompt_topk_logprobs"][0] == []
    for position in range(1, len(scored["prompt_tokens"])):
        ids, logprobs = scored["prompt_topk_token_ids"][position], scored["prompt_topk_logprobs"][position]
        assert len(ids) == len(logprobs) == TOP_K
        for token, logprob in zip(ids, logprobs, strict=True):
            assert abs(truth[position][str(token)] - logprob) <= target.kind.most
        kth = sorted(truth[position].values(), reverse=True)[TOP_K - 1]
        assert min(logprobs) >= kth - target.kind.most, "the ids are the top k, up to ties"


def test_the_doctor_finds_the_server_safe(target: Target) -> None:
    told = checks.managed_cli("doctor", *target.arguments(target.base_url), "--json")
    document = json.loads(told.stdout)
    assert document["safe"], document["findings"]
    level = {finding["check"]: finding["level"] for finding in document["findings"]}
    for check in ("reachable", "prompt ids", "choices", "distinct choices", "end token", "stop strings", "BOS"):
        assert level[check] == "ok", document["findings"]
    scores_prompts = target.kind.server_type not in ("llamacpp", "local")
    assert level["alignment"] == ("ok" if scores_prompts else "unknown"), document["findings"]
    assert level["prompt logprobs"] == ("ok" if scores_prompts else "note"), document["findings"]


VIEWS: tuple[tuple[object, ...], ...] = (
    (),
    ("--row", 1),
    ("--filter", "finish_reason=length", "--sort", "-length", "--head", 3),
    ("--check",),
)
"""Options of `inspect` that any recording can be looked at with."""


def test_every_view_shows_what_was_recorded(recorded: Recorded, folder: Path, kind: str) -> None:
    first = recorded.whole_rows[0]
    for options in (*VIEWS, ("--sample", first["sample_id"])):
        text = checks.managed_cli("inspect", recorded.path, *options).stdout
        assert text.strip()
        assert "\x1b" not in text
        document = json.loads(checks.managed_cli("inspect", recorded.path, *options, "--json").stdout)
        assert document["path"] == str(recorded.path)
    shown = checks.managed_cli("inspect", recorded.path, "--sample", first["sample_id"]).stdout
    for turn, message in zip(turns_of(first), json.loads(first["metadata"])["messages"][::2], strict=True):
        for said in (turn["text"], message["content"]):
            assert all(word in shown for word in said.split()[:1])  # a model may answer with white space alone
    same = json.loads(checks.managed_cli("inspect", recorded.path, "--diff", recorded.path, "--json").stdout)
    assert same["pairs"] == same["same"] == len(recorded.rows)
    page = folder / f"{kind}.html"
    checks.managed_cli("inspect", recorded.path, "--html", page)
    assert page.stat().st_size < 2_000_000


def test_verify_agrees_with_its_own_server_and_with_a_forward_pass(
    recorded: Recorded, target: Target, environment: Path, kind: str
) -> None:
    tolerance = ("--tolerance", target.kind.most, "--sample", SCORED_AGAIN, "--json")
    model = ("--server-type", "transformers", "--model", environment / "models" / "smollm2-135m")
    variables = checks.with_torch(environment)
    scored = []
    if kind != "vllm":  # whose own tests have it
        scored.append(checks.managed_cli("verify", recorded.path, *model, *tolerance, variables=variables))
    if target.kind.server_type not in ("llamacpp", "local"):
        scored.append(checks.managed_cli("verify", recorded.path, *target.arguments(target.base_url), *tolerance))
    for told in scored:
        report = json.loads(told.stdout)
        assert report["ok"]
        assert (report["compared_rows"], report["not_compared"]) == (SCORED_AGAIN, {})
        print(f"{report['scorer']}: at most {report['max_difference']:.1e} nats")


@pytest.mark.parametrize("name", READERS)
def test_exported_ids_masks_and_logprobs_are_those_that_were_recorded(
    name: str, recorded: Recorded, folder: Path, kind: str
) -> None:
    out = folder / f"{kind}.{name}.jsonl"
    reward = ("--reward", "tests.export.rewards:by_choice")
    checks.managed_cli("export", recorded.path, "--to", name, *reward, "--out", out)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    found = [row for line in lines for row in READERS[name](line)]
    assert sorted(found, key=str) == sorted(expected(recorded.path, rewards.by_choice), key=str)


def test_recorded_rows_are_scored_with_their_alternatives(
    recorded: Recorded, target: Target, folder: Path, kind: str
) -> None:
    out = folder / f"{kind}.topk.parquet"
    scoring = ("logprobs", recorded.path, "--rows", "--limit", 2, "--top-k", TOP_K, "--out", out)
    if target.kind.server_type in ("llamacpp", "local"):
        where = ("--server-type", target.kind.server_type)
        assert "gives no logprobs of prompt tokens" in checks.managed_cli(*scoring, *where, exit_code=2).stderr
        return
    checks.managed_cli(*scoring, *target.arguments(target.base_url))
    for scored, row in zip(checks.read_rows(out), recorded.rows, strict=False):
        assert scored["prompt_tokens"] == row["tokens"]
        places = zip(row["tokens"], row["logprobs"], row["masked_tokens"], strict=True)
        alternatives = zip(scored["prompt_topk_token_ids"], scored["prompt_topk_logprobs"], strict=True)
        for (token, logprob, mask), (ids, logprobs) in zip(places, alternatives, strict=True):
            if mask != checks.NOT_SAMPLED and token in ids:
                assert abs(logprobs[ids.index(token)] - logprob) <= target.kind.most


async def prompt_logprobs(target: Target) -> dict[str, list[Any]] | None:
    """`get_logprobs` of the text; None where the server type refuses."""
    from managed_cli import APIServerConfig, ServerManager

    config = APIServerConfig(
        server_type=target.kind.server_type,
        base_url=target.base_url,
        model_name=str(target.weights) if target.base_url is None else None,
        tokenizer_name=None if target.kind.names_tokenizer else str(target.tokenizer),
        context_length=servers.CONTEXT_LENGTH,
    )
    async with ServerManager(config) as manager, manager.managed_server() as managed:
        try:
            return await managed.get_logprobs(prompt=SCORED_TEXT, top_k=TOP_K)
        except NotImplementedError:
            return None
