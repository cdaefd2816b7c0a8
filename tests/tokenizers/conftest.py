"""The line that the tests of tokenizers add to the end of a run."""

from __future__ import annotations

import pytest

from tests.tokenizers import catalog


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tokenizers were not there."""
    catalog.report_missing(terminalreporter)
