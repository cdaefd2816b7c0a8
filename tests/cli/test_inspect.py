from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.storage.reader import open_recording
from managed_cli.storage.schema import record_batch
from managed_cli.storage.shards import open_output
from managed_cli.types import IGNORED_TOKEN_ID
from tests.cli.command import ESCAPE, document, environment, inspect, on_a_terminal, shown
from tests.storage.rows import REPOSITORY, RUN_FACTS, fill, make_node, make_sample, write_output

QUICK_SECONDS = 0.6
"""What the counts of a file of 100 000 rows may take, the start of Python included, on an idle machine."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_output(tmp_path / "out.parquet", [make_sample(index, choices=2) for index in range(10)])


HOSTILE = "\x1b]0;owned\x07\x1b[2J [red]x[/red] \u202egnp.exe \x9b31m\nnext line"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A row whose every text wants to be obeyed by the terminal."""
    node = make_node(
        HOSTILE,
        full_text=f"prompt {HOSTILE}",
        finish_reason=HOSTILE,
        stop_reason=HOSTILE,
        turns=[{"start": 3, "end": 5, "finish_reason": HOSTILE, "text": HOSTILE}],
        **{HOSTILE: HOSTILE},
    )
    facts = {**RUN_FACTS, HOSTILE: HOSTILE}
    with open_output(f"{tmp_path}/hostile.parquet", run_facts=facts, rows_per_shard=1, overwrite=False) as output:
        output.add([node])
        return output.finish()


class TestSummary:
    def test_shows_counts_run_and_failures(self, tmp_path: Path) -> None:
        with open_output(f"{tmp_path}/out.parquet", run_facts=RUN_FACTS, rows_per_shard=4, overwrite=False) as output:
            fill(output, [make_sample(index, choices=2) for index in range(10)])
            output.record_failure({"sample_id": "failed"})
            output.finish()
        text = shown(tmp_path / "out.parquet")
        for part in (
            "20 rows in 1 file",
            "samples         10\n",
            "60 tokens, 3.0 a row",
            "100 tokens, 5.0 a row",
            "model           tiny-random",
            "temperature=1.0",
            "2026-01-02T03:04:05Z",
            "1 sample, listed in",
        ):
            assert part in text
        assert re.search(r"finish reasons  (stop|length) \d+ \(\d+\.\d%\), (stop|length) \d+", text)
        assert re.search(r"mean logprob    -0\.\d{4} per sampled token", text)

    def test_says_whether_the_output_is_finished(self, tmp_path: Path) -> None:
        path = tmp_path / "out.parquet"
        with open_output(str(path), run_facts=RUN_FACTS, rows_per_shard=2, overwrite=False) as output:
            fill(output, [make_sample(0, choices=2), make_sample(1, choices=2)])
            growing = shown(path)
            assert f"still growing: process {os.getpid()}" in growing
            assert "out.parquet.partial/" in growing
            assert "4 rows in 2 files" in growing
        lock = tmp_path / "out.parquet.partial" / ".managed-cli.lock"
        lock.write_text(json.dumps({"pid": 4194305, "host": os.uname().nodename}))  # no Linux pid is as large
        assert "not finished: its writer has ended" in shown(path)
        assert document(path)["state"] == "unfinished"

    def test_json_is_one_document_with_the_same_counts(self, recorded: Path) -> None:
        found = document(recorded)
        assert found["rows"] == found["summary"]["rows"] == 20
        assert found["summary"]["mean_logprob"] == pytest.approx(open_recording(recorded).summary().mean_logprob())
        assert found["run"]["model"] == "tiny-random"
        assert (found["state"], found["files"], found["failed_samples"]) == ("finished", [str(recorded)], 0)

    def test_of_100_000_rows_comes_at_once_and_without_the_heavy_libraries(self, tmp_path: Path) -> None:
        batch = record_batch([node for index in range(500) for node in make_sample(index, choices=2)])
        finished = write_output(tmp_path / "out.parquet", [make_sample(0)])
        table = pa.Table.from_batches([batch] * 100).replace_schema_metadata(pq.read_metadata(finished).metadata)
        pq.write_table(table, finished, row_group_size=2048)
        code = (
            "import sys\nfrom managed_cli.cli.app import run\n"
            "assert run(['inspect', sys.argv[1]]) == 0\n"
            "print(*sorted({'torch', 'transformers', 'pydantic', 'httpx', 'tokenizers'} & set(sys.modules)))"
        )
        walls = []
        for _ in range(5):  # the best of a few: other work on the machine is not ours to measure
            begin = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-c", code, str(finished)], capture_output=True, text=True, check=True, cwd=REPOSITORY
            )
            walls.append(time.perf_counter() - begin)
        assert "100,000 rows" in run.stdout
        assert run.stdout.splitlines()[-1] == "", "a heavy library was imported"
        assert min(walls) < QUICK_SECONDS


