"""What stands in the rows is what went over the wire: ids, masks, logprobs, seeds and parameters."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB
from tests.cli.rollout_command import at, check, failures_of, rollout, rows_of, sent_to, write_prompts
from tests.rollout.inputs_on_disk import json_lines
from tests.servers.model import float32
from tests.servers.process import REPOSITORY, RunningServer, running_server
from tests.servers.tokenizer import TURN_END, FakeTokenizer

EXAMPLES = REPOSITORY / "examples"
CHOICES = 3
SEED = 11
EVERY_PARAMETER = {
    "n": CHOICES,
    "max_tokens": 24,
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 30,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "stop": ["###", "The End"],
    "stop_token_ids": [5],
}
OPTIONS = [
    *("-n", CHOICES, "--max-tokens", 24, "--temperature", 0.9, "--top-p", 0.95, "--top-k", 30, "--min-p", 0.01),
    *("--repetition-penalty", 1.05, "--stop", "###", "--stop", "The End", "--stop-token-id", 5, "--seed", SEED),
]


@dataclass(frozen=True)
class Recorded:
    """A run that went well: its rows, and the sampling requests that the server got."""

    rows: list[dict[str, Any]]
    sent: list[dict[str, Any]]
    tokenizer: FakeTokenizer
    path: Path

    def requests_of(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The requests that sampled this row's turns, in order: those whose prompt ids begin the row."""
        entries = [e for e in self.sent if row["tokens"][: len(e["body"]["prompt"])] == e["body"]["prompt"]]
        return sorted(entries, key=lambda entry: len(entry["body"]["prompt"]))

    def request_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """The request of this row's last turn, by the seed that both name."""
        (entry,) = [e for e in self.sent if e["body"]["seed"] == row["metadata"]["sampling"]["seed"]]
        return entry


def recorded(directory: Path, source: Path, *options: object, server_options: tuple[object, ...] = ()) -> Recorded:
    with running_server("vllm", *server_options) as server:
        done = rollout(source, *at(server), *options, "--out", "out.parquet", cwd=directory)
        assert done.returncode == 0, done.stderr
        return Recorded(
            rows_of(directory / "out.parquet"),
            sent_to(server),
            FakeTokenizer(server.tokenizer_dir),
            directory / "out.parquet",
        )


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """`examples/prompts.jsonl`: text prompts of many kinds, some with settings of their own."""
    return recorded(tmp_path_factory.mktemp("examples"), EXAMPLES / "prompts.jsonl", *OPTIONS)


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    """The lines of `examples/prompts.jsonl` that have an id, by id."""
    read = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text("utf-8").splitlines()]
    return {line["id"]: line for line in read if "id" in line}


def test_tokens_are_the_ids_sent_and_the_ids_that_came_back(examples: Recorded) -> None:
    assert len(examples.rows) > 2 * len(examples.sent)
    for row in examples.rows:
        entry = examples.request_of(row)
        choice = entry["reply"]["choices"][row["choice_index"]]
        sent, sampled = entry["body"]["prompt"], choice["token_ids"]
        assert row["tokens"] == sent + sampled
        assert row["masked_tokens"] == [IGNORED_TOKEN_ID] * len(sent) + sampled
        logprobs = [float32(value) for value in choice["logprobs"]["token_logprobs"]]
        assert row["logprobs"] == [MASKED_LOGPROB] * len(sent) + logprobs
        assert (row["prompt_length"], row["completion_length"]) == (len(sent), len(sampled))
        assert row["finish_reason"] == choice["finish_reason"]


def test_the_prompt_is_the_text_of_the_line_and_full_text_is_decoded_ids(
    examples: Recorded, lines: dict[str, dict[str, Any]]
) -> None:
    for row in examples.rows:
        assert row["full_text"] == examples.tokenizer.decode(row["tokens"])
        if row["sample_id"] in lines:
            prompt = lines[row["sample_id"]]["prompt"]
            assert row["tokens"][: row["prompt_length"]] == examples.tokenizer.encode(prompt)
            assert row["full_text"].startswith(prompt)


def test_every_sample_has_its_choices_in_order_and_they_differ(examples: Recorded) -> None:
    by_sample: dict[str, list[dict[str, Any]]] = {}
    for row in examples.rows:
        by_sample.setdefault(row["sample_id"], []).append(row)
    for rows in by_sample.values():
        assert [row["choice_index"] for row in rows] == list(range(rows[0]["metadata"]["sampling"]["n"]))
    different = [len({tuple(row["tokens"]) for row in rows}) == len(rows) for rows in by_sample.values()]
    assert sum(different) > 0.8 * len(different)


