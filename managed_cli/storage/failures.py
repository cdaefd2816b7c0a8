"""The failed samples: JSON lines, appended one durable line at a time, and rewritten as a whole when a run ends.

    {"time": "2026-01-02T03:04:05+00:00", "sample_id": "a", "error": "ServerContractError", …}     `a` failed
    {"sample_id": "a", "cleared": true}                                                            `a` is recorded now

Of a sample, the last line counts. What is superseded goes when an output is resumed, closed or finished: the file is
then written anew under a temporary name, fsynced and renamed, one line per sample that stands failed. Killed at any
instant, every line but the last parses; a last line without its line feed is dropped when the output is resumed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from managed_cli.storage.parquet import fsync_directory
from managed_cli.storage.recorded_ids import sample_digest


def failure_lines(path: Path, *, except_for: Container[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Each sample that stands failed in `path`, and its line; nothing where there is no such file.

    Args:
        except_for: samples that are recorded after all.

    Raises:
        OSError: the file cannot be read.
    """
    last: dict[bytes, int] = {}
    for number, (sample_id, _, is_cleared) in enumerate(_entries(path)):
        if is_cleared or sample_id in except_for:
            last.pop(sample_digest(sample_id), None)
        else:
            last[sample_digest(sample_id)] = number
    for number, (sample_id, line, _) in enumerate(_entries(path)):
        if last.get(sample_digest(sample_id)) == number:
            yield sample_id, line


def _entries(path: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Sample id, line, and whether the line takes back earlier ones; what does not parse is passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                if line.endswith(b"\n") and isinstance(entry["sample_id"], str):
                    yield entry["sample_id"], line, entry.get("cleared") is True


def write_failures(path: Path, temp: Path, lines: Iterable[bytes]) -> int:
    """How many `lines` there are: `path` holds exactly them, and is gone where there are none.

    Raises:
        OSError: they cannot be written; `path` is as it was.
    """
    count = 0
    try:
        with temp.open("wb") as file:
            for line in lines:
                file.write(line)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        if count:
            temp.rename(path)
        else:
            path.unlink(missing_ok=True)
            temp.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    fsync_directory(path.parent)
    return count


class FailureJournal:
    """The failures of one output, for its only writer; every method blocks on the disk.

    Args:
        temp: where the file is written anew, on the same file system.
    """

    def __init__(self, path: Path, temp: Path) -> None:
        self.path = path
        self._temp = temp
        self._failed: set[bytes] = set()
        self._is_superseded = False
        self._size = 0

    def __len__(self) -> int:
        """How many samples stand failed."""
        return len(self._failed)

    def __contains__(self, sample_id: object) -> bool:
        """Whether `sample_id` stands failed."""
        return bool(self._failed) and isinstance(sample_id, str) and sample_digest(sample_id) in self._failed

    def load(self, recorded: Container[str]) -> None:
        """Take over what an earlier session left, without what is torn, superseded or `recorded`.

        Raises:
            OSError: it cannot be read, or not be written anew.
        """
        if not self.path.exists():
            return
        for sample_id, line in failure_lines(self.path, except_for=recorded):
            self._failed.add(sample_digest(sample_id))
            self._size += len(line)
        if self._size != self.path.stat().st_size:
            self._rewrite()

    def append(self, sample_id: str, failure: Mapping[str, object]) -> None:
        """`failure` is on the disk as one more line, and is what stands of `sample_id`.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._append([{"time": now, **failure}])
        self._is_superseded |= sample_id in self
        self._failed.add(sample_digest(sample_id))

    def clear(self, sample_ids: Iterable[str]) -> None:
        """Those of `sample_ids` that stand failed do no longer; their rows are on the disk already.

        A line that cannot be written now is no fault: the rows count, and `load` and `compact` go by them.
        """
        cleared = [sample_id for sample_id in sample_ids if sample_id in self]
        if cleared:
            self._failed.difference_update(map(sample_digest, cleared))
            self._is_superseded = True
            with contextlib.suppress(OSError):
                self._append([{"sample_id": sample_id, "cleared": True} for sample_id in cleared])

    def compact(self) -> None:
        """The file holds one line for each sample that stands failed, and is gone without any.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        if self._is_superseded:
            self._rewrite()

    def forget(self) -> None:
        """No sample stands failed, and the file is gone; the caller fsyncs the directory."""
        self.path.unlink(missing_ok=True)
        self._failed, self._is_superseded, self._size = set(), False, 0

    def _rewrite(self) -> None:
        lines = (line for sample_id, line in failure_lines(self.path) if sample_id in self)
        write_failures(self.path, self._temp, lines)
        self._is_superseded = False
        self._size = self.path.stat().st_size if self._failed else 0

    def _append(self, entries: Iterable[Mapping[str, object]]) -> None:
        lines = "".join(json.dumps(entry, default=str) + "\n" for entry in entries).encode("ascii")
        try:
            with self.path.open("ab") as file:
                self._size = min(self._size, file.tell())
                file.truncate(self._size)  # half a line, left by a fault that could not be undone
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            if not self._size:
                fsync_directory(self.path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._size) if self._size else self.path.unlink()
            raise
        self._size += len(lines)
