from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import joined, layout, parquet
from managed_cli.storage.check import check_recording
from managed_cli.storage.merge import merge_parts
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import FINGERPRINT_METADATA_KEY
from managed_cli.storage.shards import open_output
from tests.storage.rows import (
    FINGERPRINT,
    RUN_FACTS,
    failures_at,
    fill,
    make_sample,
    opened,
    rows_at,
    rows_of,
    write_output,
)

OUTPUTS = ["all.parquet", "all/"]


def samples(*indices: int) -> list[list]:
    return [make_sample(index, choices=2) for index in indices]


def write_part(path: Path | str, number: int, *indices: int, failed: tuple[str, ...] = (), finish: bool = True) -> str:
    """Part `number` of a run of three."""
    with open_output(
        str(path),
        run_facts={**RUN_FACTS, "samples": len(indices)},
        fingerprint={**FINGERPRINT, "part": f"{number}/3"},
        rows_per_shard=4,
    ) as output:
        fill(output, samples(*indices))
        for sample_id in failed:
            output.record_failure({"sample_id": sample_id, "part": number})
        output.finish() if finish else output.write_shard(output.take_pending())
    return str(path)


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    """Files and a directory, with failures here and there."""
    return [
        write_part(tmp_path / "1.parquet", 1, 0, 3, 6, failed=("f-1",)),
        write_part(f"{tmp_path}/2/", 2, 1, 4, 7),
        write_part(tmp_path / "3.parquet", 3, 2, failed=("f-2", "f-3")),
    ]


def fault_of(parts: list[str], out: Path | str, **how: bool) -> OutputError:
    with pytest.raises(OutputError) as caught:
        merge_parts(parts, str(out), **how)
    assert caught.value.exit_code == 6
    return caught.value


@pytest.mark.parametrize("path", OUTPUTS)
class TestParts:
    def test_become_one_output_with_all_rows_and_failures(self, tmp_path: Path, parts: list[str], path: str) -> None:
        report = merge_parts(parts, f"{tmp_path}/{path}")
        assert rows_at(report.out) == rows_of(samples(0, 1, 2, 3, 4, 6, 7))
        assert (report.summary.rows, report.summary.samples, report.failed_samples) == (14, 7, 3)
        recording = open_recording(report.out)
        assert recording.state == "finished"
        assert recording.failed_samples() == 3
        assert check_recording(recording).ok
        assert recording.summary().agrees_with(report.summary)
        place = layout.output_place(f"{tmp_path}/{path}")
        assert failures_at(place.failures).keys() == {"f-1", "f-2", "f-3"}
        assert not (tmp_path / "all.parquet.partial").exists()
        assert not (place.growing / layout.LOCK_NAME).exists()

    def test_stay_as_they_are(self, tmp_path: Path, parts: list[str], path: str) -> None:
        before = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
        merge_parts(parts, f"{tmp_path}/{path}")
        assert {entry: entry.read_bytes() for entry in before} == before

    def test_keep_the_order_of_their_rows(self, tmp_path: Path, parts: list[str], path: str) -> None:
        report = merge_parts(parts[::-1], f"{tmp_path}/{path}")
        merged = [row["sample_id"] for batch in open_recording(report.out).iter_batches() for row in batch.to_pylist()]
        assert merged[::2] == ["s-2", "s-1", "s-4", "s-7", "s-0", "s-3", "s-6"]

    def test_give_their_run_facts_and_a_run_without_a_part(self, tmp_path: Path, parts: list[str], path: str) -> None:
        report = merge_parts(parts, f"{tmp_path}/{path}")
        facts = open_recording(report.out).run_facts
        assert facts["model"] == RUN_FACTS["model"]
        assert facts["parts"] == [{"path": name, "samples": n} for name, n in zip(parts, (3, 3, 1), strict=True)]
        keys = pq.read_metadata(open_recording(report.out).files[0].path).metadata
        assert json.loads(keys[FINGERPRINT_METADATA_KEY]) == FINGERPRINT
        assert [session.rows for session in open_recording(report.out).sessions()] == [6, 6, 2]

    def test_merged_can_be_resumed_as_the_whole_run(self, tmp_path: Path, parts: list[str], path: str) -> None:
        merge_parts(parts, f"{tmp_path}/{path}")
        with opened(f"{tmp_path}/{path}", resume=True) as output:
            assert [output.standing(name) for name in ("s-4", "f-2", "s-9")] == ["recorded", "failed", "owed"]
            fill(output, samples(9))
            output.finish()
        assert rows_at(f"{tmp_path}/{path}") == rows_of(samples(0, 1, 2, 3, 4, 6, 7, 9))

    def test_merged_before_are_replaced_only_when_asked_to(self, tmp_path: Path, parts: list[str], path: str) -> None:
        merge_parts(parts, f"{tmp_path}/{path}")
        assert "--overwrite" in str(fault_of(parts[:1], f"{tmp_path}/{path}").hint)
        assert open_recording(f"{tmp_path}/{path}").rows == 14
        merge_parts(parts[1:2], f"{tmp_path}/{path}", overwrite=True)
        assert rows_at(f"{tmp_path}/{path}") == rows_of(samples(1, 4, 7))
        assert failures_at(layout.output_place(f"{tmp_path}/{path}").failures) == {}

    def test_without_rows_make_an_output_without_rows(self, tmp_path: Path, path: str) -> None:
        empty = [write_part(tmp_path / f"{number}.parquet", number) for number in (1, 2)]
        assert merge_parts(empty, f"{tmp_path}/{path}").summary.rows == 0
        assert open_recording(f"{tmp_path}/{path}").rows == 0


