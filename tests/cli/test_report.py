from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from managed_cli.cli.report import write
from managed_cli.cli.report.write import write_report
from managed_cli.errors import OutputError
from managed_cli.storage.reader import open_recording
from managed_cli.storage.selection import parse_condition, selected_rows
from managed_cli.storage.shards import open_output
from tests.cli.command import document, inspect
from tests.storage.rows import RUN_FACTS, fill, make_node, make_sample, write_output

HOSTILE = "</script><script>owned = 1</script><img src=x onerror=owned=1>\x1b[2J\u202e\u2028\x00\ud800"


class Tags(HTMLParser):
    """The tags of a page, its links to elsewhere, and its text outside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "style")]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_output(tmp_path / "out.parquet", [make_sample(index, choices=2) for index in range(10)])


def test_the_page_is_one_file_that_loads_nothing(recorded: Path, tmp_path: Path) -> None:
    run = inspect(recorded, "--html", tmp_path / "report.html")
    assert (run.returncode, run.stdout) == (0, "")
    assert re.fullmatch(r"wrote .*report\.html: 20 rows, [\d.]+ kB; open it in a browser\n", run.stderr)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert Tags(page).links == ["#list"]
    assert not re.search(r"https?://(?!127\.0\.0\.1)", page)
    assert "default-src 'none'" in page


def test_it_has_the_figures_without_any_script(recorded: Path, tmp_path: Path) -> None:
    write_report(open_recording(recorded), str(tmp_path / "report.html"), None)
    page = (tmp_path / "report.html").read_text("utf-8")
    for bin in document(recorded)["figures"]["mean_logprob_histogram"]:
        assert f"<td>{bin['count']:,}</td>" in page
    assert "<dt>samples</dt><dd>10</dd>" in page
    assert "tiny-random" in page


def test_text_of_a_model_is_no_markup_and_no_row_ends_a_script(tmp_path: Path) -> None:
    turns = [{"start": 3, "end": 5, "finish_reason": HOSTILE.replace("\ud800", ""), "text": HOSTILE}]
    harmless_id = HOSTILE.replace("\ud800", "").replace("\x00", "")
    node = make_node(harmless_id, full_text=HOSTILE.replace("\ud800", "\ufffd"), finish_reason=harmless_id, turns=turns)
    facts = {**RUN_FACTS, harmless_id: harmless_id}
    with open_output(f"{tmp_path}/out.parquet", run_facts=facts, rows_per_shard=1) as output:
        fill(output, [[node]])
        finished = output.finish()
    write_report(open_recording(finished), str(tmp_path / "report.html"), None)
    page = (tmp_path / "report.html").read_text("utf-8")
    plain = write_output(tmp_path / "plain.parquet", [[make_node()]])
    write_report(open_recording(plain), str(tmp_path / "plain.html"), None)
    expected = Tags((tmp_path / "plain.html").read_text("utf-8")).tags
    found = Tags(page).tags
    assert "img" not in found
    assert found.count("script") == expected.count("script")
    assert not [character for character in page if character in "\x1b\u202e\u2028\x00"]


def test_more_rows_than_a_browser_likes_are_whole_samples_and_the_page_says_so(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MOST_ROWS", 9)
    written = write_report(open_recording(recorded), str(tmp_path / "report.html"), None)
    assert (written.shown, written.rows) == (8, 20)
    assert "8 of 20 rows" in written.in_words()
    assert "the list below holds 8 of 20 rows (whole samples, evenly spaced)" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("limit", "value"), [("MOST_TOKENS", 50), ("MOST_BYTES", 900)])
def test_rows_are_left_out_until_the_page_is_light(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(write, limit, value)
    written = write_report(open_recording(recorded), str(tmp_path / "report.html"), None)
    assert 0 < written.shown < 20


def test_a_filter_and_an_order_hold_in_the_page_too(recorded: Path, tmp_path: Path) -> None:
    recording = open_recording(recorded)
    numbers = selected_rows(recording, [parse_condition("choice=1")], sort="-mean_logprob")
    written = write_report(recording, str(tmp_path / "r.html"), numbers, filters=["choice=1"], sort="-mean_logprob")
    assert (written.shown, written.rows) == (10, 10)
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "only rows where choice=1: 10 of 20 rows" in page
    assert "<dt>samples</dt><dd>10</dd>" in page


def test_no_rows_are_a_page_too(recorded: Path, tmp_path: Path) -> None:
    recording = open_recording(recorded)
    numbers = selected_rows(recording, [parse_condition("length>99")])
    assert write_report(recording, str(tmp_path / "r.html"), numbers, filters=["length>99"]).shown == 0


def test_an_earlier_report_is_replaced_as_a_whole_or_not_at_all(recorded: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("earlier")
    write_report(open_recording(recorded), str(target), None)
    assert target.read_text().startswith("<!doctype html>")
    run = inspect(recorded, "--html", tmp_path / "nowhere" / "report.html")
    assert run.returncode == 6
    assert run.stderr.startswith("error: cannot write `")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "report.html"]


def test_the_recording_itself_is_never_replaced(recorded: Path) -> None:
    before = recorded.read_bytes()
    with pytest.raises(OutputError, match="is the recording itself"):
        write_report(open_recording(recorded), str(recorded), None)
    assert recorded.read_bytes() == before


def test_the_parts_of_the_page_are_in_the_package(tmp_path: Path) -> None:
    code = (
        "from importlib import resources; from managed_cli.cli.report.write import SCRIPTS\n"
        "place = resources.files('managed_cli.cli.report')\n"
        "print(all(place.joinpath(name).is_file() for name in (*SCRIPTS, 'page.html', 'style.css')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout == "True\n"
