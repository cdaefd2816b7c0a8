from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from managed_cli.node import alignment_breach
from managed_cli.storage.check import KINDS, PLACES_KEPT, check_recording
from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import SCHEMA, SUMMARY_METADATA_KEY
from managed_cli.storage.summary import Summary
from tests.storage.rows import columns_of, make_node, make_sample, write_output

Row = dict[str, Any]  # Any: the columns' values

NULLABLE = pa.schema([field.with_nullable(True) for field in SCHEMA])


def healthy_rows(count: int = 6) -> list[Row]:
    columns = columns_of(node for index in range(count) for node in make_sample(index))
    return pa.table(columns, schema=SCHEMA).to_pylist()


def write_rows(path: Path, rows: list[Row], **options: Any) -> Path:  # Any: pyarrow's options
    pq.write_table(pa.Table.from_pylist(rows, schema=NULLABLE), path, **options)
    return path


def plant(row: Row, **values: object) -> None:
    row.update(values)


def replace(row: Row, column: str, position: int, value: object) -> None:
    row[column][position] = value


# A healthy row here has 3 masked positions, then 5 sampled ones.
DAMAGE: dict[str, Callable[[Row], None]] = {
    "length": lambda row: row["logprobs"].pop(),
    "negative_token": lambda row: replace(row, "tokens", 0, -7),
    "nan_logprob": lambda row: replace(row, "logprobs", 1, math.nan),
    "masked_logprob": lambda row: replace(row, "logprobs", 2, 0.5),
    "mask_value": lambda row: replace(row, "masked_tokens", 4, row["tokens"][4] + 1),
    "prompt_length": lambda row: plant(row, prompt_length=4),
    "completion_length": lambda row: plant(row, completion_length=4),
    "mean_logprob": lambda row: plant(row, mean_logprob=row["mean_logprob"] + 0.01),
    "choice_index": lambda row: plant(row, choice_index=-1),
    "metadata": lambda row: plant(row, metadata="[1]"),
    "null": lambda row: plant(row, finish_reason=None),
    "duplicate": lambda row: plant(row, sample_id="s-0", node_id="s-0/0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_planted_damage_is_found_as_its_kind_at_its_row(tmp_path: Path, kind: str) -> None:
    rows = healthy_rows()
    DAMAGE[kind](rows[4])
    report = check_recording(open_recording(write_rows(tmp_path / "damaged.parquet", rows, row_group_size=3)))
    assert set(report.breaches) == {kind}
    assert report.breaches[kind].count == 1
    (place,) = report.breaches[kind].places
    assert (place.file, place.row, place.row_in_file) == (tmp_path / "damaged.parquet", 4, 4)


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        (lambda row: replace(row, "logprobs", 5, 0.25), {"sampled_logprob", "mean_logprob"}),
        (lambda row: plant(row, mean_logprob=None), {"mean_logprob"}),
        (lambda row: replace(row, "tokens", 5, None), {"null"}),
        (lambda row: plant(row, tokens=None), {"null"}),
        (lambda row: plant(row, metadata='{"a": NaN}'), {"metadata"}),
        (lambda row: plant(row, metadata='{"a": 1'), {"metadata"}),
        (lambda row: plant(row, metadata=""), {"metadata"}),
        (lambda row: replace(row, "logprobs", 5, math.inf), {"sampled_logprob", "mean_logprob"}),
    ],
)
def test_other_damage_is_found_too(tmp_path: Path, damage: Callable[[Row], None], kinds: set[str]) -> None:
    rows = healthy_rows()
    damage(rows[2])
    report = check_recording(open_recording(write_rows(tmp_path / "damaged.parquet", rows)))
    assert set(report.breaches) == kinds
    assert report.breaches[next(iter(kinds))].places[0].row == 2


def test_healthy_rows_are_ok_also_at_the_edges(tmp_path: Path) -> None:
    edges = [
        [make_node("empty", prompt=[], sampled=[], logprobs=[])],
        [make_node("only-prompt", sampled=[], logprobs=[])],
        [make_node("only-sampled", prompt=[])],
        [make_node("certain", logprobs=[0.0, -0.0])],
        [make_node("rounding", logprobs=[1e-6, 0.0])],
        [make_node("kept", logprobs=[-math.inf, -1.0])],
        [make_node("surrogate", field="\udfff")],
    ]
    report = check_recording(open_recording(write_output(tmp_path / "out.parquet", edges)))
    assert report.breaches == {}
    assert report.rows == len(edges)


