"""Fixtures of the tests of managed contexts, and the line they add to the end of a run."""

from __future__ import annotations

import pytest

from managed_cli.tokenizers import HuggingFaceTokenizer
from tests.tokenizers import catalog

pytest.register_assert_rewrite("tests.managed.conversation", "tests.managed.oracle")


@pytest.fixture
def smollm2() -> HuggingFaceTokenizer:
    return catalog.loaded("smollm2")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many conversations held, and which tokenizers were not there to hold them against."""
    from tests.managed.conversation import CHECKED

    if CHECKED:
        terminalreporter.write_line(f"conversations that held: {CHECKED['conversations']}, nodes: {CHECKED['nodes']}")
    catalog.report_missing(terminalreporter)
