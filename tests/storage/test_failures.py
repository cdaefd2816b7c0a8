from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import layout
from managed_cli.storage.failures import FailureJournal
from managed_cli.storage.reader import open_recording
from managed_cli.storage.standing import SampleStanding
from tests.storage.rows import failures_at, fill, make_sample, opened, samples_at, write_output


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """The failures of an interrupted run: sample s-0 is recorded, s-1 and s-2 failed."""
    with opened(tmp_path / "out.parquet") as output:
        fill(output, [make_sample(0)])
        output.write_shard(output.take_pending())
        for index in (1, 2):
            output.record_failure(
                {"sample_id": f"s-{index}", "source": f"in.jsonl:{index}", "error": "ServerRefused", "attempts": 3}
            )
    return tmp_path / "out.parquet.failures.jsonl"


def test_a_failure_says_when_it_happened(failed: Path) -> None:
    for entry in lines(failed):
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(entry["time"])
        assert datetime.timedelta(seconds=-1) <= age < datetime.timedelta(minutes=5)
        assert entry["error"] == "ServerRefused"


def test_failed_samples_are_not_owed_again_unless_they_are_to_be_retried(failed: Path, tmp_path: Path) -> None:
    ids = [f"s-{index}" for index in range(4)]
    with opened(tmp_path / "out.parquet", resume=True) as output:
        assert [output.standing(sample_id) for sample_id in ids] == ["recorded", "failed", "failed", "owed"]
        assert output.failed_samples == 2
    with opened(tmp_path / "out.parquet", resume=True, retry_failed=True) as output:
        assert [output.standing(sample_id) for sample_id in ids] == ["recorded", "owed", "owed", "owed"]
    assert failures_at(failed).keys() == {"s-1", "s-2"}


def test_a_sample_that_succeeds_at_last_is_no_failure_any_more(failed: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet", resume=True, retry_failed=True) as output:
        fill(output, [make_sample(1)])
        assert output.failed_samples == 2
        output.write_shard(output.take_pending())
        assert output.failed_samples == 1
        # A reader of the growing file sees lines that parse, and counts what stands.
        assert lines(failed)[-1] == {"sample_id": "s-1", "cleared": True}
        assert open_recording(tmp_path / "out.parquet").failed_samples() == 1
    assert failures_at(failed).keys() == {"s-2"}


def test_a_sample_that_fails_again_stands_with_its_last_failure(failed: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet", resume=True, retry_failed=True) as output:
        output.record_failure({"sample_id": "s-1", "error": "ServerContractError", "attempts": 1})
        assert output.failed_samples == 2
        output.finish()
    assert failures_at(failed)["s-1"]["error"] == "ServerContractError"
    assert open_recording(tmp_path / "out.parquet").failed_samples() == 2


def test_the_file_goes_when_no_sample_stands_failed(failed: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet", resume=True, retry_failed=True) as output:
        fill(output, [make_sample(1), make_sample(2)])
        output.finish()
    assert not failed.exists()
    assert samples_at(tmp_path / "out.parquet") == ["s-0", "s-1", "s-2"]


@pytest.mark.parametrize(
    "torn", [b'{"sample_id": "s-3", "err', b'{"sample_id": "s-3"}', b"\0" * 40, b"\xff\n", b"[]\n"]
)
def test_a_torn_line_is_dropped_on_resume_and_its_sample_is_owed(failed: Path, tmp_path: Path, torn: bytes) -> None:
    failed.write_bytes(failed.read_bytes() + torn)
    with opened(tmp_path / "out.parquet", resume=True) as output:
        assert output.standing("s-3") is SampleStanding.OWED
        assert failures_at(failed).keys() == {"s-1", "s-2"}
        output.record_failure({"sample_id": "s-3"})
    assert failures_at(failed).keys() == {"s-1", "s-2", "s-3"}


def test_a_sample_that_is_recorded_and_failed_is_recorded(failed: Path, tmp_path: Path) -> None:
    with failed.open("a") as file:
        file.write('{"sample_id": "s-0", "error": "of an earlier try"}\n')
    with opened(tmp_path / "out.parquet", resume=True, retry_failed=True) as output:
        assert output.standing("s-0") is SampleStanding.RECORDED
        assert failures_at(failed).keys() == {"s-1", "s-2"}


def test_failures_of_an_earlier_run_go_with_it(failed: Path, tmp_path: Path) -> None:
    write_output(tmp_path / "out.parquet", [make_sample(7)], overwrite=True)
    assert not failed.exists()


def test_a_sample_id_that_no_file_can_hold_is_listed_all_the_same(tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet") as output:
        output.record_failure({"sample_id": "\ud800", "error": "OutputError"})
    with opened(tmp_path / "out.parquet", resume=True) as output:
        assert output.standing("\ud800") is SampleStanding.FAILED


def test_an_untouched_file_is_not_written_anew(failed: Path, tmp_path: Path) -> None:
    before = failed.stat()
    with opened(tmp_path / "out.parquet", resume=True) as output:
        output.finish()
    assert (failed.stat().st_ino, failed.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_half_a_line_that_a_fault_left_is_not_joined_to_the_next(tmp_path: Path) -> None:
    journal = FailureJournal(tmp_path / "failures.jsonl", tmp_path / ".failures.tmp")
    journal.append("a", {"sample_id": "a"})
    with journal.path.open("ab") as file:
        file.write(b'{"sample_id": "b", "mess')
    journal.append("c", {"sample_id": "c"})
    assert failures_at(journal.path).keys() == {"a", "c"}


def test_a_file_that_was_removed_meanwhile_begins_anew(tmp_path: Path) -> None:
    journal = FailureJournal(tmp_path / "failures.jsonl", tmp_path / ".failures.tmp")
    journal.append("a", {"sample_id": "a"})
    journal.path.unlink()
    journal.append("b", {"sample_id": "b"})
    assert failures_at(journal.path).keys() == {"b"}


def test_a_run_of_nothing_but_failures_leaves_a_shard_that_says_which_run_it_is(tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet") as output:
        output.record_failure({"sample_id": "s-0"})
        assert open_recording(tmp_path / "out.parquet").run_facts["model"] == "tiny-random"
        fill(output, [make_sample(index) for index in range(1, 6)])
        assert [shard.name for shard in layout.shards_in(output.growing_path)] == [layout.shard_name(0)]
        output.finish()
    assert open_recording(tmp_path / "out.parquet").rows == 5


def test_old_rows_go_when_the_first_result_of_the_new_run_is_a_failure(tmp_path: Path) -> None:
    with opened(f"{tmp_path}/rows/") as output:
        fill(output, [make_sample(index) for index in range(9)])
        output.record_failure({"sample_id": "old"})
    with opened(f"{tmp_path}/rows/", overwrite=True) as output:
        output.record_failure({"sample_id": "new"})
    assert open_recording(tmp_path / "rows").rows == 0
    assert failures_at(tmp_path / "rows" / ".failures.jsonl").keys() == {"new"}


def test_a_failure_that_cannot_be_written_leaves_its_sample_owed(tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet") as output:
        fill(output, [make_sample(index) for index in range(4)])
        (tmp_path / "out.parquet.failures.jsonl").mkdir()
        with pytest.raises(OutputError, match="cannot record a failed sample beside") as caught:
            output.record_failure({"sample_id": "s-9"})
        assert "the 4 rows in 1 shard" in caught.value.details[0]
        assert "sample s-9 is neither recorded nor listed as failed" in caught.value.details[1]
