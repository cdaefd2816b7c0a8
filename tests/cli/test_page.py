from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from managed_cli.cli.page import excerpt, quoted, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b31m\x7f\x00\x07\r", "\\x9b31m\\x7f\\x00\\x07\\r"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028\U000e0041\ufeff", "\\u2028\\U000e0041\\ufeff"),
        ("⟦faked⟧", "\\u27e6faked\\u27e7"),
        ("[bold]x[/bold] :smile: {{x}}", "[bold]x[/bold] :smile: {{x}}"),
        ("漢字 é 👩\u200d💻 \ufffd", "漢字 é 👩\u200d💻 \ufffd"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_no_control_or_reordering_character_is_left(text: str) -> None:
    left = {unicodedata.category(character) for character in visible(text) if character not in "\u200c\u200d"}
    assert not left & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_newlines_stay_only_where_asked_for() -> None:
    assert visible("a\nb", keep_newlines=True) == "a\nb"
    assert visible("a\nb") == "a\\nb"


def test_quoted_text_is_exact() -> None:
    assert quoted('a\\n"\n') == '"a\\\\n\\"\\n"'


@given(st.text(), st.integers(2, 60))
def test_an_excerpt_fits_its_width(text: str, width: int) -> None:
    assert cell_len(excerpt(text, width)) <= width


def test_an_excerpt_says_that_it_was_cut() -> None:
    assert excerpt("abcdef", 6) == "abcdef"
    assert excerpt("abcdefg", 6) == "abcde…"
    assert excerpt("漢字漢字", 6) == "漢字…"
    assert excerpt("two\nlines", 20) == "two↵lines"
