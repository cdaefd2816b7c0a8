from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from managed_cli.cli.figures import Bin, length_bins, logprob_bins
from managed_cli.storage.schema import STATISTICS_METADATA_KEY
from managed_cli.storage.shards import open_output
from tests.cli.command import ESCAPE, document, environment, inspect, on_a_terminal, shown
from tests.storage.rows import REPOSITORY, RUN_FACTS, fill, make_node, make_sample, write_output


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    samples = [make_sample(index, choices=2, sampled_length=1 + index * 3) for index in range(20)]
    return write_output(tmp_path / "out.parquet", samples)


def without_statistics(path: Path) -> Path:
    """The same file as an older version wrote it."""
    table = pq.read_table(path)
    ours = {key: value for key, value in pq.read_metadata(path).metadata.items() if key.startswith(b"managed_cli.")}
    kept = {key: value for key, value in ours.items() if key != STATISTICS_METADATA_KEY}
    assert len(kept) == len(ours) - 1
    old = path.with_name("old.parquet")
    pq.write_table(table.replace_schema_metadata(kept), old)
    return old


def counts(bins: list[Bin]) -> list[tuple[str, int]]:
    return [(bin.label, bin.count) for bin in bins]


class TestBins:
    def test_few_lengths_have_bars_of_their_own(self) -> None:
        assert counts(length_bins({3: 2, 5: 1})) == [("3", 2), ("4", 0), ("5", 1)]

    def test_a_wide_range_has_bars_of_equal_width_and_every_row_in_one(self) -> None:
        bins = length_bins({length // 16 * 16: 3 for length in range(512, 1024)})
        assert 6 <= len(bins) <= 12
        assert len({(bin.high or 0) - (bin.low or 0) for bin in bins}) == 1
        assert sum(bin.count for bin in bins) == 3 * 32

    def test_one_length_far_away_does_not_flatten_the_others(self) -> None:
        bins = length_bins({**dict.fromkeys(range(10), 100), 65536: 1})
        assert counts(bins)[-1] == ("9 and more", 101)
        assert bins[-1].high is None

    def test_one_logprob_far_away_does_not_flatten_the_others(self) -> None:
        bins = logprob_bins({-64 * 16: 1, -64: 500, -32: 500})
        assert bins[0].low is None
        assert sum(bin.count for bin in bins) == 1001
        assert bins[0].label.startswith("below -0.9")

    def test_no_rows_have_no_bars(self) -> None:
        assert (length_bins({}), logprob_bins({})) == ([], [])


class TestSummary:
    def test_histograms_and_rates_are_of_all_rows(self, recorded: Path) -> None:
        text = shown(recorded)
        figures = document(recorded)["figures"]
        assert (figures["exact"], figures["counted_rows"]) == (True, 40)
        assert sum(bin["count"] for bin in figures["completion_length_histogram"]) == 40
        assert sum(entry["tokens"] for entry in figures["token_probabilities"]) == 2 * sum(1 + i * 3 for i in range(20))
        assert figures["longest_completion"] == 58
        for bin in figures["completion_length_histogram"]:
            assert re.search(rf"^{bin['from']} to {bin['below'] - 1} +{bin['count']} ", text, re.MULTILINE)
        assert re.search(r"truncated +\d+ rows \(\d+\.\d%\) ended by a limit", text)
        assert "none among the rows of 20 samples" in text

    def test_a_file_of_an_older_version_is_read_instead(self, recorded: Path) -> None:
        old = without_statistics(recorded)
        assert document(old)["figures"] == document(recorded)["figures"]
        assert "sampled figures" not in shown(old)
        assert inspect(old, "--check").returncode == 0

    def test_figures_of_a_part_of_the_rows_say_so(self, tmp_path: Path) -> None:
        samples = [make_sample(index, choices=10) for index in range(900)]
        old = without_statistics(write_output(tmp_path / "out.parquet", samples, rows_per_shard=10_000))
        text = shown(old)
        assert re.search(r"sampled figures +repeats, histograms, turns and servers are of 8,192 of 9,000 rows", text)
        found = document(old)
        assert (found["figures"]["exact"], found["figures"]["counted_rows"]) == (False, 8192)
        assert found["summary"]["rows"] == 9000

    def test_a_growing_output_has_the_figures_of_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "out.parquet"
        with open_output(str(path), run_facts=RUN_FACTS, rows_per_shard=2, overwrite=False) as output:
            fill(output, [make_sample(index, choices=2) for index in range(3)])
            assert document(path)["figures"]["counted_rows"] == 6

    def test_turns_and_servers_have_tables_where_there_are_several(self, recorded: Path, tmp_path: Path) -> None:
        assert "by turn" not in shown(recorded)
        turns = [
            {"start": 3, "end": 4, "finish_reason": "stop", "text": "d"},
            {"start": 4, "end": 5, "finish_reason": "length", "text": "e"},
        ]
        nodes = [[make_node("a", turns=turns)], [make_node("b", server="http://b")]]
        text = shown(write_output(tmp_path / "two.parquet", nodes))
        assert re.search(r"^1 +2 +1\.5 +0\.0% ", text, re.MULTILINE)
        assert re.search(r"^2 +1 +1\.0 +100\.0% ", text, re.MULTILINE)
        assert re.search(r"^http://b +1 +2\.0 ", text, re.MULTILINE)

    def test_repeated_choices_are_counted(self, tmp_path: Path) -> None:
        sample = [make_node("a", 0), make_node("a", 1), make_node("a", 2)]
        text = shown(write_output(tmp_path / "out.parquet", [sample]))
        assert re.search(r"repeats +2 rows of 1 sample: the very tokens of an earlier choice", text)

    @pytest.mark.parametrize("columns", [60, 80, 160])
    def test_every_line_fits_the_terminal(self, recorded: Path, columns: int) -> None:
        lines = on_a_terminal(recorded, columns=columns, NO_COLOR="1").splitlines()
        title, *rest = lines
        assert "40 rows" in title
        assert max(len(line) for line in rest) <= columns

    def test_two_histograms_stand_side_by_side_where_there_is_room(self, recorded: Path) -> None:
        together = re.compile(r"^sampled tokens per row +mean logprob per row", re.MULTILINE)
        assert together.search(on_a_terminal(recorded, columns=160, NO_COLOR="1"))
        assert not together.search(on_a_terminal(recorded, columns=80, NO_COLOR="1"))

    def test_bars_are_plain_where_the_encoding_has_no_blocks(self, recorded: Path) -> None:
        text = shown(recorded, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert "####" in text
        assert "\\u2588" not in text


class TestPager:
    def read_with(self, pager: str, path: Path, *arguments: str) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "managed_cli", "inspect", str(path), *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=REPOSITORY,
            env=environment(COLUMNS="80", PAGER=pager),
        )
        os.close(theirs)
        written = b""
        while part := self.read(ours):
            written += part
        os.close(ours)
        assert process.wait() == 0, written.decode()
        return written.decode()

    def read(self, descriptor: int) -> bytes:
        try:
            return os.read(descriptor, 65536)
        except OSError:  # Linux: EIO once the other side is closed
            return b""

    def test_long_views_go_through_the_pager_on_a_terminal(self, recorded: Path) -> None:
        text = self.read_with("sed s/^/paged:/", recorded, "--head", "3")
        assert "paged:" in text
        assert ESCAPE in text

    def test_no_pager_means_none(self, recorded: Path) -> None:
        assert "paged:" not in self.read_with("sed s/^/paged:/", recorded, "--head", "3", "--no-pager")
        assert "paged:" not in shown(recorded, "--head", 3, PAGER="sed s/^/paged:/")

    def test_a_reader_who_leaves_the_pager_early_is_no_error(self, tmp_path: Path) -> None:
        path = write_output(tmp_path / "out.parquet", [make_sample(0, sampled_length=20_000)])
        text = self.read_with("head -n 2", path, "--row", "0", "--tokens")
        assert text.count("\n") == 2
