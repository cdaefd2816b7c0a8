from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from managed_cli.errors import ConfigError, OutputError
from managed_cli.node import SequenceNode
from managed_cli.storage.check import check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import SCHEMA
from managed_cli.storage.shards import open_output
from tests.storage.rows import RUN_FACTS, columns_of, fill, make_node, make_sample, write_output


@pytest.fixture(params=["out.parquet", "rows/"])
def finished(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Ten samples of two rows, as a file and as a directory."""
    return write_output(f"{tmp_path}/{request.param}", [make_sample(index, choices=2) for index in range(10)])


def test_batches_give_back_every_row_in_order(finished: Path) -> None:
    table = pa.Table.from_batches(open_recording(finished).iter_batches())
    assert table.to_pydict() == columns_of(node for index in range(10) for node in make_sample(index, choices=2))


def test_only_the_columns_asked_for_are_read_in_that_order(finished: Path) -> None:
    batch = next(open_recording(finished).iter_batches(columns=["tokens", "sample_id"]))
    assert batch.schema.names == ["tokens", "sample_id"]


def test_a_row_is_found_by_its_number_in_whatever_file_it_stands(finished: Path) -> None:
    recording = open_recording(finished)
    expected = columns_of(node for index in range(10) for node in make_sample(index, choices=2))
    for number in (0, 3, 4, 11, 19, -1, -20):
        assert recording.row(number) == {name: values[number] for name, values in expected.items()}
    for number in (20, -21):
        with pytest.raises(ConfigError, match="rows 0 to 19"):
            recording.row(number)


def test_head_gives_the_first_rows_or_all_there_are(finished: Path) -> None:
    recording = open_recording(finished)
    assert [row["node_id"] for row in recording.head(3)] == ["s-0/0", "s-0/1", "s-1/0"]
    assert len(recording.head(1000)) == 20


def test_run_facts_and_counts_come_from_the_footer(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = open_recording(finished)
    monkeypatch.setattr(pq, "ParquetFile", None)
    assert recording.run_facts["model"] == "tiny-random"
    assert (recording.rows, recording.summary().rows, recording.summary().samples) == (20, 20, 10)
    assert recording.state == "finished"


def test_counts_are_the_same_without_a_footer_that_has_them(finished: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.parquet"
    pq.write_table(pq.read_table(finished).replace_schema_metadata(None), bare, row_group_size=7)
    assert open_recording(bare).files[0].summary is None
    assert open_recording(bare).run_facts == {}
    assert open_recording(bare).summary().agrees_with(open_recording(finished).summary())


def test_a_file_that_another_program_rewrote_with_wider_types_reads_as_before(finished: Path, tmp_path: Path) -> None:
    table = pq.read_table(finished)
    wide = {"full_text": pa.large_string(), "tokens": pa.list_(pa.int64()), "logprobs": pa.list_(pa.float64())}
    schema = pa.schema([pa.field(field.name, wide.get(field.name, field.type)) for field in SCHEMA])
    pq.write_table(table.cast(schema).select(SCHEMA.names[::-1]), tmp_path / "wide.parquet")
    read = pa.Table.from_batches(open_recording(tmp_path / "wide.parquet").iter_batches())
    assert read.to_pydict() == table.to_pydict()
    assert read.schema.types == SCHEMA.types


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    sample = make_sample(0, choices=10, sampled_length=2000)
    for count in (3, 60):
        finished = write_output(tmp_path / f"{count}.parquet", [sample] * count, rows_per_shard=1000)
        pq.write_table(pq.read_table(finished), finished, row_group_size=10)
        peaks.append(peak_arrow_bytes(finished))
    assert peaks[1] < 2 * peaks[0]


def peak_arrow_bytes(path: Path) -> int:
    peak = before = pa.total_allocated_bytes()
    for _ in open_recording(path).iter_batches():
        peak = max(peak, pa.total_allocated_bytes())
    return peak - before


class TestUnfinished:
    def test_the_partial_directory_is_opened_in_place_of_a_file_that_is_not_there_yet(self, tmp_path: Path) -> None:
        with open_output(f"{tmp_path}/out.parquet", run_facts=RUN_FACTS, rows_per_shard=2, overwrite=False) as output:
            fill(output, [make_sample(0, choices=2)])
            growing = open_recording(tmp_path / "out.parquet")
            assert (growing.state, growing.rows) == ("growing", 2)
            assert "process" in (growing.writer or "")
        left = open_recording(tmp_path / "out.parquet")
        assert left.path == tmp_path / "out.parquet.partial"
        assert left.state == "unfinished"
        assert "is not finished" in (left.note or "")

    def test_a_new_run_beside_a_finished_file_is_mentioned(self, tmp_path: Path) -> None:
        finished = write_output(tmp_path / "out.parquet", [make_sample(0)])
        with open_output(str(finished), run_facts=RUN_FACTS, rows_per_shard=1, overwrite=True) as output:
            fill(output, [make_sample(1), make_sample(2)])
            assert "out.parquet.partial/" in (open_recording(finished).note or "")
            assert open_recording(finished).rows == 1

    def test_a_writer_without_a_shard_yet_is_told_as_such(self, tmp_path: Path) -> None:
        with (
            open_output(f"{tmp_path}/out.parquet", run_facts=RUN_FACTS, rows_per_shard=1, overwrite=False),
            pytest.raises(OutputError, match="has written no shard yet"),
        ):
            open_recording(tmp_path / "out.parquet")


class TestWhatCannotBeRead:
    def fault(self, path: Path) -> str:
        with pytest.raises(OutputError) as caught:
            open_recording(path)
        assert caught.value.exit_code == 6
        assert str(path) in str(caught.value)
        return str(caught.value)

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "does not exist" in self.fault(tmp_path / "none.parquet")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        assert "is empty" in self.fault(tmp_path / "empty")

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
        assert "is not Parquet: it begins with b'{\"pr'" in self.fault(tmp_path / "prompts.jsonl")

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        whole = write_output(tmp_path / "out.parquet", [make_sample(0)])
        whole.write_bytes(whole.read_bytes()[:-20])
        assert "is truncated" in self.fault(whole)

    def test_a_damaged_footer(self, tmp_path: Path) -> None:
        whole = write_output(tmp_path / "out.parquet", [make_sample(0)])
        content = whole.read_bytes()
        whole.write_bytes(content[:-100] + bytes(92) + content[-8:])
        assert "is damaged" in self.fault(whole)

    def test_parquet_of_something_else_names_the_missing_columns(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"prompt": ["hi"], "full_text": ["x"]}), tmp_path / "other.parquet")
        fault = self.fault(tmp_path / "other.parquet")
        assert "it has no column sample_id, choice_index" in fault
        assert "full_text" not in fault

    def test_a_directory_without_parquet(self, tmp_path: Path) -> None:
        assert "it holds no Parquet files" in self.fault(tmp_path)

    def test_a_column_whose_type_cannot_be_ours(self, tmp_path: Path) -> None:
        whole = write_output(tmp_path / "out.parquet", [make_sample(0)])
        table = pq.read_table(whole)
        text = pa.array(["not ids"] * len(table))
        pq.write_table(table.set_column(table.schema.get_field_index("tokens"), "tokens", text), whole)
        with pytest.raises(OutputError, match="cannot be read: Unsupported cast"):
            open_recording(whole).row(0)


texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def nodes(draw: st.DrawFn, sample_id: str, choice_index: int) -> SequenceNode:
    token_ids = st.integers(0, 2**31 - 1)
    sampled = draw(st.lists(token_ids, max_size=8))
    logprob = st.floats(max_value=0.0, width=32, allow_nan=False)
    return make_node(
        sample_id,
        choice_index,
        prompt=draw(st.lists(token_ids, max_size=8)),
        sampled=sampled,
        logprobs=draw(st.lists(logprob, min_size=len(sampled), max_size=len(sampled))),
        full_text=draw(texts),
        finish_reason=draw(texts),
        parent_id=draw(st.none() | texts),
        input=draw(json_values),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[list[SequenceNode]]:
    ids = draw(st.lists(texts, unique=True, max_size=5))
    return [[draw(nodes(name, choice)) for choice in range(draw(st.integers(0, 3)))] for name in ids]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=runs(), rows_per_shard=st.integers(1, 5))
def test_what_is_written_is_what_is_read(
    tmp_path: Path, samples: list[list[SequenceNode]], rows_per_shard: int
) -> None:
    finished = write_output(tmp_path / "out.parquet", samples, rows_per_shard=rows_per_shard, overwrite=True)
    recording = open_recording(finished)
    written = [node for sample in samples for node in sample]
    read: list[dict[str, Any]] = [row for batch in recording.iter_batches() for row in batch.to_pylist()]
    assert recording.rows == len(read) == len(written)
    for row, node in zip(read, written, strict=True):
        assert (row["tokens"], row["masked_tokens"]) == (node.tokens, node.masked_tokens)
        np.testing.assert_array_equal(row["logprobs"], np.array(node.logprobs, dtype=np.float32))
        assert (row["full_text"], row["sample_id"]) == (node.full_text, node.metadata["sample_id"])
        mean = node.mean_logprob()
        if mean is None or not math.isfinite(np.float32(mean)):
            assert row["mean_logprob"] == (None if mean is None else -math.inf)
        else:
            assert row["mean_logprob"] == pytest.approx(mean, rel=1e-6)
    assert recording.summary().samples == sum(1 for sample in samples if sample)
    assert check_recording(recording).ok
