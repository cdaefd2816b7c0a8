"""Honest recordings of a fake server's model, and ways in which a row can be damaged afterwards."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.cli.app import run
from managed_cli.storage.parquet import ROW_GROUP_ROWS
from managed_cli.storage.schema import SCHEMA
from tests.cli.rollout_command import RUN_SECONDS, at, command, environment, rollout, write_prompts
from tests.servers.process import RunningServer

Row = dict[str, Any]  # Any: columns' values; `metadata` is the object that its JSON says

DAMAGED_ROW = 4
"""Which row of a recording is damaged; rows before and after it stay as they are."""


def record(server: RunningServer, folder: Path, *options: object, chats: bool = False) -> Path:
    """An honest recording of six prompts with two choices each."""
    lines: list[dict[str, object]] = [
        {"id": f"p{i}", "prompt": f"Count to {i} and tell me about house number {i * i}."} for i in range(6)
    ]
    if chats:
        lines = [{"id": f"c{i}", "turns": [f"Count to {i}.", "And then?", "Go on."]} for i in range(4)]
    prompts, out = write_prompts(folder / "prompts.jsonl", lines), folder / "out.parquet"
    sampling = ("-n", 1 if chats else 2, "--max-tokens", 24, "--seed", 11)
    done = rollout(prompts, "--out", out, *sampling, *at(server), *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return out


def verify(path: Path, *options: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """`managed-cli verify PATH OPTIONS`, ended."""
    return subprocess.run(
        command("verify", path, *options),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env=environment(**changes),
        timeout=RUN_SECONDS,
    )


def verify_here(path: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, in a tenth of the time."""
    out, err = io.StringIO(), io.StringIO()
    arguments = ["verify", *map(str, (path, *options))]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:  # Any: JSON values
    value: dict[str, Any] = json.loads(done.stdout)  # Any: as above
    return value


def rows_at(path: Path) -> list[Row]:
    """All rows, in file order."""
    return [{**row, "metadata": json.loads(row["metadata"])} for row in pq.read_table(path).to_pylist()]


def write_rows(path: Path, rows: list[Row], like: Path) -> Path:
    """`rows` as a recording with the footer of `like`, but for its counts."""
    stored = [{**row, "metadata": json.dumps(row["metadata"])} for row in rows]
    keys = {key: value for key, value in pq.read_metadata(like).metadata.items() if key != b"managed_cli.summary"}
    pq.write_table(pa.Table.from_pylist(stored, schema=SCHEMA.with_metadata(keys)), path, row_group_size=ROW_GROUP_ROWS)
    return path


def damaged(path: Path, out: Path, damage: Callable[[list[Row], Row], None]) -> Path:
    """A copy of the recording at `path` in which `damage` has changed row `DAMAGED_ROW`."""
    rows = rows_at(path)
    damage(rows, rows[DAMAGED_ROW])
    return write_rows(out, rows, path)


def sampled(row: Row) -> list[int]:
    """The sampled positions."""
    return [position for position, mask in enumerate(row["masked_tokens"]) if mask != -100]


def put(row: Row, position: int, token: int) -> None:
    """Another token at `position`, in both arrays."""
    row["tokens"][position] = token
    if row["masked_tokens"][position] != -100:
        row["masked_tokens"][position] = token


def counted(row: Row) -> None:
    """Length and mean columns that say what the arrays hold: a careful forger's row."""
    places = sampled(row)
    row["completion_length"], row["prompt_length"] = len(places), len(row["tokens"]) - len(places)
    row["mean_logprob"] = sum(row["logprobs"][place] for place in places) / len(places)