def test_a_flipped_byte_in_a_page_is_found_and_the_other_files_are_still_checked(tmp_path: Path) -> None:
    finished = write_output(f"{tmp_path}/rows/", [make_sample(index, sampled_length=50) for index in range(12)])
    damaged = finished / "shard-00001.parquet"
    content = bytearray(damaged.read_bytes())
    column = pq.read_metadata(damaged).row_group(0).column(7)
    assert column.path_in_schema == "logprobs.list.element"
    content[column.data_page_offset + column.total_compressed_size - 5] ^= 0x10
    damaged.write_bytes(content)
    report = check_recording(open_recording(finished))
    assert set(report.breaches) == {"unreadable"}
    assert report.breaches["unreadable"].places[0].file == damaged
    assert (report.breaches["unreadable"].count, report.rows) == (4, 8)


def test_a_footer_that_counts_otherwise_than_its_rows_is_found(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(healthy_rows(), schema=NULLABLE)
    wrong = table.replace_schema_metadata({SUMMARY_METADATA_KEY: Summary(rows=5).to_json()})
    pq.write_table(wrong, tmp_path / "wrong.parquet")
    report = check_recording(open_recording(tmp_path / "wrong.parquet"))
    assert set(report.breaches) == {"summary"}
    assert report.breaches["summary"].places[0].row is None


def test_a_duplicate_is_found_across_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", healthy_rows(3))
    write_rows(tmp_path / "b.parquet", healthy_rows(5)[2:])
    report = check_recording(open_recording(tmp_path))
    assert set(report.breaches) == {"duplicate"}
    (place,) = report.breaches["duplicate"].places
    assert (place.file.name, place.row_in_file, place.row) == ("b.parquet", 0, 3)


def test_all_are_counted_and_the_first_places_kept(tmp_path: Path) -> None:
    rows = healthy_rows(40)
    for row in rows[10:]:
        plant(row, choice_index=-2)
    report = check_recording(open_recording(write_rows(tmp_path / "many.parquet", rows, row_group_size=4)))
    breach = report.breaches["choice_index"]
    assert breach.count == 30
    assert [place.row for place in breach.places] == list(range(10, 10 + PLACES_KEPT))


def test_every_kind_has_a_test_here() -> None:
    assert set(KINDS) == {*DAMAGE, "sampled_logprob", "unreadable", "summary"}


arrays = st.tuples(
    st.lists(st.sampled_from([0, 5, 6, -1, -100]), max_size=4),
    st.lists(st.sampled_from([0, 5, 6, -1, -100]), max_size=4),
    st.lists(st.sampled_from([1.0, -0.5, 0.0, 0.5, math.nan, -math.inf]), max_size=4),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many=st.lists(arrays, min_size=1, max_size=12))
def test_the_alignment_rule_is_the_one_of_the_node(tmp_path: Path, many: list[tuple[list, list, list]]) -> None:
    template = healthy_rows(1)[0]
    rows = [
        {**template, "sample_id": str(number), "tokens": tokens, "masked_tokens": masks, "logprobs": logprobs}
        for number, (tokens, masks, logprobs) in enumerate(many)
    ]
    report = check_recording(open_recording(write_rows(tmp_path / "rows.parquet", rows)))
    of_arrays = {"length", "negative_token", "nan_logprob", "masked_logprob", "mask_value", "sampled_logprob"}
    expected = [alignment_breach(*one) for one in many]
    assert bool(of_arrays & set(report.breaches)) == any(expected)
    assert {breach[0] for breach in expected if breach} <= set(report.breaches)


def test_metadata_of_real_rows_is_json(tmp_path: Path) -> None:
    finished = write_output(tmp_path / "out.parquet", [make_sample(0)])
    assert json.loads(open_recording(finished).row(0)["metadata"])["turns"][0]["end"] == 8
