"""How long the event loop is held, while large replies come in by the hundred and shards are written."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.children import measured, replay_server
from tests.bench.jobs import (
    Job,
    recorder_command,
    require_tokens,
    tokenizer_directory,
    workplace,
    write_prompts,
)
from tests.bench.tables import markdown

LARGE = Job(kind="vllm", samples=3000, n=8, tokens=2048, concurrency=1024)
"""A reply of this size has about 1 MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stalls:
    """What held the loop, in milliseconds.

    Attributes:
        longest: the longest callbacks, longest first: nothing else runs meanwhile.
        latest: how late a task came at worst that asks for every second millisecond. It waits for all that was ready
            before it, whatever number of callbacks that was.
        late_p99: the 99th percentile of it.
    """

    what: str
    longest: list[float]
    latest: list[float]
    late_p99: float | None
    peak_mb: float

    def to_json(self) -> dict[str, object]:
        """As it stands in the JSON file."""
        return dataclasses.asdict(self)


def stalls(samples: int, told: Callable[[str], None]) -> tuple[str, list[Stalls]]:
    """The longest callbacks of the event loop: 1 MB replies, 1024 in flight, shards written meanwhile."""
    job = dataclasses.replace(LARGE, samples=samples)
    with workplace() as directory, replay_server("vllm", tokenizer_directory(), job.size, replies=8) as url:
        where = Path(directory)
        prompts, out, report = write_prompts(where / "prompts.jsonl", samples), where / "out.parquet", where / "report"
        command = [sys.executable, "-m", "tests.bench.stalled", report]
        cost = measured([*command, *recorder_command(job, url, prompts, out, "--quiet")], cwd=where)
        require_tokens(job, out)
        found = json.loads(report.read_text(encoding="utf-8"))
    longest = [milliseconds for milliseconds, _ in found["callbacks_ms"]]
    for milliseconds, what in found["callbacks_ms"][:5]:
        told(f"{milliseconds:.1f} ms: {what}")
    what = f"{samples} replies of 8 x 2048 tokens"
    one = Stalls(what, longest, found["late_ms"], found["late_p99_ms"], cost.peak_mb)
    table = markdown(
        ["replies", "longest callbacks, ms", "target, ms", "latest beats, ms", "99 % of them, ms", "peak MB"],
        [[what, _three(longest) or "none above 5", 50, _three(one.latest), one.late_p99 or 0.0, one.peak_mb]],
    )
    return table, [one]


def _three(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values[:3])
