from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import InputError
from managed_cli.rollout.input_files import InputFiles, distinct_labels, expanded, input_files
from managed_cli.rollout.tasks import InputOptions, Task, read_tasks, validate_input
from tests.rollout.inputs_on_disk import json_lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *records: object, compress: bool = False) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json_lines(records)) if compress else json_lines(records))


def tasks_of(*arguments: str, **options: object) -> list[Task]:
    chosen = InputOptions(**options)  # type: ignore[arg-type]  # tests pass options by name
    with input_files(arguments) as files:
        report = validate_input(files, chosen)
        tasks = list(read_tasks(files, chosen))
        assert report.samples == len(tasks)
        return tasks


def refusal(*arguments: str, **options: object) -> InputError:
    with pytest.raises(InputError) as caught:
        tasks_of(*arguments, **options)
    return caught.value


def test_files_are_read_one_after_the_other(folder: Path) -> None:
    write("b.jsonl", {"prompt": "1"}, {"prompt": "2"})
    write("a.jsonl.gz", {"prompt": "3"}, compress=True)
    pq.write_table(pa.table({"prompt": ["4"]}), "c.parquet")
    tasks = tasks_of("b.jsonl", "a.jsonl.gz", "c.parquet")
    assert [(task.prompt, task.source) for task in tasks] == [
        ("1", "b.jsonl:1"),
        ("2", "b.jsonl:2"),
        ("3", "a.jsonl.gz:1"),
        ("4", "c.parquet:row 1"),
    ]


def test_globs_are_expanded_and_sorted(folder: Path) -> None:
    for name in ("c.jsonl", "a.jsonl", "b.jsonl", "deep/er/d.jsonl", "other.txt"):
        write(name, {"prompt": name})
    Path("folder.jsonl").mkdir()
    assert expanded(["*.jsonl"]) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert expanded(["**/d.jsonl", "[ab].jsonl"]) == ["deep/er/d.jsonl", "a.jsonl", "b.jsonl"]
    assert expanded([f"{folder}/?.jsonl"]) == [f"{folder}/{name}.jsonl" for name in "abc"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(folder: Path) -> None:
    write("[a].jsonl", {"prompt": "brackets"})
    write("a.jsonl", {"prompt": "plain"})
    assert [task.prompt for task in tasks_of("[a].jsonl")] == ["brackets"]


def test_a_glob_without_matches_is_told(folder: Path) -> None:
    error = refusal("*.jsonl")
    assert error.message == "*.jsonl: no file matches"


def test_a_missing_file_among_others_is_told(folder: Path) -> None:
    write("a.jsonl", {"prompt": "a"})
    assert refusal("a.jsonl", "b.jsonl").message == "b.jsonl: there is no such file"


@pytest.mark.parametrize("again", ["a.jsonl", "./a.jsonl", "*.jsonl", "link.jsonl"])
def test_a_file_named_twice_is_told(folder: Path, again: str) -> None:
    write("a.jsonl", {"prompt": "a"})
    if again == "link.jsonl":
        Path("link.jsonl").symlink_to("a.jsonl")
    message = refusal("a.jsonl", again).message
    assert " is named twice, by `a.jsonl`" in message


def test_stdin_stands_among_files_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.jsonl", {"prompt": "a"})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "b"}\n')))
    assert [task.source for task in tasks_of("-", "a.jsonl")] == ["<stdin>:1", "a.jsonl:1"]
    assert refusal("-", "a.jsonl", "-").message == "`-` is named twice: stdin can be read only once"


def test_a_repeated_id_in_another_file_names_both_places(folder: Path) -> None:
    write("a.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"})
    write("deep/b.jsonl", {"prompt": "c"}, {"prompt": "d", "id": "y"})
    error = refusal("a.jsonl", "deep/b.jsonl")
    assert error.message == "1 of 4 samples in a.jsonl and 1 other file cannot be used; no request was sent"
    assert error.details == ('deep/b.jsonl:2: `id`: expected an id of its own, came "y", as in a.jsonl:2',)


def test_equal_prompts_in_two_files_are_two_samples(folder: Path) -> None:
    write("a.jsonl", {"prompt": "a"})
    write("b.jsonl", {"prompt": "a"})
    first, second = tasks_of("a.jsonl", "b.jsonl")
    assert second.sample_id == first.sample_id.removesuffix("0") + "1"


def test_the_fingerprint_does_not_depend_on_the_order_of_files(folder: Path) -> None:
    write("a.jsonl", {"prompt": "a"})
    write("b.jsonl", {"prompt": "b"})

    def fingerprint(*names: str) -> str:
        with input_files(names) as files:
            return validate_input(files, InputOptions()).fingerprint

    assert fingerprint("a.jsonl", "b.jsonl") == fingerprint("b.jsonl", "a.jsonl")


def test_a_limit_counts_over_all_files(folder: Path) -> None:
    write("a.jsonl", {"prompt": "1"}, {"prompt": "2"})
    write("b.jsonl", {"prompt": "3"}, {"prompt": "4"})
    assert [task.prompt for task in tasks_of("a.jsonl", "b.jsonl", limit=3)] == ["1", "2", "3"]


def test_an_empty_file_among_others_does_no_harm(folder: Path) -> None:
    write("a.jsonl")
    write("b.jsonl", {"prompt": "b"})
    assert [task.prompt for task in tasks_of("a.jsonl", "b.jsonl")] == ["b"]


def test_files_of_one_name_are_told_apart_by_their_folders(folder: Path) -> None:
    for name in ("train/x.jsonl", "test/x.jsonl", "y.jsonl"):
        write(name, {"prompt": name})
    sources = [task.source for task in tasks_of("train/x.jsonl", "test/x.jsonl", "y.jsonl")]
    assert sources == ["train/x.jsonl:1", "test/x.jsonl:1", "y.jsonl:1"]
    assert [task.source for task in tasks_of(f"{folder}/train/x.jsonl")] == ["x.jsonl:1"]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join), min_size=1, unique=True))
def test_labels_are_ends_of_their_names_and_all_different(names: list[str]) -> None:
    labels = distinct_labels(names)
    assert len(set(labels)) == len(names)
    assert all(name.endswith(label) for name, label in zip(names, labels, strict=True))


def test_one_file_is_an_input_of_its_own() -> None:
    files = InputFiles.of(Path("data/a.jsonl"))
    assert (files.name, files.labels) == ("data/a.jsonl", ("a.jsonl",))
    assert InputFiles.of(files) is files