def test_every_parameter_is_on_the_wire_and_a_line_overrides_it(
    examples: Recorded, lines: dict[str, dict[str, Any]]
) -> None:
    overridden = 0
    for row in examples.rows:
        body, own = examples.request_of(row)["body"], lines.get(row["sample_id"], {}).get("sampling", {})
        for name, run_value in EVERY_PARAMETER.items():
            expected = own.get(name, run_value)
            assert body[name] == ([expected] if isinstance(expected, str) else expected), name
            assert row["metadata"]["sampling"][name] == body[name]
        assert isinstance(body["seed"], int)
        overridden += bool(own)
    assert overridden


def test_seeds_differ_between_samples_also_where_the_prompt_is_the_same(examples: Recorded) -> None:
    seeds = [entry["body"]["seed"] for entry in examples.sent]
    assert len(set(seeds)) == len(seeds)
    haiku = [row for row in examples.rows if row["full_text"].startswith("Write a haiku")]
    assert len({row["sample_id"] for row in haiku}) == 2
    assert len({tuple(row["tokens"]) for row in haiku}) == len(haiku)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tmp_path: Path, examples: Recorded) -> None:
    def again(seed: int) -> Recorded:
        directory = tmp_path / str(seed)
        directory.mkdir()
        return recorded(directory, EXAMPLES / "prompts.jsonl", *OPTIONS[:-1], seed)

    def data(run: Recorded) -> list[Any]:
        return [(row["sample_id"], row["choice_index"], row["tokens"], row["logprobs"]) for row in run.rows]

    same, other = again(SEED), again(SEED + 1)
    assert data(same) == data(examples)
    assert sorted(e["body"]["seed"] for e in same.sent) == sorted(e["body"]["seed"] for e in examples.sent)
    own_seed = {e["body"]["seed"] for e in other.sent} & {e["body"]["seed"] for e in examples.sent}
    assert own_seed == {7}  # the line that sets its own


def test_all_other_fields_of_a_line_are_in_its_rows(examples: Recorded, lines: dict[str, dict[str, Any]]) -> None:
    for row in examples.rows:
        metadata = row["metadata"]
        assert metadata["source"].startswith("prompts.jsonl:")
        assert metadata["attempts"] == 1
        if row["sample_id"] in lines:
            kept = {k: v for k, v in lines[row["sample_id"]].items() if k not in ("id", "prompt", "sampling")}
            assert metadata["fields"] == kept


