"""`managed-cli schema`: every column of a recorded file, from the table that the writer writes by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from managed_cli.storage.schema import Column


@click.command(
    "schema",
    short_help="Describe the columns of a recording.",
    epilog="Exit codes: 0 shown; 2 usage.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
@click.option("--markdown", is_flag=True, help="A Markdown table, as the README holds it.")
def schema_command(as_json: bool, markdown: bool) -> None:
    """Describe every column of a recorded file: name, type, unit, meaning, and when a null stands there.

    T is the number of positions of a row, prompt and completions together.

    \b
    managed-cli schema
    managed-cli schema --json | jq -r '.columns[].name'
    """
    if as_json and markdown:
        raise click.UsageError("--json and --markdown cannot be given together: each is a form of its own")
    from managed_cli.storage.schema import COLUMNS

    if as_json:
        click.echo(json.dumps(schema_document(), ensure_ascii=False))
    elif markdown:
        click.echo(markdown_table(COLUMNS))
    else:
        _show()


def schema_document() -> dict[str, Any]:  # Any: JSON values
    """The columns, the keys of the file's metadata and the schema's version, for a script."""
    from managed_cli.storage.schema import COLUMNS, FILE_METADATA, SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "columns": [
            {
                "name": column.name,
                "type": column.type_name,
                "unit": column.unit,
                "nullable": column.nullable,
                "null": column.null_rule,
                "meaning": column.meaning,
            }
            for column in COLUMNS
        ],
        "file_metadata": {key.decode(): meaning for key, meaning in FILE_METADATA.items()},
    }


def markdown_table(columns: tuple[Column, ...]) -> str:
    """The columns as rows of a Markdown table, without a newline at its end."""
    lines = ["| column | type | unit | null | meaning |", "| --- | --- | --- | --- | --- |"]
    for column in columns:
        type_name = column.type_name.replace("<", "&lt;").replace(">", "&gt;")
        lines.append(f"| `{column.name}` | {type_name} | {column.unit} | {column.null_rule} | {column.meaning} |")
    return "\n".join(lines)


def _show() -> None:
    from managed_cli.cli.page import Page
    from managed_cli.storage.schema import COLUMNS, FILE_METADATA

    page = Page()
    page.facts([(column.name, f"{column.meaning} ({_kind(column)})") for column in COLUMNS])
    page.heading("key-value metadata of the file, each a JSON document")
    page.facts([(key.decode(), meaning) for key, meaning in FILE_METADATA.items()])


def _kind(column: Column) -> str:
    null = f"; null {column.null_rule}" if column.nullable else ""
    return f"{column.type_name}, {column.unit}{null}"
