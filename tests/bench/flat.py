"""Whether cost and memory stay what they are while a run, or a conversation, grows."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import tokenizers

from tests.bench.children import Cost, measured, replay_server
from tests.bench.jobs import Job, recorded, recorder_command, tokenizer_directory, workplace, write_lines
from tests.bench.tables import MILLION, markdown

SHORT_PROMPT = "What is 17 times 23?"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
COMPARED_WITH = 10_000

TURN_TOKENS = 512
"""Sampled in each turn; the question before it has about as many."""

QUESTION = "Go on, and say why every step of it holds. " * 46
CONVERSATIONS = {8: 512, 16: 256, 32: 128}
"""Turns → conversations, of the same number of turns in all."""

IN_FLIGHT = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """One run: how large, and its cost without the start."""

    size: int
    units: int
    cpu: float
    peak_mb: float

    def to_json(self) -> dict[str, object]:
        """As it stands in the JSON file."""
        return dataclasses.asdict(self)


def growing_runs(largest: int, repeats: int, told: Callable[[str], None]) -> tuple[str, list[Sized]]:
    """Short prompts with 16 sampled tokens, 256 in flight: CPU per row, and peak memory, of ever more samples.

    The median of the repeats, each of which runs every size but the largest; that one runs once, between them: it takes
    minutes, so what the machine is like meanwhile has to be compared with what it is like before and after.
    """
    sizes = [size for size in SIZES if size <= largest]
    job = Job(kind="vllm", samples=1, n=1, tokens=16, concurrency=256, prompt=SHORT_PROMPT)
    costs: dict[int, list[Cost]] = {size: [] for size in (1, *sizes)}
    with workplace() as directory, replay_server("vllm", tokenizer_directory(), job.size) as url:
        for repeat in range(repeats):
            for size, known in costs.items():
                if size == sizes[-1] and repeat != repeats // 2:
                    continue
                cost = recorded(dataclasses.replace(job, samples=size), url, Path(directory))
                told(f"{size:,} samples: {cost.cpu:.2f} s of CPU, {cost.wall:.1f} s, {cost.peak_mb:.0f} MB")
                known.append(cost)
    start = statistics.median(cost.cpu for cost in costs[1])
    found = [
        Sized(
            size,
            size,
            statistics.median(cost.cpu for cost in costs[size]) - start,
            max(cost.peak_mb for cost in costs[size]),
        )
        for size in sizes
    ]
    other = next((each for each in found if each.size == COMPARED_WITH), found[0])
    rows = [
        [
            f"{each.size:,}",
            1000.0 * each.cpu / each.units,
            (each.cpu / each.units) / (other.cpu / other.units),
            each.peak_mb,
            each.peak_mb / other.peak_mb,
        ]
        for each in found
    ]
    against = f"x that of {other.size:,}"
    return markdown(["samples", "CPU ms / row, without start", against, "peak MB", against], rows), found


def growing_conversations(repeats: int, told: Callable[[str], None]) -> tuple[str, list[Sized]]:
    """Chats of 8, 16 and 32 turns, up to 32 thousand tokens: CPU per token of a row, beside `floor_turns.py`.

    The least of the repeats; in each, every length is run once, so that a busy minute does not fall on one alone.
    """
    programs = [conversations, conversations_at_the_floor]
    costs: list[dict[int, list[tuple[Cost, int]]]] = [{turns: [] for turns in (1, *CONVERSATIONS)} for _ in programs]
    with workplace() as directory, replay_server("vllm", tokenizer_directory(), f"1x{TURN_TOKENS}") as url:
        for _ in range(repeats):
            for turns, count in ((1, 1), *CONVERSATIONS.items()):
                for known, run in zip(costs, programs, strict=True):
                    cost, tokens = run(url, Path(directory), turns, count)
                    told(f"{run.__name__}: {count} of {turns} turns, {tokens:,} tokens: {cost.cpu:.2f} s of CPU")
                    known[turns].append((cost, tokens))
    found, floors = ([_without_start(known, turns) for turns in CONVERSATIONS] for known in costs)
    rows = [
        [
            one.size,
            f"{one.units // CONVERSATIONS[one.size]:,}",
            MILLION * one.cpu / one.units,
            (one.cpu / one.units) / (found[0].cpu / found[0].units),
            MILLION * floor.cpu / floor.units,
            (floor.cpu / floor.units) / (floors[0].cpu / floors[0].units),
            (one.cpu / one.units) / (floor.cpu / floor.units),
            one.peak_mb,
        ]
        for one, floor in zip(found, floors, strict=True)
    ]
    against = f"x that of {found[0].size}"
    columns = ["turns", "tokens of a row", "CPU s / 10^6 tokens, without start", against]
    return markdown([*columns, "floor", against, "x floor", "peak MB"], rows), found


def _without_start(known: dict[int, list[tuple[Cost, int]]], turns: int) -> Sized:
    """The least cost of these conversations, less that of a single turn."""
    start = min(cost.cpu for cost, _ in known[1])
    cost, tokens = min(known[turns], key=lambda entry: entry[0].cpu)
    return Sized(turns, tokens, cost.cpu - start, cost.peak_mb)


def conversations_at_the_floor(url: str, where: Path, turns: int, count: int) -> tuple[Cost, int]:
    """The cost of so many conversations at the floor, and the tokens of their rows; it comes after the recorder."""
    with urllib.request.urlopen(f"{url}/_bench/last") as reply:
        (where / "body.json").write_bytes(reply.read())
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_directory() / "tokenizer.json"))
    (where / "question.json").write_text(json.dumps(tokenizer.encode(QUESTION).ids), encoding="utf-8")
    out, script = where / "floor.parquet", Path(__file__).with_name("floor_turns.py")
    command = [sys.executable, script, url, where / "body.json", turns, count, IN_FLIGHT, out, where / "question.json"]
    cost = measured(command, cwd=where)
    return cost, len(pq.read_table(out, columns=["tokens"]).column(0).combine_chunks().flatten())


def conversations(url: str, where: Path, turns: int, count: int) -> tuple[Cost, int]:
    """The cost of so many conversations, and the tokens of their rows."""
    out = where / "out.parquet"
    records = ({"id": f"c-{number}", "turns": [QUESTION] * turns} for number in range(count))
    prompts = write_lines(where / "prompts.jsonl", records)
    job = Job(kind="vllm", samples=count, n=1, tokens=TURN_TOKENS, concurrency=IN_FLIGHT)
    command = recorder_command(job, url, prompts, out, "--history", "verbatim")
    cost = measured([sys.executable, "-m", "managed_cli", *command], cwd=where)
    table = pq.read_table(out, columns=["prompt_length", "completion_length"])
    if table.num_rows != count:
        raise RuntimeError(f"{table.num_rows} rows for {count} conversations: a turn did not extend the one before it")
    sampled = int(pc.sum(table.column("completion_length")).as_py())
    if sampled != turns * count * TURN_TOKENS:
        raise RuntimeError(f"{sampled} sampled tokens, not {turns * count * TURN_TOKENS}")
    return cost, sampled + int(pc.sum(table.column("prompt_length")).as_py())
