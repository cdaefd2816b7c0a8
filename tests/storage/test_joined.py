"""Files joined without decoding them: what pyarrow would have written, and no damage passed on."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.errors import OutputError
from managed_cli.storage import joined, layout, parquet
from managed_cli.storage.check import check_recording
from managed_cli.storage.file_metadata import File, Template, find_footer, moved
from managed_cli.storage.footer import Footer, Session
from managed_cli.storage.joined import write_joined
from managed_cli.storage.parquet import write_parquet
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import ROLLOUTS, record_batch
from managed_cli.storage.summary import Summary
from managed_cli.storage.thrift import Type, parse_struct, struct_bytes
from tests.storage.rows import fill, make_node, make_sample, opened, rows_at, rows_of

LIMIT = 8
"""Rows of a row group in these tests; fewer than half of them make a small one."""


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", LIMIT)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Name of the file and number of each row group that was decoded and encoded again."""
    found: list[tuple[str, int | None]] = []
    real_encode = joined._Joining._encode

    def watched(joining: joined._Joining, held: Sequence[joined._Held]) -> None:
        found.extend((each.path.name, each.index) for each in held)
        real_encode(joining, held)

    monkeypatch.setattr(joined._Joining, "_encode", watched)
    return found


def batch_of(*indices: int, sampled_length: int = 5) -> pa.RecordBatch:
    return record_batch([make_sample(index, sampled_length=sampled_length)[0] for index in indices])


def footer_of(*batches: pa.RecordBatch) -> Footer:
    summary = Summary()
    for batch in batches:
        summary.add_batch(batch)
    sessions = (Session(number=1, rows=summary.rows, samples=summary.samples),)
    return Footer(run_facts='{"model":"tiny"}', fingerprint="{}", sessions=sessions, summary=summary)


def written(path: Path, *batches: pa.RecordBatch) -> Path:
    write_parquet(path, iter(batches), footer_of(*batches))  # of an iterator each batch is a row group
    return path


def described(path: Path) -> dict[str, Any]:  # Any: pyarrow's own description
    description: dict[str, Any] = pq.read_metadata(path).to_dict()  # Any: as above
    return description


def sample_ids(path: Path) -> list[str]:
    ids: list[str] = pq.read_table(path)["sample_id"].to_pylist()
    return ids


def group_rows(path: Path) -> list[int]:
    footer = pq.read_metadata(path)
    return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]


