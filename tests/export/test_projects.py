"""Exported files are loaded by the projects they are for, wherever these can be imported.

`tests/real_servers/run.sh projects` installs them. Without a project, its format is still tested in `test_formats.py`:
every field, shape, mask and logprob, read back by the rules found in the project's source. What is not tested then is
that the installed version still has these rules.
Last run against atroposlib 0.4.0, trl 1.16.0 and verl 0.9.1, each with torch on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from managed_cli.export.export import export_recording
from managed_cli.export.formats import formats
from tests.cli.rollout_command import environment
from tests.export import rewards
from tests.export.recordings import expected, samples
from tests.servers.process import REPOSITORY
from tests.storage.rows import write_output

VARIABLE = "MANAGED_CLI_REAL_SERVERS"
"""Set by `tests/real_servers/run.sh projects`: an environment that has all of them and whose Python loads the files."""

NEEDED = {"atropos": "atroposlib", "trl": "trl", "hf": "trl", "verl": "verl"}
"""Format → the package that loads it; prime-rl and slime are on no package index."""

LOADING_SECONDS = 300.0
"""Imports of torch and ray on a busy machine take minutes."""


def loaded(project: str, file: Path) -> list[dict[str, Any]]:
    prepared = os.environ.get(VARIABLE)
    python, path = sys.executable, [REPOSITORY]
    if prepared:
        python = str(Path(prepared) / "bin" / "python")
        path += [Path(prepared) / "projects", Path(prepared) / "trl-vllm"]
    done = subprocess.run(
        [python, "-m", "tests.export.load_with", project, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(WANDB_MODE="disabled", PYTHONPATH=os.pathsep.join(map(str, path))),
        timeout=LOADING_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.rpartition("\n@")[2])
    return rows


@pytest.mark.parametrize("project", list(NEEDED))
def test_the_project_itself_reads_the_rows_that_were_recorded(project: str, tmp_path: Path) -> None:
    if not os.environ.get(VARIABLE) and importlib.util.find_spec(NEEDED[project]) is None:
        pytest.skip(f"{NEEDED[project]} is not installed: its rules are tested in test_formats.py, its code is not")
    recording = write_output(tmp_path / "out.parquet", samples())
    out = tmp_path / "out.jsonl"
    export_recording(str(recording), str(out), formats()[project], reward="tests.export.rewards:by_choice")
    found = {str(row["ids"]): row for row in loaded(project, out)}
    rows = {str(row["ids"]): row for row in expected(recording, rewards.by_choice)}
    assert found.keys() == rows.keys()
    for ids, row in rows.items():
        assert found[ids]["sampled"] == row["sampled"]
        assert found[ids]["logprobs"] == row["logprobs"]
        assert found[ids]["reward"] == row["reward"]