def test_a_run_passes_its_own_check(examples: Recorded) -> None:
    done = check(examples.path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """`examples/turns.jsonl`: conversations of two or three turns, two choices for the last one."""
    return recorded(
        tmp_path_factory.mktemp("turns"), EXAMPLES / "turns.jsonl", "-n", 2, "--max-tokens", 40, "--seed", SEED
    )


def test_a_later_turn_is_sent_with_the_ids_that_earlier_turns_sampled(turns: Recorded) -> None:
    kept = 0
    for row in turns.rows:
        if row["metadata"].get("fork_reason"):
            continue
        spans = row["metadata"]["turns"]
        entries = turns.requests_of(row)
        assert len(entries) == len(spans)
        for turn, (entry, span) in enumerate(zip(entries, spans, strict=True)):
            last = turn == len(spans) - 1
            sampled = entry["reply"]["choices"][row["choice_index"] if last else 0]
            start = len(entry["body"]["prompt"])
            end = start + len(sampled["token_ids"])
            assert (span["start"], span["end"]) == (start, end)
            assert row["tokens"][start:end] == row["masked_tokens"][start:end] == sampled["token_ids"]
            assert row["logprobs"][start:end] == [float32(v) for v in sampled["logprobs"]["token_logprobs"]]
            if not last:
                assert entries[turn + 1]["body"]["prompt"][:end] == row["tokens"][:end]
                assert entry["body"]["n"] == 1
        sampled_length = sum(span["end"] - span["start"] for span in spans)
        assert sum(mask != IGNORED_TOKEN_ID for mask in row["masked_tokens"]) == sampled_length
        kept += len(spans) > 1
    assert kept >= 2


def test_each_turn_has_one_end_of_turn_token(turns: Recorded) -> None:
    end = turns.tokenizer.eos_id
    for row in turns.rows:
        for first, second in zip(row["tokens"], row["tokens"][1:], strict=False):
            assert (first, second) != (end, end)
        assert row["full_text"].count(TURN_END) == row["tokens"].count(end)
        for span in row["metadata"]["turns"][:-1]:
            after = row["tokens"][span["end"] - 1 :]
            if span["finish_reason"] == "stop":
                assert after[0] == end
                assert after[1] != end


def test_chats_take_the_system_message_and_a_prefilled_answer_is_continued(tmp_path: Path) -> None:
    run = recorded(tmp_path, EXAMPLES / "chat.jsonl", "--limit", 10, "--max-tokens", 8, "--system", "Answer in verse.")
    rows = {row["sample_id"]: row for row in run.rows}
    assert "Answer in verse." in rows["chat-greeting"]["full_text"]
    assert "Answer in verse." not in rows["chat-terse"]["full_text"]
    prefilled = rows["chat-prefill"]
    prompt = run.tokenizer.decode(prefilled["tokens"][: prefilled["prompt_length"]])
    assert prompt.endswith('<|im_start|>assistant\n["red",')
    assert set(prefilled["masked_tokens"][: prefilled["prompt_length"]]) == {IGNORED_TOKEN_ID}
    assert check(run.path).returncode == 0


def test_total_tokens_are_cut_and_prompts_without_room_fail_as_data_without_being_sent(tmp_path: Path) -> None:
    lines = [
        {"id": "short", "prompt": "Hi"},
        {"id": "long", "prompt": "apple " * 20},
        {"id": "endless", "prompt": "apple " * 400},
    ]
    source = write_prompts(tmp_path / "in.jsonl", lines)
    with running_server("vllm", "--max-model-len", 200, "--tokens-per-reply", 100) as server:
        done = rollout(source, *at(server), "--max-total-tokens", 40, "--out", "out.parquet", cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        (entry,) = sent_to(server)
        assert len(entry["body"]["prompt"]) + entry["body"]["max_tokens"] == 40
        (row,) = rows_of(tmp_path / "out.parquet")
        assert (row["sample_id"], len(row["tokens"]), row["finish_reason"]) == ("short", 40, "length")
        failures = {failure["sample_id"]: failure for failure in failures_of(tmp_path / "out.parquet")}
        assert "--max-total-tokens is 40" in failures["long"]["message"]
        whole = rollout(source, *at(server), "--out", "whole.parquet", cwd=tmp_path)
        assert len(sent_to(server)) == 3
    assert whole.returncode == 3
    (failure,) = failures_of(tmp_path / "whole.parquet")
    assert (failure["sample_id"], failure["error"], failure["line"]) == ("endless", "PromptRejected", 3)
    assert failure["attempts"] == 0
    assert "context of 200" in failure["message"]
    assert "in.jsonl:3" in failure["message"]


def test_stdin_gzip_limit_and_prompt_field_choose_what_is_read(tmp_path: Path, llamacpp: RunningServer) -> None:
    data = json_lines([{"question": f"What is {i}?", "id": f"q{i}"} for i in range(5)])
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(data))
    options = ["--prompt-field", "question", "--limit", 2, "--max-tokens", 4, "--seed", 1]
    zipped = rollout("in.jsonl.gz", *at(llamacpp), *options, "--out", "zipped.parquet", cwd=tmp_path)
    piped = rollout("-", *at(llamacpp), *options, "--out", "piped.parquet", cwd=tmp_path, stdin=data)
    assert (zipped.returncode, piped.returncode) == (0, 0), zipped.stderr + piped.stderr
    rows = {name: rows_of(tmp_path / f"{name}.parquet") for name in ("zipped", "piped")}
    assert [row["sample_id"] for row in rows["piped"]] == ["q0", "q1"]
    assert [row["metadata"]["source"] for row in rows["piped"]] == ["<stdin>:1", "<stdin>:2"]
    assert [row["metadata"]["source"] for row in rows["zipped"]] == ["in.jsonl.gz:1", "in.jsonl.gz:2"]
    assert [row["tokens"] for row in rows["piped"]] == [row["tokens"] for row in rows["zipped"]]


@pytest.fixture
def other_kind(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running_server(request.param) as server:
        yield server


@pytest.mark.parametrize("other_kind", ["sglang", "trl", "llamacpp"], indirect=True)
def test_other_servers_give_rows_that_pass_the_check(tmp_path: Path, other_kind: RunningServer) -> None:
    options: list[object] = ["-n", 2, "--max-tokens", 12, "--limit", 6, "--seed", SEED, "--out", "out.parquet"]
    if other_kind.kind != "llamacpp":
        options += ["--tokenizer", other_kind.tokenizer_dir, "--context-length", 2048]
    done = rollout(EXAMPLES / "prompts.jsonl", *at(other_kind), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out.parquet")
    assert {row["metadata"]["server"] for row in rows} == {other_kind.url}
    assert {row["metadata"]["server_type"] for row in rows} == {other_kind.kind}
    checked = check(tmp_path / "out.parquet")
    assert checked.returncode == 0, checked.stdout
