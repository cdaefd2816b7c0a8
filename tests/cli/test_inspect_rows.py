from __future__ import annotations

import re
from pathlib import Path

import pytest

from managed_cli.node import SequenceNode
from tests.cli.command import ESCAPE, document, inspect, on_a_terminal, shown
from tests.storage.rows import make_node, make_sample, write_output

HOSTILE = "\x1b]0;owned\x07\x1b[2J [red]x[/red] \u202egnp.exe \x9b31m\nnext line"


def answer(sample_id: str, choice: int, text: str, **more: object) -> SequenceNode:
    turn = {"start": 3, "end": 5, "finish_reason": "stop", "text": text}
    return make_node(sample_id, choice, full_text=f"What is it? {text}", turns=[turn], **more)  # type: ignore[arg-type] # metadata


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    samples = [make_sample(index, choices=2, sampled_length=1 + index) for index in range(10)]
    return write_output(tmp_path / "out.parquet", samples)


class TestFilterAndSort:
    def test_a_filter_alone_shows_the_figures_of_the_rows_that_pass(self, recorded: Path) -> None:
        text = shown(recorded, "--filter", "length>8", "--filter", "id=s-*")
        assert "4 of 20 rows (20.0%) where length>8 and id=s-*" in text
        assert re.search(r"^sampled +38 tokens", text, re.MULTILINE)
        found = document(recorded, "--filter", "length>8")
        assert (found["matching_rows"], found["summary"]["rows"], found["figures"]["counted_rows"]) == (4, 4, 4)

    def test_rows_that_pass_are_listed_with_their_own_numbers(self, recorded: Path) -> None:
        text = shown(recorded, "--filter", "length>=9", "--head", 2)
        assert re.search(r"^16  s-8  choice 0  3\+9 tokens", text, re.MULTILINE)
        assert text.endswith("2 more rows\n")

    def test_rows_are_listed_in_the_order_asked_for(self, recorded: Path) -> None:
        found = document(recorded, "--sort", "-length", "--head", 3)
        assert [row["row"] for row in found["head"]] == [18, 19, 16]
        assert found["matching_rows"] == 20
        assert re.search(r"^18  s-9 .*\n.*\n19  s-9", shown(recorded, "--sort", "-length"), re.MULTILINE)

    def test_no_row_that_passes_is_no_error(self, recorded: Path) -> None:
        assert "0 of 20 rows" in shown(recorded, "--filter", "length>99")
        assert "no row passes the filter" in shown(recorded, "--filter", "length>99", "--head", 3)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--filter", "length"],
            ["--filter", "size>1"],
            ["--sort", "size"],
            ["--filter", "length>1", "--row", "0"],
            ["--sort", "length", "--check"],
            ["--sample", "s-1", "--row", "0"],
            ["--sample", "nobody"],
            ["--html", "x.html", "--json"],
            ["--html", "x.html", "--head", "3"],
        ],
    )
    def test_what_cannot_be_meant_is_a_usage_error(self, recorded: Path, arguments: list[str]) -> None:
        run = inspect(recorded, *arguments)
        assert run.returncode == 2
        assert "Traceback" not in run.stderr


class TestSample:
    def test_choices_stand_side_by_side(self, tmp_path: Path) -> None:
        choices = [answer("q", 0, "A red apple"), answer("q", 1, "Two pears", sampled=[6, 7])]
        path = write_output(tmp_path / "out.parquet", [choices])
        text = on_a_terminal(path, "--sample", "q", columns=80, NO_COLOR="1")
        assert re.search(r"^row 0, choice 0 +row 1, choice 1", text, re.MULTILINE)
        assert re.search(r"^A red apple +Two pears", text, re.MULTILINE)
        assert "\nWhat is it? \n" in text
        stacked = on_a_terminal(path, "--sample", "q", columns=60, NO_COLOR="1")
        assert not re.search(r"^A red apple +Two", stacked, re.MULTILINE)

    def test_of_a_chat_the_messages_between_two_turns_stand_between_the_answers(self, tmp_path: Path) -> None:
        spans = [{"start": 3, "end": 4, "text": "It is Paris."}, {"start": 5, "end": 6, "text": "Rome, as ever."}]
        sent = [
            {"role": "user", "content": "France?"},
            {"role": "assistant", "content": "It is Paris."},
            {"role": "user", "content": [{"type": "text", "text": "And Italy?" + HOSTILE}]},
        ]
        turns = [{**span, "finish_reason": "stop"} for span in spans]
        text = "France? It is Paris. And Italy? Rome, as ever."
        row = make_node("q", 0, full_text=text, turns=turns, messages=sent)
        path = write_output(tmp_path / "out.parquet", [[row]])
        written = on_a_terminal(path, "--sample", "q", columns=80, NO_COLOR="1")
        assert re.search(r"turn 1\nIt is Paris\.\nturn 2\nuser: And Italy\?[^\0]+\nRome, as ever\.", written)
        assert ESCAPE not in written
        assert not re.search(r"^messages ", shown(path, "--row", 0), re.MULTILINE), "the text shows them"

    def test_a_choice_that_repeats_another_says_so(self, tmp_path: Path) -> None:
        path = write_output(tmp_path / "out.parquet", [[answer("q", 0, "same"), answer("q", 1, "same")]])
        assert "the very tokens of row 0" in shown(path, "--sample", "q")

    def test_rows_that_go_on_from_others_are_drawn_as_a_tree(self, tmp_path: Path) -> None:
        nodes = [
            answer("q", 0, "root", node_id="0"),
            answer("q", 0, "left", node_id="1", parent_id="0"),
            answer("q", 1, "right", node_id="2", parent_id="0"),
            answer("q", 0, "leaf", node_id="3", parent_id="1"),
        ]
        text = shown(write_output(tmp_path / "out.parquet", [nodes]), "--sample", "q")
        drawn = [re.sub(r"  choice.*", "", line).rstrip() for line in text.split("go on from")[-1].splitlines()]
        assert [line for line in drawn if "node" in line or line.strip("│├└─ ")][-8:] == [
            "row 0  node 0",
            "│ root",
            "├─ row 1  node 1",
            "│  │ left",
            "│  └─ row 3  node 3",
            "│       leaf",
            "└─ row 2  node 2",
            "     right",
        ]

    def test_rows_that_name_each_other_as_parents_are_still_shown(self, tmp_path: Path) -> None:
        nodes = [answer("q", 0, "a", node_id="0", parent_id="1"), answer("q", 1, "b", node_id="1", parent_id="0")]
        text = shown(write_output(tmp_path / "out.parquet", [nodes]), "--sample", "q")
        assert "2 rows go on from each other in a circle" in text

    def test_wide_and_hostile_text_is_cut_and_harmless(self, tmp_path: Path) -> None:
        texts = [HOSTILE, "漢字" * 60 + "e\u0301" + "\u200b" * 5]
        path = write_output(tmp_path / "out.parquet", [[answer("q", i, text) for i, text in enumerate(texts)]])
        text = on_a_terminal(path, "--sample", "q", columns=80, NO_COLOR="1")
        assert not [character for character in text if character in "\x07\x1b\x7f\x9b\u202e\u200b\r"]
        assert "\\u202e" in text

    def test_json_has_all_rows_of_the_sample(self, recorded: Path) -> None:
        found = document(recorded, "--sample", "s-3")
        assert [row["row"] for row in found["sample"]] == [6, 7]


