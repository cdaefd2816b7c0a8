"""Without `run.sh` there are no servers: these tests are then not collected, and the end of the run says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

VARIABLE = "MANAGED_CLI_REAL_SERVERS"
"""Set by `run.sh`: the virtual environment of `install.sh`."""

collect_ignore_glob = [] if os.environ.get(VARIABLE) else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get(VARIABLE):
        terminalreporter.write_line(
            "tests/real_servers: NOT RUN; `bash tests/real_servers/run.sh` installs and starts the servers", yellow=True
        )


def pytest_configure() -> None:
    # Fixtures end the servers; pytest runs them after ^C, but not after a plain TERM.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@pytest.fixture(scope="session")
def environment() -> Path:
    """The servers' virtual environment."""
    return Path(os.environ[VARIABLE]).resolve()


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' logs stay."""
    chosen = os.environ.get("MANAGED_CLI_SERVER_LOGS")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("server-logs")
