"""What is written opens as it is, with the same values, wherever people open Parquet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from managed_cli.storage import parquet
from managed_cli.storage.layout import shard_temp_name
from managed_cli.storage.shards import open_output
from tests.storage.rows import RUN_FACTS, columns_of, fill, make_node, make_sample, write_output

Columns = dict[str, list[Any]]  # Any: the columns' values

SAMPLES = [
    [make_node("ünï-🦜", full_text="\x1b[1m [bold] \u202e 漢字 \ufffd", parent_id="p", input="é\n")],
    [make_node("no-completion", sampled=[], logprobs=[])],
    [make_node("large", prompt=[2**31 - 1], logprobs=[0.0, -87.25])],
    *[make_sample(index, choices=2) for index in range(5)],
]


@pytest.fixture(params=["file", "file of copied shards", "directory", "growing directory"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows as one file, as finished shards, and as shards beside a half-written one and a failure."""
    if request.param == "file of copied shards":
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 4)  # so that none of them is small
        return write_output(tmp_path / "out.parquet", SAMPLES)
    if request.param == "file":
        return write_output(tmp_path / "out.parquet", SAMPLES)
    if request.param == "directory":
        return write_output(f"{tmp_path}/rows/", SAMPLES)
    with open_output(f"{tmp_path}/rows/", run_facts=RUN_FACTS, rows_per_shard=4, overwrite=False) as output:
        fill(output, SAMPLES)
        output.write_shard(output.take_pending())
        output.record_failure({"sample_id": "failed"})
    (tmp_path / "rows" / shard_temp_name(99)).write_bytes(b"PAR1 half written")
    return tmp_path / "rows"


def pattern(path: Path) -> str:
    return f"{path}/*.parquet" if path.is_dir() else str(path)


def by_pyarrow(path: Path) -> Columns:
    columns: Columns = pyarrow.dataset.dataset(path).to_table().to_pydict()
    return columns


def by_pandas(path: Path) -> Columns:
    import pandas as pd

    frame = pd.read_parquet(path)
    columns = {name: [as_plain(value) for value in frame[name].tolist()] for name in frame.columns}
    # pandas has NaN for a missing float, and for a missing string.
    return {name: [None if value != value else value for value in values] for name, values in columns.items()}


def as_plain(value: Any) -> Any:  # Any: numpy arrays and scalars
    return value.tolist() if hasattr(value, "tolist") else value


def by_polars(path: Path) -> Columns:
    import polars as pl

    return pl.scan_parquet(pattern(path)).collect().to_dict(as_series=False)


def by_duckdb(path: Path) -> Columns:
    import duckdb

    with duckdb.connect() as connection:
        result = connection.execute(f"select * from '{pattern(path)}' order by filename, file_row_number")
        names = [column[0] for column in result.description or []]
        rows = result.fetchall()
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


@pytest.mark.parametrize("read", [by_pyarrow, by_pandas, by_polars, by_duckdb])
def test_every_reader_gives_the_same_values(recorded: Path, read: Callable[[Path], Columns]) -> None:
    assert read(recorded) == columns_of(node for sample in SAMPLES for node in sample)


LOAD_DATASET = """
import json, sys, datasets
source = {key: sys.argv[2]} if (key := sys.argv[1]) != "path" else {}
name = sys.argv[2] if key == "path" else "parquet"
print(json.dumps(datasets.load_dataset(name, split="train", cache_dir=sys.argv[3], **source).to_dict()))
"""


@pytest.mark.parametrize("how", ["data_files", "data_dir", "path"])
def test_hugging_face_datasets_gives_the_same_values_offline(recorded: Path, tmp_path: Path, how: str) -> None:
    if recorded.is_file() and how != "data_files":
        how, recorded = "data_dir", recorded.parent
    source = pattern(recorded) if how == "data_files" else str(recorded)
    run = subprocess.run(
        [sys.executable, "-c", LOAD_DATASET, how, source, str(tmp_path / "cache")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == columns_of(node for sample in SAMPLES for node in sample)
