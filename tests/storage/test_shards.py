from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import layout, parquet
from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import COLUMNS, RUN_METADATA_KEY, SCHEMA, SUMMARY_METADATA_KEY
from managed_cli.storage.shards import ShardedOutput, open_output
from tests.storage.rows import RUN_FACTS, columns_of, fill, make_node, make_sample, write_output


def opened(path: Path | str, *, rows_per_shard: int = 4, overwrite: bool = False) -> ShardedOutput:
    return open_output(str(path), run_facts=RUN_FACTS, rows_per_shard=rows_per_shard, overwrite=overwrite)


def samples(count: int, *, choices: int = 1) -> list[list]:
    return [make_sample(index, choices=choices) for index in range(count)]


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_file_output_grows_in_a_partial_directory_and_ends_as_one_file(tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet") as output:
        fill(output, samples(9))
        assert names_in(tmp_path) == ["out.parquet.partial"]
        assert names_in(output.growing_path) == [layout.LOCK_NAME, "shard-00000.parquet", "shard-00001.parquet"]
        assert (output.rows_on_disk, output.pending_rows) == (8, 1)
        assert output.finish() == tmp_path / "out.parquet"
    assert names_in(tmp_path) == ["out.parquet"]
    expected = columns_of(node for sample in samples(9) for node in sample)
    assert pq.read_table(tmp_path / "out.parquet").to_pydict() == expected


def test_a_directory_output_stays_a_directory_of_shards(tmp_path: Path) -> None:
    finished = write_output(f"{tmp_path}/rows/", samples(9))
    assert finished == tmp_path / "rows"
    assert names_in(finished) == [f"shard-0000{index}.parquet" for index in range(3)]


def test_an_existing_empty_directory_is_taken_as_the_directory_of_shards(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write_output(tmp_path / "rows", samples(2))
    assert names_in(tmp_path / "rows") == ["shard-00000.parquet"]


def test_all_rows_of_a_sample_stand_in_one_shard(tmp_path: Path) -> None:
    finished = write_output(f"{tmp_path}/rows/", samples(10, choices=3))
    homes: dict[str, set[str]] = {}
    for shard in layout.shards_in(finished):
        for sample_id in pq.read_table(shard)["sample_id"].to_pylist():
            homes.setdefault(sample_id, set()).add(shard.name)
    assert len(homes) == 10
    assert all(len(shards) == 1 for shards in homes.values())


@pytest.mark.parametrize("path", ["out.parquet", "rows/"])
def test_a_run_without_rows_ends_in_a_valid_file_with_the_schema(tmp_path: Path, path: str) -> None:
    finished = write_output(f"{tmp_path}/{path}", [])
    recording = open_recording(finished)
    assert recording.rows == 0
    assert recording.run_facts["model"] == "tiny-random"
    assert pq.read_table(finished).schema.names == SCHEMA.names
    assert check_recording(recording).ok


def test_the_schema_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    write_output(tmp_path / "roots.parquet", [[make_node()]])
    write_output(tmp_path / "children.parquet", [[make_node(parent_id="p")]])
    for name in ("roots.parquet", "children.parquet"):
        assert pq.read_schema(tmp_path / name).equals(SCHEMA)


def test_encodings_are_those_of_the_columns_table(tmp_path: Path) -> None:
    finished = write_output(tmp_path / "out.parquet", samples(50))
    group = pq.read_metadata(finished).row_group(0)
    leaves = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    assert set(leaves) == {parquet.leaf_path(column) for column in COLUMNS}
    for column in COLUMNS:
        leaf = leaves[parquet.leaf_path(column)]
        assert leaf.compression == "ZSTD"
        assert ("BYTE_STREAM_SPLIT" in leaf.encodings) == column.byte_stream_split
        assert ("RLE_DICTIONARY" in leaf.encodings) == column.dictionary


@pytest.mark.parametrize("rows_per_shard", [4, 100])
def test_every_file_carries_the_run_facts_and_the_counts_of_its_own_rows(tmp_path: Path, rows_per_shard: int) -> None:
    with opened(tmp_path / "out.parquet", rows_per_shard=rows_per_shard) as output:
        fill(output, samples(10))
        output.write_shard(output.take_pending())
        files = layout.shards_in(output.growing_path)
        counts = [json.loads(pq.read_metadata(file).metadata[SUMMARY_METADATA_KEY])["rows"] for file in files]
        assert counts == [pq.read_metadata(file).num_rows for file in files]
        finished = output.finish()
    keys = pq.read_metadata(finished).metadata
    assert json.loads(keys[RUN_METADATA_KEY])["sampling"] == RUN_FACTS["sampling"]
    assert json.loads(keys[SUMMARY_METADATA_KEY])["samples"] == 10


def test_row_groups_stay_within_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 3)
    finished = write_output(tmp_path / "rows.parquet", samples(10, choices=5))
    by_rows = pq.read_metadata(finished)
    assert max(by_rows.row_group(index).num_rows for index in range(by_rows.num_row_groups)) == 3
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 2048)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    finished = write_output(tmp_path / "bytes.parquet", samples(4))
    assert pq.read_metadata(finished).num_row_groups == 4
    assert check_recording(open_recording(finished)).ok


