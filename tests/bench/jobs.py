"""The same work for every program that is compared: so many samples of n choices with so many tokens each."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.bench.canned import CONTEXT_LENGTH, REPOSITORY
from tests.bench.children import Cost, measured
from tests.servers.tokenizer import shared_tokenizer_directory
from tests.tokenizers import catalog

HERE = Path(__file__).parent
PEERS_PYTHON = REPOSITORY / ".cache" / "bench" / "venv" / "bin" / "python"

PROMPT = (
    "A farmer has 1,741 sheep, 4 dogs and a number of hens. Every sheep gives 3 kilograms of wool a year; a kilogram "
    "of wool sells for 12 dollars; every hen lays 5 eggs a week, and a dozen eggs sells for 4 dollars. Last year the "
    "farmer earned 98,652 dollars from wool and eggs, 1,318 less than the year before. How many hens are there? Think "
    "step by step, write down every equation that you use, and give the number of hens on a line of its own."
)
"""Of about a hundred tokens; each sample has other numbers, of which three have hardly been seen before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be recorded.

    Attributes:
        tokens: of each choice.
        concurrency: requests in flight.
        prompt: of every sample, but for its digits.
    """

    kind: str
    samples: int
    n: int
    tokens: int
    concurrency: int
    prompt: str = PROMPT

    @property
    def size(self) -> str:
        """As the replay server is told to make its replies."""
        return f"{self.n}x{self.tokens}"

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens of the whole job."""
        return self.samples * self.n * self.tokens


def tokenizer_directory() -> Path:
    """SmolLM2's real tokenizer where it can be had, else the small one of the tests."""
    found = catalog.directory_or_reason("smollm2")
    return found if isinstance(found, Path) else shared_tokenizer_directory()


def varied(prompt: str, number: int) -> str:
    """The prompt of one sample: other digits, in the same places."""
    chance = random.Random(number)
    return re.sub(r"\d", lambda _: str(chance.randrange(1, 10)), prompt)


def write_prompts(path: Path, samples: int, prompt: str = PROMPT) -> Path:
    """`path` with one line for each sample, each with a prompt of its own."""
    return write_lines(path, ({"id": f"s-{number:07}", "prompt": varied(prompt, number)} for number in range(samples)))


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """`path` with one line for each record."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(f"{json.dumps(record)}\n" for record in records)
    return path


def recorder_command(job: Job, url: str, prompts: Path, out: object, *options: object) -> list[object]:
    """`managed-cli rollout` for the job, without the interpreter."""
    context = ["--context-length", CONTEXT_LENGTH] if job.kind == "trl" else []
    return [
        "rollout", prompts, "--server-type", job.kind, "--base-url", url, "--tokenizer", tokenizer_directory(),
        "-n", job.n, "--max-tokens", job.tokens, "--concurrency", job.concurrency, "--seed", 1,
        "--out", out, "--overwrite", *context, *options,
    ]  # fmt: skip


def recorded(job: Job, url: str, where: Path, *options: object) -> Cost:
    """The recorder's cost.

    Raises:
        RuntimeError: it did not record the job's tokens.
    """
    prompts, out = write_prompts(where / "prompts.jsonl", job.samples, job.prompt), where / "out.parquet"
    cost = measured(
        [sys.executable, "-m", "managed_cli", *recorder_command(job, url, prompts, out, *options)], cwd=where
    )
    require_tokens(job, out)
    return cost


def at_the_floor(job: Job, url: str, where: Path) -> Cost:
    """The cost of `floor.py`; it comes after the recorder, whose last request it sends."""
    with urllib.request.urlopen(f"{url}/_bench/last") as reply:
        body = reply.read()
    (where / "body.json").write_bytes(body)
    out = where / "floor.parquet"
    command = [sys.executable, HERE / "floor.py", job.kind, url, where / "body.json"]
    cost = measured([*command, job.samples, job.concurrency, out, tokenizer_directory()], cwd=where)
    require_tokens(job, out)
    return cost


def by_peer(script: str, job: Job, url: str, where: Path) -> Cost:
    """The cost of a script in `peers/`, in the environment made for them."""
    prompts, out = write_prompts(where / "prompts.jsonl", job.samples, job.prompt), where / f"{script}.jsonl"
    command = [PEERS_PYTHON, HERE / "peers" / f"{script}.py", url, prompts, job.n, job.tokens, job.concurrency]
    cost = measured([*command, out, tokenizer_directory()], cwd=where)
    with out.open("rb") as lines:
        rows = sum(1 for _ in lines)
    if rows != job.samples * job.n:
        raise RuntimeError(f"{script} wrote {rows} rows of {job.samples * job.n}")
    out.unlink()
    return cost


def tokens_in(path: Path) -> int:
    """Sampled tokens in a Parquet file."""
    return int(pc.sum(pq.read_table(path, columns=["completion_length"]).column(0)).as_py())


def require_tokens(job: Job, path: Path) -> None:
    """Raise RuntimeError unless the file holds the job's tokens."""
    found = tokens_in(path)
    if found != job.completion_tokens:
        raise RuntimeError(f"{path.name} holds {found} sampled tokens, not {job.completion_tokens}")


def workplace() -> tempfile.TemporaryDirectory[str]:
    """A directory for one scenario's files."""
    return tempfile.TemporaryDirectory(prefix="managed-cli-bench-")