class TestCopiedRowGroups:
    BATCHES = (batch_of(*range(8)), batch_of(*range(8, 15)), batch_of(*range(15, 23)))

    def test_make_the_file_that_pyarrow_writes_of_the_same_rows(self, tmp_path: Path, encoded: list[Any]) -> None:
        files = [
            written(tmp_path / "0", self.BATCHES[0]),
            written(tmp_path / "1"),
            written(tmp_path / "2", *self.BATCHES[1:]),
        ]
        expected = written(tmp_path / "expected", *self.BATCHES)
        write_joined(tmp_path / "out", files, footer_of(*self.BATCHES))
        assert encoded == []
        assert described(tmp_path / "out") == described(expected)
        assert pq.read_metadata(tmp_path / "out").metadata == pq.read_metadata(expected).metadata
        assert (tmp_path / "out").read_bytes() == expected.read_bytes()

    def test_of_many_pages_and_large_dictionaries_are_copied_likewise(
        self, tmp_path: Path, encoded: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(joined, "PIECE_BYTES", 10_000)
        batches = [batch_of(*range(start, start + 8), sampled_length=50_000) for start in (0, 8)]
        files = [written(tmp_path / f"{number}", batch) for number, batch in enumerate(batches)]
        write_joined(tmp_path / "out", files, footer_of(*batches))
        assert encoded == []
        assert (tmp_path / "out").read_bytes() == written(tmp_path / "expected", *batches).read_bytes()

    def test_take_little_memory_however_large_they_are(self, tmp_path: Path, encoded: list[Any]) -> None:
        batch = batch_of(*range(8), sampled_length=100_000)
        file = written(tmp_path / "0", batch)
        footer = footer_of(batch)
        tracemalloc.start()
        write_joined(tmp_path / "out", [file], footer)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert encoded == []
        assert file.stat().st_size > 4_000_000
        assert peak < 2_000_000

    def test_whose_statistics_no_single_page_confirms_are_decoded(
        self, tmp_path: Path, encoded: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Long ids outgrow their dictionary: two pages, whose statistics are summed up in the column chunk's."""
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1100)
        nodes = [make_node(f"{index:04}" + "x" * 1100) for index in range(1100)]
        file = written(tmp_path / "0", batch := record_batch(nodes))
        write_joined(tmp_path / "out", [file], footer_of(batch))
        assert encoded == [("0", 0)]
        assert rows_at(tmp_path / "out") == batch.to_pylist()


class TestSmallRowGroups:
    def test_become_one_where_they_are_neighbours(self, tmp_path: Path, encoded: list[Any]) -> None:
        counts = [[8], [3], [2, 3], [8, 1], [8], [8], [2], [1]]
        files, batches, start = [], [], 0
        for number, of_file in enumerate(counts):
            here = []
            for rows in of_file:
                here.append(batch_of(*range(start, start + rows)))
                start += rows
            files.append(tmp_path / f"{number}")
            write_parquet_with_groups(files[-1], here)
            batches += here
        write_joined(tmp_path / "out", files, footer_of(*batches))
        assert group_rows(tmp_path / "out") == [8, 8, 8, 1, 8, 8, 3]
        assert encoded == [("1", 0), ("2", 0), ("2", 1), ("6", 0), ("7", 0)]
        assert sample_ids(tmp_path / "out") == [f"s-{index}" for index in range(start)]
        assert check_recording(open_recording(tmp_path / "out")).ok

    def test_joined_lie_as_pyarrow_lays_them(self, tmp_path: Path) -> None:
        batches = [batch_of(*range(8)), batch_of(8, 9, 10), batch_of(11), batch_of(*range(12, 20))]
        files = [written(tmp_path / f"{number}", batch) for number, batch in enumerate(batches)]
        write_joined(tmp_path / "out", files, footer_of(*batches))
        expected = written(tmp_path / "expected", batches[0], batch_of(8, 9, 10, 11), batches[3])
        assert described(tmp_path / "out")["row_groups"] == described(expected)["row_groups"]

    def test_of_a_slow_run_are_one_in_its_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 2048)
        samples = [make_sample(index) for index in range(12)]
        with opened(tmp_path / "out.parquet") as output:
            fill(output, samples)
            assert len(layout.shards_in(output.growing_path)) == 3
            output.finish()
        assert group_rows(tmp_path / "out.parquet") == [12]
        assert rows_at(tmp_path / "out.parquet") == rows_of(samples)

    def test_of_few_long_rows_are_not_small(self, tmp_path: Path, encoded: list[Any]) -> None:
        batches = [batch_of(start, start + 1, sampled_length=2000) for start in (0, 2)]
        files = [written(tmp_path / f"{number}", batch) for number, batch in enumerate(batches)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parquet, "ROW_GROUP_BYTES", 80_000)
            write_joined(tmp_path / "out", files, footer_of(*batches))
        assert group_rows(tmp_path / "out") == [2, 2]
        assert encoded == []


