from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import InputSource, input_source, numbered_lines
from managed_cli.rollout.sample_ids import BUCKETS, HashSet
from managed_cli.rollout.tasks import InputOptions, read_tasks, validate_input
from tests.rollout.inputs_on_disk import WriteInput, json_lines, refusal, tasks_of

NOBODY_UID = 65534
"""A user without rights, as Linux distributions number it."""

LINES = json_lines({"prompt": f"{i}" * 50} for i in range(5000))


@contextmanager
def without_rights() -> Iterator[None]:
    """As root, act as nobody: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY_UID)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none.jsonl")
    assert error.message == f"{tmp_path}/none.jsonl: there is no such file"
    assert error.hint == "`-` reads the prompts from stdin"


def test_a_directory_is_no_input(tmp_path: Path) -> None:
    assert refusal(tmp_path).message == f"{tmp_path} is a directory, expected a file of JSON lines"


def test_a_file_that_may_not_be_read_is_told(write: WriteInput) -> None:
    path = write({"prompt": "a"})
    path.chmod(0)
    with without_rights():
        assert refusal(path).message == f"{path} cannot be read: Permission denied"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem is Linux's")
def test_a_file_that_fails_while_it_is_read_is_told() -> None:
    assert refusal(Path("/proc/self/mem")).message == "/proc/self/mem cannot be read: Input/output error"


def test_a_name_that_is_too_long_for_a_file_is_told() -> None:
    name = "Tell me a story. " * 100
    with input_source(name) as source, pytest.raises(InputError, match="cannot be read: File name too long"):
        validate_input(source, InputOptions())


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
def test_an_input_without_samples_is_refused(write: WriteInput, content: bytes) -> None:
    path = write(content)
    assert refusal(path).message == f"{path} holds no samples, expected one JSON object per line"


@pytest.mark.parametrize("name", ["prompts.jsonl.gz", "prompts.jsonl"])
def test_gzip_is_read_whatever_its_name(write: WriteInput, name: str) -> None:
    # two members, as `cat a.gz b.gz` makes them
    path = write(gzip.compress(LINES) + gzip.compress(b'{"prompt": "last"}'), name=name)
    tasks = tasks_of(path)
    assert (len(tasks), tasks[-1].prompt, tasks[-1].source) == (5001, "last", f"{name}:5001")


def test_plain_text_named_gz_is_read(write: WriteInput) -> None:
    assert [task.prompt for task in tasks_of(write({"prompt": "a"}, name="prompts.jsonl.gz"))] == ["a"]


@pytest.mark.parametrize(
    "broken", [lambda data: data[:-9], lambda data: data[:-6] + b"\0" * 6, lambda data: data + b"x"]
)
def test_broken_gzip_is_told_with_the_last_good_line(write: WriteInput, broken) -> None:  # type: ignore[no-untyped-def]
    path = write(broken(gzip.compress(LINES)), name="prompts.jsonl.gz")
    error = refusal(path)
    assert error.message.startswith(f"{path}: the compressed data is broken after line ")
    assert error.hint is not None
    assert "gzip --test" in error.hint


def zstd(data: bytes) -> bytes:
    """`data` as one frame, with the checksum that the `zstd` command also writes."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18" + b"\x04\0\0\0" + b"note"
"""Magic number, length and content; readers pass over it (RFC 8878, 3.1.2)."""

WINDOW_OF_256_MIB = b"\x28\xb5\x2f\xfd" + b"\0" + bytes([(28 - 10) << 3]) + b"\x09\0\0" + b"a"
"""Magic number, header, window of 2**28 bytes, and a last raw block of one byte (RFC 8878, 3.1.1)."""


@pytest.mark.parametrize("name", ["prompts.jsonl.zst", "prompts.jsonl"])
def test_zstd_is_read_over_all_its_frames_whatever_its_name(write: WriteInput, name: str) -> None:
    path = write(zstd(LINES) + SKIPPABLE_FRAME + zstd(b'{"prompt": "last"}'), name=name)
    tasks = tasks_of(path)
    assert (len(tasks), tasks[-1].prompt, tasks[-1].source) == (5001, "last", f"{name}:5001")


@pytest.mark.parametrize(
    "broken",
    [lambda data: data[:-5], lambda data: data[:40] + b"\xff" * 40 + data[80:], lambda data: data + b"garbage"],
)
def test_broken_zstd_is_told_with_the_last_good_line(write: WriteInput, broken) -> None:  # type: ignore[no-untyped-def]
    path = write(broken(zstd(LINES)), name="prompts.jsonl.zst")
    error = refusal(path)
    assert error.message.startswith(f"{path}: the compressed data is broken after line ")
    assert error.hint is not None
    assert "zstd --test" in error.hint


