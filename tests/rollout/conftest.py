from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.inputs_on_disk import WriteInput, json_lines


@pytest.fixture
def write(tmp_path: Path) -> WriteInput:
    """Writes objects as JSON lines, or bytes as they are, into `prompts.jsonl`."""

    def write_input(*records: object, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(r if isinstance(r, bytes) else json_lines([r]) for r in records))
        return path

    return write_input
