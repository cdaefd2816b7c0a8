"""`managed-cli schema` says what is in a file, and the README says the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow as pa

from managed_cli.cli.schema import markdown_table
from managed_cli.storage.schema import COLUMNS, SCHEMA, SCHEMA_VERSION
from tests.cli.rollout_command import command, environment

README = Path(__file__).parents[2] / "README.md"
ARROW_TYPES = {
    "string": pa.string(),
    "int32": pa.int32(),
    "float32": pa.float32(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
}


def schema(*arguments: str) -> str:
    done = subprocess.run(command("schema", *arguments), capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_columns_in_json_are_those_that_a_file_is_written_with() -> None:
    document = json.loads(schema("--json"))
    assert document["schema_version"] == SCHEMA_VERSION
    told = [(column["name"], ARROW_TYPES[column["type"]], column["nullable"]) for column in document["columns"]]
    assert told == [(field.name, field.type, field.nullable) for field in SCHEMA]
    for column in document["columns"]:
        assert column["meaning"]
        assert column["unit"]
        assert (column["null"] == "never") == (not column["nullable"])


def test_the_text_names_every_column_with_type_unit_and_null_rule() -> None:
    text = schema()
    for column in COLUMNS:
        line = next(line for line in text.splitlines() if line.startswith(f"{column.name} "))
        assert column.meaning in line
        assert f"({column.type_name}, {column.unit}" in line
        assert (f"null {column.null_rule}" in line) == column.nullable
    assert "managed_cli.run " in text


def test_the_table_of_the_readme_is_the_generated_one() -> None:
    """To write it anew: put the output of `managed-cli schema --markdown` in the place of the old table."""
    assert f"\n\n{markdown_table(COLUMNS)}\n\n" in README.read_text("utf-8")
    assert schema("--markdown") == markdown_table(COLUMNS) + "\n"


def test_two_forms_at_once_are_a_usage_error() -> None:
    done = subprocess.run(
        command("schema", "--json", "--markdown"), capture_output=True, text=True, check=False, env=environment()
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be given together" in done.stderr