class TestHead:
    def test_shows_the_first_rows(self, recorded: Path) -> None:
        text = shown(recorded, "--head", 3)
        assert re.search(r"0  s-0  choice 0  3\+5 tokens  (stop|length)  mean logprob -0\.\d{3}\n   d e\n", text)
        assert "2  s-1  choice 0" in text
        assert "3  s-1" not in text
        assert text.endswith("17 more rows\n")

    def test_more_than_there_are_shows_all(self, recorded: Path) -> None:
        text = shown(recorded, "--head", 99)
        assert "19  s-9  choice 1" in text
        assert "more row" not in text

    def test_json_holds_whole_rows_with_their_metadata_as_objects(self, recorded: Path) -> None:
        rows = document(recorded, "--head", 2)["head"]
        assert [row["row"] for row in rows] == [0, 1]
        assert len(rows[0]["tokens"]) == 8
        assert rows[0]["metadata"]["sampling"] == {"temperature": 1.0, "n": 1}

    def test_lines_fit_the_terminal(self, tmp_path: Path) -> None:
        turns = [{"start": 3, "end": 5, "finish_reason": "stop", "text": "word " * 100}]
        finished = write_output(tmp_path / "out.parquet", [[make_node(turns=turns)]])
        *_, numbers, excerpt = on_a_terminal(finished, "--head", 1, columns=60, NO_COLOR="1").splitlines()
        assert len(numbers) <= 60
        assert len(excerpt) == 60
        assert excerpt.endswith("…")


class TestRow:
    def test_shows_every_sampled_token_with_its_logprob_and_marks_it_without_colour(self, recorded: Path) -> None:
        text = shown(recorded, "--row", 3)
        row = open_recording(recorded).row(3)
        for position, (token, mask, logprob) in enumerate(
            zip(row["tokens"], row["masked_tokens"], row["logprobs"], strict=True)
        ):
            if mask == IGNORED_TOKEN_ID:
                assert re.search(rf"^   +{position} +{token} +masked", text, re.MULTILINE)
            else:
                assert re.search(
                    rf"^> +{position} +{token} +{logprob:.4f} +{math.exp(logprob):.1%}", text, re.MULTILINE
                )
        assert "s-1/1" in text
        assert "3 masked + 5 sampled" in text

    def test_a_negative_number_counts_from_the_end(self, recorded: Path) -> None:
        assert document(recorded, "--row", -1)["row"]["row"] == 19

    def test_a_row_that_is_not_there_is_a_usage_error(self, recorded: Path) -> None:
        run = inspect(recorded, "--row", 20)
        assert run.returncode == 2
        assert "has rows 0 to 19" in run.stderr
        assert run.stdout == ""

    def test_long_runs_are_cut_in_the_middle_unless_every_token_is_asked_for(self, tmp_path: Path) -> None:
        finished = write_output(tmp_path / "out.parquet", [make_sample(0, prompt_length=100, sampled_length=200)])
        listing = re.compile(r"^[ >] +\d+ +\d+ ", re.MULTILINE)
        short, full = shown(finished, "--row", 0), shown(finished, "--row", 0, "--tokens")
        assert len(listing.findall(short)) == 54
        assert "96 more masked" in short
        assert "150 more sampled" in short
        assert len(listing.findall(full)) == 300

    def test_arrays_that_do_not_align_are_shown_as_they_are(self, tmp_path: Path) -> None:
        table = pa.Table.from_batches([record_batch(make_sample(0))])
        short = pa.array([[1.0, -0.5]], pa.list_(pa.float32()))
        broken = table.set_column(table.schema.get_field_index("logprobs"), "logprobs", short)
        pq.write_table(broken, tmp_path / "broken.parquet")
        assert re.search(r"^> +7 +\d+ +none", shown(tmp_path / "broken.parquet", "--row", 0), re.MULTILINE)

    def test_kept_infinities_are_strings_in_json(self, tmp_path: Path) -> None:
        finished = write_output(tmp_path / "out.parquet", [[make_node(logprobs=[-math.inf, -1.0])]])
        row = document(finished, "--row", 0)["row"]
        assert (row["logprobs"][3:], row["mean_logprob"]) == (["-inf", -1.0], "-inf")
        assert re.search(r"-inf +0\.0%", shown(finished, "--row", 0))


