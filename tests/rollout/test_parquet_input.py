from __future__ import annotations

import datetime
import decimal
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.rollout.inputs import input_source
from managed_cli.rollout.parquet_rows import BATCH_BYTES
from managed_cli.rollout.tasks import InputOptions, read_tasks, validate_input
from tests.rollout.inputs_on_disk import fault_of_line, json_lines, refusal, tasks_of

USER = {"role": "user", "content": "hi"}


def parquet(path: Path, columns: dict[str, object], **options: object) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_columns_are_fields_and_rows_count_from_one(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": ["a", "b"], "id": [7, 8], "topic": ["x", None]})
    first, second = tasks_of(path)
    assert (first.prompt, first.sample_id, first.fields) == ("a", "7", {"topic": "x"})
    assert (first.source, first.line) == ("p.parquet:row 1", 1)
    assert (second.source, second.line, second.fields) == ("p.parquet:row 2", 2, {})


def test_a_row_is_the_same_sample_as_the_line_that_says_the_same(tmp_path: Path) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    records = [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "42"}]},
        {"prompt": "text", "sampling": {"n": 2, "stop": ["x"]}},
        {"prompt_token_ids": [1, 2, 3]},
        {"turns": ["a", "b"], "system": "s"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "score": 0.5},
    ]
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(json_lines(records))
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(records, schema=pa.Table.from_pylist(unified(records)).schema), rows)
    from_lines, from_rows = tasks_of(lines), tasks_of(rows)
    assert [task.sample_id for task in from_lines] == [task.sample_id for task in from_rows]
    assert [task.messages for task in from_lines] == [task.messages for task in from_rows]
    assert [task.fields for task in from_lines] == [task.fields for task in from_rows]


def unified(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """One record with every column, first, so that Arrow learns the types of all."""
    everything: dict[str, object] = {}
    for record in records:
        everything |= record
    return [everything]


def test_keys_that_only_other_rows_have_are_no_part_of_a_message(tmp_path: Path) -> None:
    chats = [[USER], [{"role": "user", "content": "yo", "name": "Kim"}]]
    first, second = tasks_of(parquet(tmp_path / "p.parquet", {"messages": chats}))
    assert first.messages == (USER,)
    assert second.messages == ({"role": "user", "content": "yo", "name": "Kim"},)


def test_values_that_json_lacks_become_ones_that_it_has(tmp_path: Path) -> None:
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    columns: dict[str, object] = {
        "prompt": ["a"],
        "when": pa.array([day], pa.timestamp("us", tz="UTC")),
        "precise": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "day": pa.array([day.date()]),
        "took": pa.array([datetime.timedelta(seconds=2)], pa.duration("ms")),
        "price": pa.array([decimal.Decimal("1.10")]),
        "category": pa.array(["x"]).dictionary_encode(),
        "raw": pa.array([b"bytes that are text"]),
        "nothing": pa.array([float("nan")]),
        "endless": pa.array([float("-inf")]),
        "pairs": pa.array([[("k", 1.5)]], pa.map_(pa.string(), pa.float64())),
        "deep": pa.array([[{"when": day.date(), "score": float("nan"), "left": 1}]]),
    }
    (task,) = tasks_of(parquet(tmp_path / "p.parquet", columns))
    assert json.loads(json.dumps(task.fields, allow_nan=False)) == {
        "when": "2026-01-02 03:04:05.000000Z",
        "precise": "2023-11-14 22:13:20.123456789",
        "day": "2026-01-02",
        "took": 2000,
        "price": "1.10",
        "category": "x",
        "raw": "bytes that are text",
        "endless": "-Infinity",
        "pairs": {"k": 1.5},
        "deep": [{"when": "2026-01-02", "left": 1}],
    }


def test_binary_data_that_is_no_text_is_a_bad_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": ["a", "b"], "image": [b"text", b"\xff\xd8\xff"]})
    assert fault_of_line(path) == "row 2: `image`: expected text, came binary data"


def test_a_repeated_id_names_both_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": ["a", "b", "c"], "id": ["x", "y", "x"]})
    assert fault_of_line(path) == 'row 3: `id`: expected an id of its own, came "x", as in row 1'


def test_it_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    assert tasks_of(parquet(tmp_path / "prompts.jsonl", {"prompt": ["a"]}))[0].source == "prompts.jsonl:row 1"


def test_it_may_come_through_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = parquet(tmp_path / "p.parquet", {"prompt": ["a"]}).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with input_source("-") as source:
        assert [task.source for task in read_tasks(source, InputOptions())] == ["<stdin>:row 1"]


@pytest.mark.parametrize("length", [4, 100, -8])
def test_a_file_that_was_cut_is_told(tmp_path: Path, length: int) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": [str(i) for i in range(2000)]})
    path.write_bytes(path.read_bytes()[:length])
    error = refusal(path)
    assert error.message == f"{path}: the Parquet file cannot be read after row 0"
    assert error.hint == "it may have been cut or still be growing; copy or write it again"


def test_a_damaged_page_is_told_with_the_last_good_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": [f"{i:05}" for i in range(9000)]}, row_group_size=3000)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[start : start + 64] = b"\xff" * 64
    path.write_bytes(content)
    message = refusal(path).message
    assert message.startswith(f"{path}: the Parquet file cannot be read after row ")
    assert 2000 < int(message.rsplit(" ", 1)[1]) <= 6000


def test_a_file_without_rows_holds_no_samples(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", {"prompt": pa.array([], pa.string())})
    assert refusal(path).message == f"{path} holds no samples, expected one JSON object per line"


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    rows, characters = 4000, 10_000
    path = tmp_path / "large.parquet"
    schema = pa.schema({"prompt": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, 200):
            texts = [f"{i:06}" * (characters // 6) for i in range(start, start + 200)]
            writer.write_batch(pa.record_batch([texts], schema=schema))
    assert path.stat().st_size > 4 * BATCH_BYTES
    before = pa.total_allocated_bytes()
    most = 0
    for _ in read_tasks(path, InputOptions()):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 3 * BATCH_BYTES


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.none() | st.integers(-(2**40), 2**40) | texts
rows_with_one_type_per_column = st.lists(
    st.fixed_dictionaries(
        {"prompt": texts.filter(bool)},
        optional={
            "number": st.none() | st.integers(-(2**60), 2**60),
            "share": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "words": st.lists(texts, max_size=3),
            "nested": st.fixed_dictionaries({"a": texts}, optional={"b": st.booleans()}),
        },
    ),
    min_size=1,
    max_size=6,
)
SCHEMA = pa.schema(
    {
        "prompt": pa.string(),
        "number": pa.int64(),
        "share": pa.float64(),
        "words": pa.list_(pa.string()),
        "nested": pa.struct({"a": pa.string(), "b": pa.bool_()}),
    }
)


@settings(deadline=None, max_examples=50)
@given(records=rows_with_one_type_per_column)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, records: list) -> None:
    path = tmp_path_factory.getbasetemp() / "written.parquet"
    pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), path)
    tasks = list(read_tasks(path, InputOptions()))
    assert [task.prompt for task in tasks] == [record["prompt"] for record in records]
    for task, record in zip(tasks, records, strict=True):
        kept = {name: value for name, value in record.items() if name != "prompt" and value is not None}
        assert task.fields == kept
    assert validate_input(path, InputOptions()).samples == len(records)