def test_rows_are_spread_evenly_over_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.record_batch({"number": pa.array(range(1366), pa.int32())})
    assert [table.num_rows for table in parquet.row_groups([batch] * 3, batch.schema)] == [1366] * 3
    uneven = [batch.slice(0, 100)] * 20 + [batch.slice(0, 49)]
    tables = list(parquet.row_groups(uneven, batch.schema))
    assert [table.num_rows for table in tables] == [1025, 1024]
    assert pa.concat_tables(tables) == pa.Table.from_batches(uneven)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1000)
    assert [table.num_rows for table in parquet.row_groups([batch.slice(0, 260)], batch.schema)] == [130, 130]


def test_a_row_that_does_not_fit_its_column_is_refused_and_leaves_the_buffer_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path / "out.parquet") as output:
        output.add(make_sample(0))
        too_large = make_node("large", prompt=[2**31])
        with pytest.raises(OutputError, match="a row of sample large cannot be stored"):
            output.add([make_node("large"), too_large])
        with pytest.raises(OutputError, match="sample None cannot be stored: it has no sample_id"):
            output.add([make_node(sample_id=None)])  # type: ignore[arg-type]  # what a bug would do
        assert output.pending_rows == 1


def test_a_lone_surrogate_in_metadata_is_kept_as_its_escape(tmp_path: Path) -> None:
    finished = write_output(tmp_path / "out.parquet", [[make_node(field="\ud800")]])
    assert json.loads(open_recording(finished).row(0)["metadata"])["field"] == "\ud800"
    assert check_recording(open_recording(finished)).ok