class TestRefused:
    def test_parts_of_other_runs_with_the_keys_in_which_they_differ(self, tmp_path: Path, parts: list[str]) -> None:
        other = write_output(tmp_path / "x.parquet", samples(9), fingerprint={**FINGERPRINT, "temperature": 0.5})
        fault = fault_of([parts[0], str(other)], tmp_path / "all.parquet")
        assert fault.message == f"`{other}` is not of the run that `{parts[0]}` is of"
        assert fault.details == (f"temperature: {parts[0]} 1.0, {other} 0.5", "nothing was merged")
        assert not (tmp_path / "all.parquet").exists()

    def test_a_sample_in_two_parts_with_both_places(self, tmp_path: Path, parts: list[str]) -> None:
        again = write_part(tmp_path / "again.parquet", 3, 8, 4, 7)
        fault = fault_of([*parts, again], tmp_path / "all.parquet")
        first, second = (f"{tmp_path}/2/shard-0000{number}.parquet" for number in (0, 1))
        assert fault.message in (
            f"sample s-4, choice 0, node s-4/0 stands in `{first}` row 2 and in `{again}` row 2",
            f"sample s-7, choice 0, node s-7/0 stands in `{second}` row 0 and in `{again}` row 4",
        )
        assert fault.details[0] == "2 samples stand in more than one part"
        assert not (tmp_path / "all.parquet").exists()

    def test_a_part_given_twice(self, tmp_path: Path, parts: list[str]) -> None:
        assert "give each part once" in str(fault_of([parts[0], parts[0]], tmp_path / "all.parquet").hint)

    def test_an_unfinished_part_unless_it_is_allowed(self, tmp_path: Path, parts: list[str]) -> None:
        left = write_part(tmp_path / "4.parquet", 3, 8, 9, 10, finish=False)
        fault = fault_of([*parts, left], tmp_path / "all.parquet")
        assert "did not finish" in fault.message
        assert "--allow-unfinished" in str(fault.hint)
        assert merge_parts([*parts, left], f"{tmp_path}/all.parquet", allow_unfinished=True).summary.samples == 10

    def test_a_part_that_is_being_written_even_so(self, tmp_path: Path, parts: list[str]) -> None:
        with opened(tmp_path / "4.parquet") as output:
            fill(output, samples(8, 9))
            fault = fault_of([*parts, f"{tmp_path}/4.parquet"], tmp_path / "all.parquet", allow_unfinished=True)
        assert "is being written by process" in fault.message

    def test_a_part_that_is_the_output(self, parts: list[str]) -> None:
        for out in (parts[0], parts[1]):
            assert "both a part and the output" in fault_of(parts, out, overwrite=True).message
        assert open_recording(parts[0]).rows == 6
        assert open_recording(parts[1]).rows == 6
        assert open_recording(parts[1]).state == "finished"

    def test_a_file_without_a_fingerprint(self, tmp_path: Path, parts: list[str]) -> None:
        pq.write_table(pq.read_table(parts[0]).replace_schema_metadata(None), tmp_path / "bare.parquet")
        assert "carries no fingerprint" in fault_of([f"{tmp_path}/bare.parquet"], tmp_path / "all.parquet").message

    def test_a_damaged_part_and_what_stood_there_stays(self, tmp_path: Path, parts: list[str]) -> None:
        merge_parts(parts[1:2], f"{tmp_path}/all.parquet")
        content = bytearray(Path(parts[0]).read_bytes())
        group = pq.read_metadata(parts[0]).row_group(0)
        place = next(
            group.column(n).data_page_offset
            for n in range(group.num_columns)
            if group.column(n).path_in_schema == "full_text"
        )
        content[place + 30 : place + 40] = bytes(10)
        Path(parts[0]).write_bytes(content)
        fault = fault_of(parts, tmp_path / "all.parquet", overwrite=True)
        assert f"`{parts[0]}` cannot be read" in fault.message
        assert rows_at(tmp_path / "all.parquet") == rows_of(samples(1, 4, 7))
        assert not (tmp_path / "all.parquet.partial").exists()


def test_a_sample_that_failed_in_one_part_and_is_recorded_in_another_is_recorded(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / "1.parquet", 1, 0, failed=("s-1", "f")), write_part(tmp_path / "2.parquet", 2, 1)]
    again = write_part(tmp_path / "3.parquet", 3, 2, failed=("f",))
    report = merge_parts([*parts, again], f"{tmp_path}/all.parquet")
    assert report.failed_samples == 1
    assert failures_at(tmp_path / "all.parquet.failures.jsonl").keys() == {"f"}


@pytest.mark.parametrize("rows_per_group", [20, 5])
def test_memory_does_not_grow_with_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_group: int
) -> None:
    """Neither where row groups are copied nor where small ones are made one."""
    peaks: list[int] = []
    real_batches = joined._batches

    def watched(*held):  # type: ignore[no-untyped-def]  # as `_batches`
        for batch in real_batches(*held):
            peaks[-1] = max(peaks[-1], pa.total_allocated_bytes())
            yield batch

    monkeypatch.setattr(joined, "_batches", watched)
    for count in (4, 60):
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", rows_per_group)
        samples_of_part = (make_sample(index, choices=5, sampled_length=2000) for index in range(count))
        part = write_output(tmp_path / f"{count}.parquet", samples_of_part, rows_per_shard=20)
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 20)
        peaks.append(0)
        tracemalloc.start()
        merge_parts([str(part)], f"{tmp_path}/all-{count}.parquet")
        peaks[-1] += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
