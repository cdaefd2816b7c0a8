"""How long a person waits: for help, for a small run, for a summary, and for a large run to go on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from managed_cli.storage.footer import Footer, Session
from managed_cli.storage.parquet import ROW_GROUP_ROWS, write_parquet
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import json_text
from managed_cli.storage.summary import Summary
from tests.bench.children import Cost, measured, replay_server
from tests.bench.flat import SHORT_PROMPT
from tests.bench.jobs import Job, recorder_command, tokenizer_directory, workplace, write_prompts
from tests.bench.tables import markdown

ROWS = 1_000_000
SMALL = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Waited:
    """One command: its least wall time of the repeats, in seconds, and what it may be."""

    what: str
    seconds: float
    cpu: float
    peak_mb: float
    at_most: float

    def to_json(self) -> dict[str, object]:
        """As it stands in the JSON file."""
        return dataclasses.asdict(self)


def waiting_times(rows: int, repeats: int, told: Callable[[str], None]) -> tuple[str, list[Waited]]:
    """Seconds of wall time: `--help`, a run of ten prompts, the summary of 10^6 rows, and going on from them."""
    job = Job(kind="vllm", samples=SMALL, n=1, tokens=16, concurrency=256, prompt=SHORT_PROMPT)
    found: list[Waited] = []

    def wait(what: str, at_most: float, *command: object) -> None:
        whole = [sys.executable, "-m", "managed_cli", *command]
        costs: list[Cost] = [measured(whole, cwd=where) for _ in range(repeats)]
        best = min(costs, key=lambda cost: cost.wall)
        told(f"{what}: {best.wall:.2f} s")
        found.append(Waited(what, best.wall, best.cpu, max(cost.peak_mb for cost in costs), at_most))

    with workplace() as directory, replay_server("vllm", tokenizer_directory(), job.size) as url:
        where = Path(directory)
        out = where / "out.parquet"
        prompts = write_prompts(where / "prompts.jsonl", SMALL, SHORT_PROMPT)
        wait("`--help`", 0.25, "--help")
        wait("`rollout --help`", 0.25, "rollout", "--help")
        wait(f"a run of {SMALL} prompts", 3.0, *recorder_command(job, url, prompts, out, "--quiet"))
        grow(out, rows)
        write_prompts(prompts, rows, SHORT_PROMPT)
        wait(f"`inspect` of {rows:,} rows", 2.0, "inspect", out)
        resume = [part for part in recorder_command(job, url, prompts, out, "--quiet") if part != "--overwrite"]
        wait(f"`--resume` of {rows:,} recorded rows, none owed", 10.0, *resume, "--resume")
    table = markdown(
        ["command", "wall s", "CPU s", "peak MB", "target s"],
        [[each.what, each.seconds, each.cpu, each.peak_mb, each.at_most] for each in found],
    )
    return table, found


def grow(out: Path, rows: int) -> None:
    """Put a recording of `rows` samples in the place of the small one at `out`: its first row, under other ids."""
    (file,) = open_recording(str(out)).files
    batches = list(file.iter_batches())
    first = pa.Table.from_batches(batches).combine_chunks().slice(0, 1)
    summary = Summary()
    for batch in _copies(first, rows):
        summary.add_batch(batch)
    footer = Footer(
        run_facts=json_text({**(file.run_facts or {}), "samples": rows}),
        fingerprint=json_text(file.fingerprint),
        sessions=(Session(number=1, rows=rows, samples=rows),),
        summary=summary,
    )
    write_parquet(out, _copies(first, rows), footer)


def _copies(row: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, ROW_GROUP_ROWS):
        count = min(ROW_GROUP_ROWS, rows - start)
        copies = row.take(pa.array([0] * count)).combine_chunks()
        ids: Sequence[str] = [f"s-{number:07}" for number in range(start, start + count)]
        yield from copies.set_column(0, copies.schema.field("sample_id"), pa.array(ids)).to_batches()
