"""What lies where: the finished output, the directory it grows in, and which names in there are ours.

    out.parquet                     the finished file
    out.parquet.partial/            while it grows
        shard-00000.parquet …       whole shards, each the rows of whole samples
        .shard-00001.tmp            a shard being written; never data
        .managed-cli.lock           pid and host of the writer
        .merged                     the shards are all in the finished file: what is left of them is to go
    out.parquet.failures.jsonl      one line per failed sample

    DIR/                            a directory that stays one: shards, `.failures.jsonl`, and while it grows the lock

All but the data is hidden: pyarrow, pandas and `datasets` skip such names in a directory (`datasets` reads those
that begin with `_`), and globs ask for `*.parquet`. Polars reads everything in a directory, so there use a glob.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from managed_cli.errors import OutputError
from managed_cli.storage.schema import RUN_METADATA_KEY

PARTIAL_SUFFIX = ".partial"
FAILURES_SUFFIX = ".failures.jsonl"
DIRECTORY_FAILURES_NAME = ".failures.jsonl"
LOCK_NAME = ".managed-cli.lock"
MERGED_TEMP_NAME = ".merged.tmp"
MERGED_MARK_NAME = ".merged"
FAILURES_TEMP_NAME = ".failures.tmp"

_SHARD = re.compile(r"shard-\d{5,}\.parquet")
_TEMP = re.compile(r"\.(shard-\d{5,}|merged|failures)\.tmp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """Where one output goes.

    Attributes:
        final: the file, or the directory of shards, that the run ends as.
        growing: the directory that shards are written to.
        failures: the JSON lines file of failed samples.
        single_file: whether `final` is a file.
    """

    final: Path
    growing: Path
    failures: Path
    single_file: bool

    @property
    def growing_name(self) -> str:
        """`growing` as messages show it, with the slash of a directory."""
        return f"{self.growing}/"

    @property
    def merged_mark(self) -> Path:
        """Stands while shards are removed whose rows are all in `final`."""
        return self.growing / MERGED_MARK_NAME

    @property
    def option(self) -> str:
        """What `--out` names it by."""
        return str(self.final) if self.single_file else self.growing_name


def output_place(path: str) -> OutputPlace:
    """Where the output `path` goes: a directory when it ends in `/` or is one, else a file.

    Raises:
        OutputError: `path` is empty, or is where another output grows.
    """
    if not path:
        raise OutputError("the output path is empty", hint="`--out out.parquet` or `--out DIR/`")
    final = Path(path)
    if final.name.endswith(PARTIAL_SUFFIX):
        name = str(final).removesuffix(PARTIAL_SUFFIX)
        raise OutputError(
            f"`{path}` is where the output `{name}` grows, not an output of its own",
            hint=f"`--out {name} --resume` goes on with it",
        )
    if path.endswith(os.sep) or final.is_dir():
        return OutputPlace(final=final, growing=final, failures=final / DIRECTORY_FAILURES_NAME, single_file=False)
    return OutputPlace(
        final=final,
        growing=final.with_name(final.name + PARTIAL_SUFFIX),
        failures=final.with_name(final.name + FAILURES_SUFFIX),
        single_file=True,
    )


def shard_name(index: int) -> str:
    """File name of the shard with that number, counted from 0."""
    return f"shard-{index:05d}.parquet"


def shard_temp_name(index: int) -> str:
    """File name of that shard while it is being written."""
    return f".shard-{index:05d}.tmp"


def shard_index(shard: Path) -> int:
    """The number in the name of a shard."""
    return int(shard.stem.removeprefix("shard-"))


def shards_in(directory: Path) -> list[Path]:
    """The shards of `directory`, in the order they were written."""
    return sorted((entry for entry in directory.iterdir() if _SHARD.fullmatch(entry.name)), key=shard_index)


def temps_in(directory: Path) -> list[Path]:
    """What a killed writer left half written in `directory`."""
    return [entry for entry in directory.iterdir() if _TEMP.fullmatch(entry.name)]


def foreign_names_in(directory: Path) -> list[str]:
    """Names in `directory` that no run of ours wrote; hidden ones, which no reader looks at, are let be."""
    names = []
    for entry in directory.iterdir():
        ours = _SHARD.fullmatch(entry.name) is not None and is_recording(entry)
        if not (ours or entry.name.startswith(".")):
            names.append(entry.name)
    return sorted(names)


def is_recording(file: Path) -> bool:
    """Whether `file` is a Parquet file with our run facts in its footer."""
    try:
        metadata = pq.read_metadata(file).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return RUN_METADATA_KEY in metadata


def row_count(files: list[Path]) -> int:
    """Rows in `files` together, from their footers."""
    return sum(pq.read_metadata(file).num_rows for file in files)
