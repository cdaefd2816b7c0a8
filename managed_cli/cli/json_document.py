"""One JSON document on stdout, whatever the values in it are."""

from __future__ import annotations

import json
import math
from typing import Any

import click


def print_json(document: dict[str, Any]) -> None:  # Any: JSON values
    """One line of ASCII: no byte of a model's text reaches the terminal as it is."""
    click.echo(json.dumps(finite(document), allow_nan=False).replace("\x7f", "\\u007f"))


def finite(value: Any) -> Any:  # Any: JSON values, and floats that JSON has no number for
    """`value` with every float that is not finite as a string: "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return value