def test_zstd_cut_anywhere_but_between_frames_is_told(tmp_path: Path) -> None:
    first, second = zstd(b"a\n" * 20), zstd(b"b\n")
    path = tmp_path / "prompts.jsonl.zst"
    for length in range(5, len(first + second)):
        path.write_bytes((first + second)[:length])
        if length == len(first):
            assert len(list(numbered_lines(InputSource.of(path)))) == 20
        else:
            with pytest.raises(InputError, match="the compressed data is broken after line "):
                list(numbered_lines(InputSource.of(path)))


def test_a_zstd_window_that_is_too_long_is_told_with_the_way_round(write: WriteInput) -> None:
    path = write(WINDOW_OF_256_MIB, name="prompts.jsonl.zst")
    error = refusal(path)
    assert error.message == f"{path} is compressed with a longer zstd window than can be read here"
    assert error.hint == "pipe it in: `zstd -dc --long=31 FILE | managed-cli rollout -`"


def test_zstd_is_decompressed_as_it_is_read(write: WriteInput) -> None:
    path = write(zstd(b"a\n" * 2**20) + b"garbage", name="prompts.jsonl.zst")
    lines = numbered_lines(InputSource.of(path))
    assert next(lines) == (1, b"a\n")  # the fault lies 2 MiB behind
    with pytest.raises(InputError, match="is broken after line 1048576"):
        for _ in lines:
            pass


READ_STDIN = """
from managed_cli.rollout.sample_ids import BUCKETS, HashSet
from managed_cli.rollout.tasks import InputOptions, input_source, read_tasks, validate_input
with input_source("-") as source:
    print(source.name, validate_input(source, InputOptions()).samples)
    print([(task.prompt, task.source) for task in read_tasks(source, InputOptions())])
print(source.path.exists())
"""


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_stdin_is_read_twice_and_its_copy_removed(compress) -> None:  # type: ignore[no-untyped-def]
    piped = compress(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    done = subprocess.run([sys.executable, "-c", READ_STDIN], input=piped, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == ["<stdin> 2", "[('a', '<stdin>:1'), ('b', '<stdin>:2')]", "False"]


def test_a_fault_in_stdin_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": 1}\n')))
    with input_source("-") as source, pytest.raises(InputError) as caught:
        validate_input(source, InputOptions())
    assert caught.value.message == "1 of 1 samples in <stdin> cannot be used; no request was sent"
    assert caught.value.details == ("<stdin>:1: `prompt`: expected a non-empty string, came the number 1",)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_under_the_copy_of_stdin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))

    @contextmanager
    def full_disk(**_: object) -> Iterator[io.FileIO]:
        with io.FileIO("/dev/full", "w") as file:
            yield file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full_disk)
    with (
        pytest.raises(InputError, match="<stdin> cannot be kept in /dev/full: No space left") as caught,
        input_source("-"),
    ):
        pass
    assert caught.value.hint is not None
    assert "TMPDIR" in caught.value.hint


def test_a_pipe_with_a_name_is_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(LINES,))
    writer.start()
    with input_source(str(pipe)) as source:
        assert source.name == str(pipe)
        assert validate_input(source, InputOptions()).samples == 5000
        assert sum(1 for _ in read_tasks(source, InputOptions())) == 5000
    writer.join()


def test_a_file_is_read_where_it_is(write: WriteInput) -> None:
    path = write({"prompt": "a"})
    with input_source(str(path)) as source:
        assert source == InputSource(path, str(path))


def test_lines_end_at_newlines_only(write: WriteInput) -> None:
    path = write("a\u2028b\x0bc\x85d\re\n\nf".encode())
    lines = list(numbered_lines(InputSource.of(path)))
    assert lines == [(1, "a\u2028b\x0bc\x85d\re\n".encode()), (2, b"\n"), (3, b"f")]


def test_a_set_of_hashes_holds_what_was_added_and_nothing_else() -> None:
    hashes, known, chance = HashSet(), set(), random.Random(5)
    for _ in range(20_000):
        key = chance.choice((chance.randrange(-(2**63), 2**63), chance.randrange(64) * BUCKETS))
        assert hashes.add(key) == (key not in known)
        known.add(key)
    assert len(hashes) == len(known)
    assert all(key in hashes for key in known)
    assert not any(key in hashes for key in (chance.getrandbits(62) for _ in range(1000)) if key not in known)