class TestFailures:
    @pytest.mark.parametrize(
        ("path", "failures"), [("out.parquet", "out.parquet.failures.jsonl"), ("rows/", "rows/.failures.jsonl")]
    )
    def test_stand_one_per_line_and_only_when_there_are_some(self, tmp_path: Path, path: str, failures: str) -> None:
        with opened(f"{tmp_path}/{path}") as output:
            assert output.failures_path == tmp_path / failures
            assert not output.failures_path.exists()
            output.record_failure({"sample_id": "a", "line": 1})
            output.record_failure({"sample_id": "b", "line": 2, "error": "✗"})
            finished = output.finish()
        lines = [json.loads(line) for line in (tmp_path / failures).read_text(encoding="utf-8").splitlines()]
        assert [line["sample_id"] for line in lines] == ["a", "b"]
        assert open_recording(finished).failed_samples() == 2

    def test_of_an_earlier_run_go_when_it_is_overwritten(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet") as output:
            output.record_failure({"sample_id": "old"})
            output.finish()
        write_output(tmp_path / "out.parquet", samples(1), overwrite=True)
        assert names_in(tmp_path) == ["out.parquet"]


class TestWhatStandsThere:
    def test_a_finished_file_is_not_replaced_without_overwrite(self, tmp_path: Path) -> None:
        write_output(tmp_path / "out.parquet", samples(3))
        with pytest.raises(OutputError, match="exists and holds 3 rows") as caught:
            opened(tmp_path / "out.parquet")
        assert "--overwrite" in (caught.value.hint or "")
        assert caught.value.exit_code == 6
        assert names_in(tmp_path) == ["out.parquet"]

    def test_an_unfinished_run_is_told_by_its_rows_and_shards(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet") as output:
            fill(output, samples(8))
        with pytest.raises(OutputError, match="holds 8 rows in 2 shards of a run that did not finish"):
            opened(tmp_path / "out.parquet")
        assert open_recording(tmp_path / "out.parquet").rows == 8

    def test_a_run_that_wrote_nothing_leaves_nothing_in_the_way(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet") as output:
            output.add(make_sample(0))
        assert names_in(tmp_path) == []

    def test_the_old_file_stays_until_the_new_run_has_finished(self, tmp_path: Path) -> None:
        write_output(tmp_path / "out.parquet", samples(3))
        before = (tmp_path / "out.parquet").read_bytes()
        with opened(tmp_path / "out.parquet", overwrite=True) as output:
            fill(output, samples(9))
            assert (tmp_path / "out.parquet").read_bytes() == before
            output.finish()
        assert open_recording(tmp_path / "out.parquet").rows == 9

    @pytest.mark.parametrize("path", ["out.parquet", "rows/"])
    def test_old_shards_stay_until_the_new_run_has_its_first(self, tmp_path: Path, path: str) -> None:
        with opened(f"{tmp_path}/{path}") as output:
            fill(output, samples(12))
        with opened(f"{tmp_path}/{path}", overwrite=True):
            pass
        assert open_recording(f"{tmp_path}/{path}").rows == 12
        with opened(f"{tmp_path}/{path}", overwrite=True) as output:
            fill(output, samples(4))
        assert open_recording(f"{tmp_path}/{path}").rows == 4

    def test_a_finished_directory_is_still_finished_after_an_overwrite_that_wrote_nothing(self, tmp_path: Path) -> None:
        write_output(f"{tmp_path}/rows/", samples(3))
        with opened(f"{tmp_path}/rows/", overwrite=True):
            pass
        assert open_recording(tmp_path / "rows").state == "finished"

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_file_of_another_kind_is_never_replaced(self, tmp_path: Path, overwrite: bool) -> None:
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
        with pytest.raises(OutputError, match="is not a recording"):
            opened(tmp_path / "prompts.jsonl", overwrite=overwrite)
        assert (tmp_path / "prompts.jsonl").read_text() == '{"prompt": "hi"}\n'
        assert names_in(tmp_path) == ["prompts.jsonl"]

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_directory_with_foreign_files_is_refused_and_left_alone(self, tmp_path: Path, overwrite: bool) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "shard-00000.parquet").write_text("named like ours, and not")
        with pytest.raises(OutputError, match=r"not a recording: notes\.txt, shard-00000\.parquet"):
            opened(tmp_path, overwrite=overwrite)
        assert names_in(tmp_path) == ["notes.txt", "shard-00000.parquet"]

    def test_a_hidden_foreign_file_is_let_be(self, tmp_path: Path) -> None:
        (tmp_path / ".gitignore").write_text("*\n")
        write_output(tmp_path, samples(1))
        write_output(tmp_path, samples(1), overwrite=True)
        assert names_in(tmp_path) == [".gitignore", "shard-00000.parquet"]


class TestPlacesThatCannotBeWritten:
    def test_a_missing_parent_is_named_with_the_command_that_makes_it(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="there is no directory") as caught:
            opened(tmp_path / "no" / "out.parquet")
        assert caught.value.hint == f"mkdir -p {tmp_path / 'no'}"

    def test_a_device_is_refused(self) -> None:
        with pytest.raises(OutputError, match="not a regular file"):
            opened("/dev/null", overwrite=True)

    def test_an_empty_path_is_refused(self) -> None:
        with pytest.raises(OutputError, match="empty"):
            opened("")

    def test_a_file_where_a_directory_is_asked_for_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "rows").write_text("")
        with pytest.raises(OutputError, match="a file of that name stands there"):
            opened(f"{tmp_path}/rows/")

    def test_a_name_that_is_too_long_is_an_output_error(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="file name too long"):
            opened(tmp_path / ("x" * 300))

    def test_a_read_only_directory_is_an_output_error(self) -> None:
        with unwritable_directory() as directory, pytest.raises(OutputError, match=r"cannot write .*permission denied"):
            opened(directory / "out.parquet")

    @pytest.mark.parametrize("step", ["shard", "finish"])
    def test_a_full_disk_is_told_and_whole_shards_stay(self, tmp_path: Path, step: str) -> None:
        with opened(tmp_path / "out.parquet", rows_per_shard=100) as output:
            for start in (0, 100):
                fill(output, [make_sample(start + index) for index in range(100)])
            output.add(make_sample(200, sampled_length=20_000))
            size = max(shard.stat().st_size for shard in layout.shards_in(output.growing_path))
            # The kernel's own refusal (EFBIG) stands for a full disk: the same path of a failing write.
            with file_size_limit(size + 1000), pytest.raises(OutputError, match=r"cannot .*: file too large") as caught:
                output.write_shard(output.take_pending()) if step == "shard" else output.finish()
            assert "the 200 rows in 2 shards" in caught.value.details[0]
        assert names_in(tmp_path / "out.parquet.partial") == [
            layout.LOCK_NAME,
            "shard-00000.parquet",
            "shard-00001.parquet",
        ]
        assert check_recording(open_recording(tmp_path / "out.parquet")).ok


@contextlib.contextmanager
def unwritable_directory() -> Iterator[Path]:
    """A directory in which this process may make nothing; root gives its rights up meanwhile."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        if is_root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)
            Path(name).chmod(0o755)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