class TestDiff:
    def compared(self, tmp_path: Path) -> tuple[Path, Path]:
        one = [[make_node("a", 0), make_node("a", 1)], [make_node("b", 0)], [make_node("only", 0)]]
        other = [
            [make_node("a", 1, sampled=[4, 9], logprobs=[-0.5, -0.5], finish_reason="length"), make_node("a", 0)],
            [make_node("b", 0, logprobs=[-0.5, -0.75])],
        ]
        return write_output(tmp_path / "one.parquet", one), write_output(tmp_path / "other.parquet", other)

    def test_rows_are_paired_by_sample_and_choice_wherever_they_stand(self, tmp_path: Path) -> None:
        one, other = self.compared(tmp_path)
        found = document(one, "--diff", other)
        assert (found["pairs"], found["same"], found["different"]) == (3, 1, 2)
        assert (found["only_in_a"], found["only_in_b"]) == (1, 0)
        assert found["differs"] == {"tokens": 1, "text": 0, "length": 0, "finish_reason": 1, "mean_logprob": 2}
        assert found["finish_changes"] == {"stop → length": 1}
        first, second = found["shown"]
        assert (first["sample_id"], first["choice_index"], first["first_differing_position"]) == ("a", 1, 4)
        assert (second["sample_id"], second["first_differing_position"]) == ("b", None)

    def test_it_is_told_in_words(self, tmp_path: Path) -> None:
        one, other = self.compared(tmp_path)
        text = shown(one, "--diff", other, "--head", 1)
        assert "3 by sample and choice: 1 the same, 2 not" in text
        assert "first differing token at 4 (sampled): 5, 9" in text
        assert "the first 1 of 2 pairs that differ" in text
        assert "stop → length 1" in text

    def test_a_recording_is_the_same_as_itself(self, recorded: Path) -> None:
        found = document(recorded, "--diff", recorded)
        assert (found["pairs"], found["same"], found["shown"]) == (20, 20, [])
        assert "20 the same, 0 not" in shown(recorded, "--diff", recorded)

    def test_several_rows_of_one_choice_are_paired_in_their_order(self, tmp_path: Path) -> None:
        nodes = [make_node("a", 0, node_id="0"), make_node("a", 0, node_id="1", sampled=[7, 8])]
        one = write_output(tmp_path / "one.parquet", [nodes])
        assert document(one, "--diff", one)["same"] == 2


@pytest.mark.parametrize(
    "view", [["--sort", "-length"], ["--filter", "length>0"], ["--diff", "other.parquet"], ["--sample", "q"]]
)
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_text_of_a_model_reaches_the_terminal_only_as_text(tmp_path: Path, view: list[str], extra: list[str]) -> None:
    ours = answer("q", 0, HOSTILE, finish_reason=HOSTILE, server=HOSTILE, node_id=HOSTILE, fork_reason=HOSTILE)
    path = write_output(tmp_path / "out.parquet", [[ours, answer("q", 1, HOSTILE, server=HOSTILE * 2)]])
    write_output(tmp_path / "other.parquet", [[answer("q", 0, "x", sampled=[7, 8]), answer("q", 1, HOSTILE)]])
    view = [str(tmp_path / word) if word == "other.parquet" else word for word in view]
    text = on_a_terminal(path, *view, *extra, NO_COLOR="1")
    assert not [character for character in text if character in "\x07\x1b\x7f\x9b\u202e\r"]
    assert "owned" in text
