"""A key that tests look for, in every form that a key can take."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

CORE = "Zq7Vh2Lk9RtX4"
"""Letters and digits, which no escape changes: whoever finds these has found the key."""

KEY = f'sk-"{CORE}\\x/+&<%'
"""With characters that JSON, URLs, HTML, Python and base64 each write in another way."""

OPT_IN = {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}
FROM_ENVIRONMENT = ("--api-key-env", "SERVER_KEY")
BY_ENVIRONMENT = {**OPT_IN, "SERVER_KEY": KEY}


def forms_of_the_core() -> dict[str, bytes]:
    """How the core looks in plain text, in hex, and in base64 wherever it begins among three bytes."""
    core = CORE.encode()
    forms = {"plain": core, "hex": core.hex().encode(), "utf-16": CORE.encode("utf-16-le")}
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + core)
        forms[f"base64 at {before}"] = whole[4:-4]
    return forms


FORMS = forms_of_the_core()


def leaks_in(data: bytes) -> set[str]:
    return {name for name, form in FORMS.items() if form in data or form.lower() in data.lower()}


def contents(path: Path) -> Iterator[bytes]:
    """All that a file holds: its bytes and name, and of Parquet every column and all metadata, decompressed."""
    yield str(path).encode()
    yield path.read_bytes()
    if path.suffix == ".parquet":
        parquet = pq.ParquetFile(path)
        yield repr(parquet.schema_arrow.metadata).encode()
        yield repr(parquet.metadata.metadata).encode()
        yield json.dumps(parquet.read().to_pylist(), default=str).encode()
        yield repr(parquet.read().to_pydict()).encode("utf-8", "backslashreplace")


def assert_no_leak_in(directory: Path, *shown: str, but: Path | None = None) -> None:
    files = [path for path in directory.rglob("*") if path.is_file() and path != but]
    assert files
    for path in files:
        for content in contents(path):
            assert not leaks_in(content), path
    for text in shown:
        assert not leaks_in(text.encode()), text


def key_file(directory: Path, content: str = f"  {KEY}\n", mode: int = 0o600) -> Path:
    path = directory / "server.key"
    path.write_text(content)
    path.chmod(mode)
    return path


def lines(count: int) -> list[dict[str, str]]:
    return [{"id": f"s{index:02d}", "prompt": f"Question {index}: how many?"} for index in range(count)]
