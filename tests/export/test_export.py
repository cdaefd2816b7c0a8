"""Every row is exported or counted with its reason; what is not for training is refused; OUT is whole or untouched."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.errors import ConfigError, ExitCode, OutputError
from managed_cli.export.export import ExportReport, export_recording
from managed_cli.export.formats import formats
from managed_cli.export.rollouts import Drop
from managed_cli.node import SequenceNode
from tests.export import rewards
from tests.export.recordings import ONE_TURN, TWO_TURNS, node, samples
from tests.storage.rows import write_output


def export(path: Path | str, out: Path, name: str = "trl", **how: Any) -> ExportReport:
    report = export_recording(str(path), str(out), formats()[name], **how)
    assert report.written + sum(report.dropped.values()) == report.rows
    return report


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def recorded(directory: Path, *groups: Sequence[SequenceNode], **how: Any) -> Path:
    return write_output(directory / "out.parquet", groups, **how)


def leftovers(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != "out.parquet")


def test_rows_come_in_their_order_from_a_file_and_from_shards_alike(tmp_path: Path) -> None:
    file = recorded(tmp_path, *samples())
    shards = write_output(f"{tmp_path}/shards/", samples(), rows_per_shard=2)
    assert len(list(Path(shards).glob("*.parquet"))) == 3
    export(file, tmp_path / "a.jsonl")
    export(shards, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert [(line["sample_id"], line["choice_index"]) for line in lines_of(tmp_path / "a.jsonl")] == [
        (name, choice) for name in ("one", "two", "short") for choice in (0, 1)
    ]


def test_a_sample_larger_than_a_batch_stays_one_group(tmp_path: Path) -> None:
    many = [node("many", choice, ONE_TURN) for choice in range(2500)]
    path = recorded(tmp_path, many, [node("one", 0, ONE_TURN)], rows_per_shard=10_000)
    report = export(path, tmp_path / "o.jsonl", "atropos", reward="tests.export.rewards:by_choice")
    assert (report.rows, report.lines, report.samples) == (2501, 2, 2)
    assert [len(line["tokens"]) for line in lines_of(tmp_path / "o.jsonl")] == [2500, 1]


def test_a_row_with_a_sampled_minus_infinity_is_dropped_and_counted(tmp_path: Path) -> None:
    path = recorded(tmp_path, [node("a", 0, ONE_TURN, logprob=-math.inf), node("a", 1, ONE_TURN)])
    report = export(path, tmp_path / "o.jsonl")
    assert report.dropped == {Drop.NONFINITE_LOGPROB: 1}
    assert [line["choice_index"] for line in lines_of(tmp_path / "o.jsonl")] == [1]


def test_a_row_without_a_sampled_token_is_dropped_and_counted(tmp_path: Path) -> None:
    path = recorded(tmp_path, [node("a", 0, ((False, 3), (True, 0))), node("a", 1, ONE_TURN)])
    assert export(path, tmp_path / "o.jsonl").dropped == {Drop.NOTHING_SAMPLED: 1}


def tree() -> list[SequenceNode]:
    """Two first turns; the first of them is gone on from twice."""
    return [
        node("t", 0, ONE_TURN, node_id="0.0"),
        node("t", 1, ONE_TURN, node_id="0.1"),
        node("t", 0, TWO_TURNS, node_id="1.0", parent_id="0.0"),
        node("t", 1, TWO_TURNS, node_id="1.1", parent_id="0.0"),
    ]


def test_of_a_tree_only_the_leaves_are_exported_unless_all_are_asked_for(tmp_path: Path) -> None:
    path = recorded(tmp_path, tree())
    report = export(path, tmp_path / "o.jsonl")
    assert report.dropped == {Drop.INNER_NODE: 1}
    assert [line["node_id"] for line in lines_of(tmp_path / "o.jsonl")] == ["0.1", "1.0", "1.1"]
    assert export(path, tmp_path / "all.jsonl", every_node=True).dropped == {}
    assert [line["node_id"] for line in lines_of(tmp_path / "all.jsonl")] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_node_of_another_sample_with_the_same_id_does_not_make_a_row_an_inner_one(tmp_path: Path) -> None:
    path = recorded(tmp_path, [node("a", 0, ONE_TURN, node_id="0.0")], tree())
    export(path, tmp_path / "o.jsonl")
    first = lines_of(tmp_path / "o.jsonl")[0]
    assert (first["sample_id"], first["node_id"]) == ("a", "0.0")


@pytest.mark.parametrize("has_footer", [True, False])
def test_placeholder_rows_are_refused_whole_also_without_a_footer(tmp_path: Path, has_footer: bool) -> None:
    path = recorded(tmp_path, [node("a", 0, ONE_TURN)], [node("b", 0, ONE_TURN, dummy_tokens=True)])
    if not has_footer:
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(OutputError, match="placeholder tokens, not tokens of a model: they are never exported"):
        export(path, tmp_path / "o.jsonl")
    assert leftovers(tmp_path) == []


def test_a_recording_of_which_nothing_is_left_is_an_error_that_counts_the_reasons(tmp_path: Path) -> None:
    path = recorded(tmp_path, [node("a", 0, ONE_TURN, logprob=-math.inf)])
    with pytest.raises(OutputError, match="none of its 1 rows is left") as caught:
        export(path, tmp_path / "o.jsonl")
    assert caught.value.details == ("1 dropped: nonfinite_logprob",)
    assert leftovers(tmp_path) == []


def test_a_row_that_breaks_a_rule_is_refused_by_its_number(tmp_path: Path) -> None:
    path = recorded(tmp_path, *samples())
    table = pq.read_table(path)
    logprobs = table.column("logprobs").to_pylist()
    logprobs[3][-1] = 0.5
    broken = table.set_column(
        table.schema.get_field_index("logprobs"),
        table.schema.field("logprobs"),
        pa.array(logprobs, pa.list_(pa.float32())),
    )
    pq.write_table(broken, path)
    with pytest.raises(OutputError, match="row 3 breaks a rule: a sampled position whose logprob is above 0"):
        export(path, tmp_path / "o.jsonl")
    assert leftovers(tmp_path) == []


def test_rows_that_do_not_stand_with_their_sample_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path, *samples())
    pq.write_table(pq.read_table(path).take([0, 2, 1, 3, 4, 5]), path)
    with pytest.raises(OutputError, match="the rows of a sample do not stand together"):
        export(path, tmp_path / "o.jsonl")
    assert leftovers(tmp_path) == []


def test_a_row_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path, *samples())
    pq.write_table(pq.read_table(path).take([0, 0, 1]), path)
    with pytest.raises(OutputError, match="sample one, from row 0 on, has two rows of one identity"):
        export(path, tmp_path / "o.jsonl")


def test_an_existing_file_is_left_alone_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path, out = recorded(tmp_path, *samples()), tmp_path / "o.jsonl"
    out.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        export(path, out)
    assert out.read_text() == "mine"
    export(path, out, overwrite=True)
    assert len(lines_of(out)) == 6
    assert leftovers(tmp_path) == ["o.jsonl"]


def test_an_export_that_fails_leaves_the_older_one_as_it_was(tmp_path: Path) -> None:
    path, out = recorded(tmp_path, *samples()), tmp_path / "o.jsonl"
    out.write_text("older")
    with pytest.raises(ConfigError):
        export(path, out, overwrite=True, reward="tests.export.rewards:fails_at_one")
    assert out.read_text() == "older"
    assert leftovers(tmp_path) == ["o.jsonl"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("here/", "is a directory"),
        ("missing/o.jsonl", "no such file or directory"),
        ("out.parquet", "is the recording itself"),
    ],
)
def test_an_output_that_cannot_be_is_named(tmp_path: Path, out: str, message: str) -> None:
    path = recorded(tmp_path, *samples())
    before = path.read_bytes()
    with pytest.raises(OutputError, match=message):
        export_recording(str(path), f"{tmp_path}/{out}", formats()["trl"], overwrite=True)
    assert path.read_bytes() == before


def test_an_unfinished_run_is_exported_only_when_that_is_asked_for(tmp_path: Path) -> None:
    shards = Path(write_output(f"{tmp_path}/out.parquet.partial.tmp/", samples()))
    growing = shards.rename(tmp_path / "out.parquet.partial")
    with pytest.raises(OutputError, match="is not finished"):
        export(growing, tmp_path / "o.jsonl")
    assert export(tmp_path / "out.parquet", tmp_path / "o.jsonl", allow_unfinished=True).rows == 6


@pytest.mark.parametrize("function", ["by_choice", "by_choice_later"])
@pytest.mark.parametrize(
    ("kind", "first"), [("mean", -0.375), ("std", -0.375 / (0.75 / math.sqrt(2) + 1e-6)), ("none", None)]
)
def test_the_advantage_is_the_reward_less_the_mean_of_the_samples_rows(
    tmp_path: Path, function: str, kind: str, first: float | None
) -> None:
    path = recorded(tmp_path, *samples())
    export(path, tmp_path / "o.jsonl", reward=f"tests.export.rewards:{function}", advantage=kind)
    for line in lines_of(tmp_path / "o.jsonl"):
        assert line["reward"] == (0.25, 1.0)[line["choice_index"]]
        wanted = None if first is None else (first, -first)[line["choice_index"]]
        assert line["advantage"] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-12))


def test_a_single_row_has_no_advantage_over_itself(tmp_path: Path) -> None:
    path = recorded(tmp_path, [node("a", 0, ONE_TURN)])
    export(path, tmp_path / "o.jsonl", reward="tests.export.rewards:by_choice", advantage="std")
    assert [line["advantage"] for line in lines_of(tmp_path / "o.jsonl")] == [0.0]


def test_async_rewards_of_several_samples_are_under_way_at_once(tmp_path: Path) -> None:
    path = recorded(tmp_path, *samples())
    rewards.most_at_once = 0
    export(path, tmp_path / "o.jsonl", reward="tests.export.rewards:by_choice_later")
    assert rewards.most_at_once == 6


def test_a_reward_function_sees_the_whole_row_and_its_prints_stay_off_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path, *samples())
    export(path, tmp_path / "o.jsonl", reward="tests.export.rewards:from_everything")
    assert [line["reward"] for line in lines_of(tmp_path / "o.jsonl")] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "printed by the reward function\n" * 6)


def test_rows_and_whole_samples_without_a_reward_are_dropped_and_counted(tmp_path: Path) -> None:
    path = recorded(tmp_path, *samples())
    report = export(path, tmp_path / "o.jsonl", reward="tests.export.rewards:only_first_choices")
    assert report.dropped == {Drop.NO_REWARD: 3}
    report = export(path, tmp_path / "p.jsonl", "atropos", reward="tests.export.rewards:only_sample_one")
    assert (report.dropped, report.samples, report.lines) == ({Drop.NO_REWARD: 4}, 1, 1)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("fails_at_one", r"row 1 \(sample one, choice 1\) failed: ZeroDivisionError: float division by zero"),
        ("fails_at_one_later", r"row 1 \(sample one, choice 1\) failed: ZeroDivisionError: float division by zero"),
        ("not_a_number", r"row 0 \(sample one, choice 0\) returned nan, expected a finite number or None"),
        ("text", r"row 0 \(sample one, choice 0\) returned '1.0', expected a finite number or None"),
        ("nothing_of_that_name", "has no function 'nothing_of_that_name'"),
        ("value", "has no function 'value'"),
    ],
)
def test_a_reward_function_that_fails_is_blamed_by_row_as_a_fault_of_the_option(
    tmp_path: Path, place: str, message: str
) -> None:
    path = recorded(tmp_path, *samples())
    with pytest.raises(ConfigError, match=message) as caught:
        export(path, tmp_path / "o.jsonl", reward=f"tests.export.rewards:{place}")
    assert caught.value.exit_code is ExitCode.USAGE
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("rewards", "is not module:function"),
        ("no_such_module_anywhere:score", "the module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_reward_that_is_no_place_of_a_function_is_refused(tmp_path: Path, place: str, message: str) -> None:
    path = recorded(tmp_path, *samples())
    with pytest.raises(ConfigError, match=message):
        export(path, tmp_path / "o.jsonl", reward=place)


def test_a_scored_format_needs_a_reward_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to atropos needs --reward"):
        export(tmp_path / "not even there", tmp_path / "o.jsonl", "atropos")