class TestCheck:
    def test_says_ok_with_counts(self, recorded: Path) -> None:
        assert "ok: 20 rows and 160 tokens obey every rule" in shown(recorded, "--check")
        assert document(recorded, "--check")["ok"] is True

    def test_damage_is_told_by_kind_and_place_and_exits_6(self, tmp_path: Path) -> None:
        table = pa.Table.from_batches([record_batch([node for i in range(10) for node in make_sample(i)])])
        lengths = pa.array([3] * 8 + [4, 4], pa.int32())
        broken = table.set_column(table.schema.get_field_index("prompt_length"), "prompt_length", lengths)
        pq.write_table(broken, tmp_path / "broken.parquet")
        run = inspect(tmp_path / "broken.parquet", "--check")
        assert run.returncode == 6
        assert "prompt_length   2  prompt_length is not the number of masked positions" in run.stdout
        assert "row 8, row 9\n" in run.stdout
        assert run.stderr.startswith("error: ")
        assert "prompt_length 2" in run.stderr
        as_json = inspect(tmp_path / "broken.parquet", "--check", "--json")
        assert as_json.returncode == 6
        (breach,) = json.loads(as_json.stdout)["breaches"]
        assert (breach["kind"], breach["count"], [place["row"] for place in breach["places"]]) == (
            "prompt_length",
            2,
            [8, 9],
        )


class TestTerminal:
    @pytest.mark.parametrize("view", [[], ["--head", "1"], ["--row", "0"], ["--check"]])
    @pytest.mark.parametrize("extra", [[], ["--json"]])
    def test_text_of_a_model_never_reaches_the_terminal_as_a_command(
        self, hostile: Path, view: list[str], extra: list[str]
    ) -> None:
        text = on_a_terminal(hostile, *view, *extra, NO_COLOR="1")
        assert not [character for character in text if character in "\x07\x1b\x7f\x9b\u202e\r"]
        if view != ["--check"]:
            assert "[red]x[/red]" in text

    def test_colour_is_for_terminals_only_and_not_where_it_is_declined(self, recorded: Path) -> None:
        assert ESCAPE in on_a_terminal(recorded)
        assert ESCAPE not in on_a_terminal(recorded, NO_COLOR="1")
        assert ESCAPE not in on_a_terminal(recorded, TERM="dumb")
        assert ESCAPE not in shown(recorded)
        assert ESCAPE in shown(recorded, FORCE_COLOR="1")

    def test_an_encoding_without_the_characters_shows_their_escapes(self, hostile: Path) -> None:
        assert "\\u27e6" in shown(hostile, "--row", 0, PYTHONIOENCODING="ascii", PYTHONUTF8="0")

    def test_a_reader_who_leaves_early_is_no_error(self, tmp_path: Path) -> None:
        finished = write_output(tmp_path / "out.parquet", [make_sample(0, sampled_length=20_000)])
        command = (
            f"{sys.executable} -m managed_cli inspect {finished} --row 0 --tokens | head -n 1; exit ${{PIPESTATUS[0]}}"
        )
        run = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment()
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.count("\n") == 1


class TestUsage:
    def test_a_missing_path_is_told_without_a_traceback(self, tmp_path: Path) -> None:
        run = inspect(tmp_path / "none.parquet")
        assert (run.returncode, run.stdout) == (6, "")
        assert run.stderr.startswith("error: `")
        assert "does not exist" in run.stderr
        assert "hint: " in run.stderr

    @pytest.mark.parametrize(
        "arguments",
        [["--row", "1", "--head", "2"], ["--check", "--head", "2"], ["--head", "0"], ["--tokens"], ["--row"]],
    )
    def test_options_that_cannot_be_meant_together_are_usage_errors(self, recorded: Path, arguments: list[str]) -> None:
        assert inspect(recorded, *arguments).returncode == 2

    def test_help_tells_the_exit_codes(self) -> None:
        assert re.search(r"6 PATH\s+cannot be read", shown("--help"))