def write_parquet_with_groups(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """As a file of ours, of these row groups however small they are."""
    with path.open("wb") as file, parquet.parquet_writer(file, ROLLOUTS) as writer:
        for batch in batches:
            writer.write_batch(batch)
        writer.add_key_value_metadata(footer_of(*batches).key_values())


class TestDamage:
    """Of the second of two files, whose first bytes stand in the new file already when it is met."""

    BATCHES = (batch_of(*range(8)), batch_of(*range(8, 16)))

    @pytest.fixture
    def files(self, tmp_path: Path) -> list[Path]:
        return [written(tmp_path / f"{number}", batch) for number, batch in enumerate(self.BATCHES)]

    @pytest.mark.parametrize("flipped", [0x01, 0x10, 0x80])
    def test_to_any_byte_of_its_pages_is_found_or_mended(
        self, tmp_path: Path, files: list[Path], encoded: list[Any], flipped: int
    ) -> None:
        """Mended are the statistics of a page, which are in the footer too: they are made anew."""
        out, footer = tmp_path / "out", footer_of(*self.BATCHES)
        write_joined(out, files, footer)
        expected = out.read_bytes()
        content = files[1].read_bytes()
        told: list[str] = []
        mended, headers, places = 0, *places_in(files[1])
        for place in places:
            encoded.clear()
            files[1].write_bytes(content[:place] + bytes([content[place] ^ flipped]) + content[place + 1 :])
            try:
                write_joined(out, files, footer)
            except OutputError as error:
                told.append(error.message)
                assert not out.exists()
            else:
                assert out.read_bytes() == expected
                assert encoded == [("1", 0)]
                assert place in headers
                mended += 1
        assert all(str(files[1]) in message or "a shard has changed" in message for message in told)
        assert len(told) > mended > 0

    def test_to_any_byte_of_its_footer_is_not_passed_on(self, tmp_path: Path, files: list[Path]) -> None:
        out, footer = tmp_path / "out", footer_of(*self.BATCHES)
        rows = written(tmp_path / "expected", *self.BATCHES)
        expected, columns = pq.read_table(rows), described_columns(rows)
        content = files[1].read_bytes()
        with files[1].open("rb") as file:
            _, begin = find_footer(file) or ({}, 0)
        for place in range(begin, len(content), 11):
            files[1].write_bytes(content[:place] + bytes([content[place] ^ 0x04]) + content[place + 1 :])
            try:
                write_joined(out, files, footer)
            except OutputError:
                assert not out.exists()
            else:
                assert pq.read_table(out, page_checksum_verification=True).equals(expected)
                assert described_columns(out) == columns

    def test_is_told_with_the_column_and_what_is_unharmed(self, tmp_path: Path, files: list[Path]) -> None:
        content = bytearray(files[1].read_bytes())
        group = pq.read_metadata(files[1]).row_group(0)
        column = next(
            chunk for chunk in map(group.column, range(group.num_columns)) if chunk.path_in_schema == "full_text"
        )
        content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
        files[1].write_bytes(content)
        with pytest.raises(OutputError) as caught:
            write_joined(tmp_path / "out", files, footer_of(*self.BATCHES))
        assert caught.value.message == f"`{files[1]}` cannot be read: a page does not match its checksum"
        assert caught.value.details == (
            "it is in row group 0, column full_text",
            "the file stays as it is, and nothing was put in its place",
        )

    def test_to_a_shard_keeps_a_run_from_finishing_and_its_shards_stay(self, tmp_path: Path) -> None:
        with opened(tmp_path / "out.parquet", rows_per_shard=8) as output:
            fill(output, [make_sample(index) for index in range(16)])
            shard = layout.shards_in(output.growing_path)[1]
            content = bytearray(shard.read_bytes())
            content[len(content) // 4] ^= 1
            shard.write_bytes(content)
            with pytest.raises(OutputError, match=f"`{shard}` cannot be read"):
                output.finish()
            assert len(layout.shards_in(output.growing_path)) == 2
            assert layout.temps_in(output.growing_path) == []
        assert not (tmp_path / "out.parquet").exists()

    @pytest.mark.parametrize("size", [0, 10, 3000, -1])
    def test_to_the_length_of_a_file_is_told(self, tmp_path: Path, files: list[Path], size: int) -> None:
        files[1].write_bytes(files[1].read_bytes()[:size])
        with pytest.raises(OutputError, match=f"`{files[1]}` is"):
            write_joined(tmp_path / "out", files, footer_of(*self.BATCHES))
        assert not (tmp_path / "out").exists()

    def test_a_file_that_is_gone_is_told(self, tmp_path: Path, files: list[Path]) -> None:
        files[1].unlink()
        with pytest.raises(OutputError, match=f"`{files[1]}` does not exist, or no longer"):
            write_joined(tmp_path / "out", files, footer_of(*self.BATCHES))
        assert not (tmp_path / "out").exists()

    def test_rows_more_or_fewer_than_were_counted_are_refused(self, tmp_path: Path, files: list[Path]) -> None:
        for given in (files[:1], [*files, files[0]]):
            with pytest.raises(OutputError, match=f"{8 * len(given)} rows came together where 16 were recorded"):
                write_joined(tmp_path / "out", given, footer_of(*self.BATCHES))
            assert not (tmp_path / "out").exists()


def places_in(file: Path) -> tuple[set[int], Iterator[int]]:
    """Where bytes of page headers stand, and these with every ninth of the others before the footer."""
    with file.open("rb") as source:
        footer, begin = find_footer(source) or ({}, 0)
    content = file.read_bytes()
    headers, at = set(), 4
    while at < begin:
        header, end = parse_struct(content, at)
        headers |= set(range(at, end))
        at = end + header[3][1]
    assert footer
    return headers, (place for place in range(4, begin) if place in headers or place % 9 == 0)


def described_columns(path: Path) -> list[Any]:  # Any: pyarrow's own description
    """What the footer says of every column chunk; its texts' bytes in memory, which only decoding tells, left out."""
    return [group["columns"] for group in described(path)["row_groups"]]


class TestOtherWriters:
    """Whose files may be parts of a merge."""

    @pytest.mark.parametrize(
        "how",
        [
            {"write_page_checksum": False},
            {"write_page_checksum": True, "data_page_version": "2.0"},
            {"write_page_checksum": True, "compression": "snappy"},
            {"write_page_checksum": True, "write_page_index": True},
            {"write_page_checksum": True, "version": "1.0"},
            {"write_page_checksum": True, "sorting_columns": [pq.SortingColumn(0)]},
        ],
        ids=str,
    )
    def test_have_their_row_groups_written_as_ours(
        self, tmp_path: Path, encoded: list[Any], how: dict[str, Any]
    ) -> None:
        batch = batch_of(*range(8))
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / "0", **{"compression": "zstd", **how})
        write_joined(tmp_path / "out", [tmp_path / "0"], footer_of(batch))
        assert encoded
        assert (tmp_path / "out").read_bytes() == written(tmp_path / "expected", batch).read_bytes()

    def test_may_leave_out_that_columns_hold_no_null(self, tmp_path: Path) -> None:
        batch = batch_of(*range(8))
        loose = pa.schema([field.with_nullable(True) for field in batch.schema])
        pq.write_table(pa.Table.from_batches([batch]).cast(loose), tmp_path / "0")
        write_joined(tmp_path / "out", [tmp_path / "0"], footer_of(batch))
        assert (tmp_path / "out").read_bytes() == written(tmp_path / "expected", batch).read_bytes()

    def test_are_refused_where_they_hold_nulls_that_ours_cannot(self, tmp_path: Path) -> None:
        batch = batch_of(*range(8))
        loose = pa.schema([field.with_nullable(True) for field in batch.schema])
        table = pa.Table.from_batches([batch]).cast(loose)
        table = table.set_column(2, loose.field("node_id"), pa.array([None] * 8, pa.string()))
        pq.write_table(table, tmp_path / "0")
        with pytest.raises(OutputError, match=f"`{tmp_path / '0'}` cannot be read: .*node_id.*null"):
            write_joined(tmp_path / "out", [tmp_path / "0"], footer_of(batch))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("level", "field"),
        [
            ("chunk", {1: (int(Type.BINARY), b"other.parquet")}),
            ("chunk", {4: (int(Type.I64), 4)}),
            ("chunk", {8: (int(Type.STRUCT), {})}),
            ("column", {14: (int(Type.I64), 4)}),
            ("column", {10: (int(Type.I64), 4)}),
            ("group", {4: (int(Type.LIST), [])}),
        ],
        ids=["another file", "page index", "encryption", "Bloom filter", "index page", "sorting"],
    )
    def test_that_speak_of_bytes_elsewhere_are_not_copied(
        self, tmp_path: Path, level: str, field: dict[int, Any]
    ) -> None:
        batch = batch_of(*range(8))
        with written(tmp_path / "0", batch).open("rb") as file:
            footer, begin = find_footer(file) or ({}, 0)
        (group_bytes,) = footer[File.ROW_GROUPS][1].values
        template = Template.of(footer_of(batch), ROLLOUTS)
        assert template.find_row_group(group_bytes, begin) is not None
        group, _ = parse_struct(group_bytes)
        chunk = group[1][1].values[3]
        {"chunk": chunk, "column": chunk[3][1], "group": group}[level].update(field)
        if level == "group":
            group[4] = (int(Type.LIST), parse_struct(b"\x19\x0c\x00")[0][1][1])
        assert template.find_row_group(struct_bytes(group), begin) is None


def test_row_groups_beyond_the_16_bit_integers_have_no_ordinal(tmp_path: Path) -> None:
    with written(tmp_path / "0", batch_of(*range(8))).open("rb") as file:
        footer, _ = find_footer(file) or ({}, 0)
    group, _ = parse_struct(footer[File.ROW_GROUPS][1].values[0])
    group[7] = (int(Type.I16), 0)
    assert parse_struct(moved(group, 10, 2**15 - 1))[0][7] == (Type.I16, 2**15 - 1)
    assert 7 not in parse_struct(moved(group, 10, 2**15))[0]
