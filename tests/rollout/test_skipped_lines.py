from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.errors import InputError
from managed_cli.rollout import sample_ids
from managed_cli.rollout.tasks import BadLine, InputOptions, Task, read_samples, read_tasks, validate_input
from tests.rollout.inputs_on_disk import WriteInput, json_lines, refusal

SKIP = InputOptions(on_bad_line="skip")


def bad_lines(path: Path, options: InputOptions = SKIP) -> list[BadLine]:
    return [sample for sample in read_samples(path, options) if isinstance(sample, BadLine)]


def test_a_bad_line_is_handed_out_among_the_samples(write: WriteInput) -> None:
    path = write({"prompt": "a"}, b"no json\n", {"prompt": "b"}, {"prompt": 3})
    samples = list(read_samples(path, SKIP))
    assert [type(sample).__name__ for sample in samples] == ["Task", "BadLine", "Task", "BadLine"]
    second = samples[1]
    assert isinstance(second, BadLine)
    assert (second.source, second.line, second.place) == ("prompts.jsonl:2", 2, f"{path}:2")
    assert str(second) == f"{path}:2: invalid JSON at column 1: expecting value"
    assert [task.prompt for task in read_tasks(path, SKIP)] == ["a", "b"]


def test_bad_lines_are_samples_of_the_report(write: WriteInput) -> None:
    path = write({"prompt": "a", "sampling": {"n": 3}}, b"no json\n", {"prompt": "b"})
    report = validate_input(path, SKIP)
    assert (report.samples, report.bad_lines, report.text_prompts) == (3, 1, 2)
    assert report.choices(run_n=2) == 3 + 2
    assert [bad.line for bad in report.first_bad_lines] == [2]


def test_the_report_holds_the_first_ten_of_them(write: WriteInput) -> None:
    report = validate_input(write({"prompt": "a"}, *[{"prompt": i} for i in range(13)]), SKIP)
    assert (report.bad_lines, len(report.first_bad_lines)) == (13, 10)


def test_an_input_of_nothing_but_bad_lines_is_refused(write: WriteInput) -> None:
    path = write(*[{"prompt": i} for i in range(13)])
    error = refusal(path, on_bad_line="skip")
    assert error.message == f"13 of 13 samples in {path} cannot be used; no request was sent"
    assert error.details[-1] == "… and 3 more"


def test_a_bad_line_has_its_own_id_where_it_gives_one(write: WriteInput) -> None:
    path = write({"id": "x", "prompt": 1}, {"prompt": "good"})
    assert [bad.sample_id for bad in bad_lines(path)] == ["x"]


def test_a_bad_line_without_an_id_has_one_from_its_bytes(write: WriteInput) -> None:
    first, again = bad_lines(write(b"no json\n", {"prompt": "good"}, b"no json\n"))
    assert again.sample_id == first.sample_id.removesuffix("0") + "1"
    moved = bad_lines(write({"prompt": "good"}, {"prompt": "other"}, b"no json\n"))
    assert [bad.sample_id for bad in moved] == [first.sample_id]


def test_a_repeated_id_is_a_bad_line_with_another_id(write: WriteInput) -> None:
    path = write({"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}, {"id": "x", "prompt": "b"})
    samples = list(read_samples(path, SKIP))
    assert [isinstance(sample, Task) for sample in samples] == [True, False, False]
    assert len({sample.sample_id for sample in samples}) == 3
    message = '`id`: expected an id of its own, came "x", as in line 1'
    assert [bad.error.message for bad in bad_lines(path)] == [message, message]


def test_a_good_line_cannot_take_the_id_of_a_bad_one(write: WriteInput) -> None:
    path = write({"id": "x", "prompt": 1}, {"id": "x", "prompt": "a"}, {"prompt": "b"})
    first, second = bad_lines(path)
    assert (first.sample_id, second.line) == ("x", 2)
    assert second.sample_id != "x"
    assert second.error.message.endswith('came "x", as in line 1')
    assert len(refusal(path).details) == 2


def test_ids_whose_hashes_meet_are_not_skipped(write: WriteInput, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "y"})
    monkeypatch.setattr(sample_ids, "hash", lambda _: 0, raising=False)
    assert [task.prompt for task in read_tasks(path, SKIP)] == ["a", "b"]
    report = validate_input(path, SKIP)
    assert (report.samples, report.bad_lines) == (3, 1)


def test_skipped_lines_are_part_of_the_fingerprint(write: WriteInput) -> None:
    def fingerprint(*records: object) -> str:
        return validate_input(write(*records), SKIP).fingerprint

    good: dict[str, object] = {"prompt": "a"}
    assert fingerprint(good, b"no json\n") != fingerprint(good)
    assert fingerprint(good, b"no json\n") == fingerprint(b"no json\n", good)


def test_a_limit_counts_bad_lines_too(write: WriteInput) -> None:
    path = write({"prompt": "a"}, b"no json\n", {"prompt": "b"})
    assert validate_input(path, InputOptions(on_bad_line="skip", limit=2)).samples == 2


def test_a_file_that_cannot_be_read_is_no_bad_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        list(read_samples(tmp_path / "none.jsonl", SKIP))


lines = st.sampled_from(
    [
        b"no json",
        b'{"prompt": 1}',
        b'{"prompt": "a"}',
        b'{"id": "x", "prompt": "b"}',
        b'{"id": "x"}',
        b'{"id": "y"}',
        b"",
    ]
)


@settings(deadline=None, max_examples=80)
@given(chosen=st.lists(lines, max_size=8))
def test_every_line_is_one_sample_and_no_two_share_an_id(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "skipped.jsonl"
    path.write_bytes(b"\n".join([*chosen, *json_lines([{"prompt": "good"}]).splitlines()]))
    samples = list(read_samples(path, SKIP))
    assert len(samples) == sum(line != b"" for line in chosen) + 1
    assert len({sample.sample_id for sample in samples}) == len(samples)
    report = validate_input(path, SKIP)
    assert report.samples == len(samples)
    assert report.bad_lines == sum(isinstance(sample, BadLine) for sample in samples)
    assert [s.sample_id for s in read_samples(path, SKIP)] == [s.sample_id for s in samples]
