"""One line of JSON as an object, and how a value that came is told to a person."""

from __future__ import annotations

import json
import re
from typing import NoReturn

import msgspec

from managed_cli.errors import InputError
from managed_cli.rollout.inputs import MAX_LINE_BYTES, is_overlong

SHOWN_CHARACTERS = 40
"""How much of a string a message shows: enough to find it again, never a whole prompt."""

SHOWN_KEYS = 6
"""How many keys of an object a message shows."""

TOO_DEEP = "invalid JSON: nested too deeply to be read"
OUT_OF_RANGE = "invalid JSON: a number is out of range"

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

_DECODER = msgspec.json.Decoder()
_STRING_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(NaN|-?Infinity)')

_DANGLING_AT = re.compile("( starting)? at$")


def parse_object(line: bytes) -> dict[str, object]:
    """The JSON object of a line.

    Raises:
        InputError: it is no object, invalid JSON (column from 1), invalid UTF-8 (byte from 1) or too long.
            The message has no file and line yet.
    """
    if len(line) > MAX_LINE_BYTES and is_overlong(line):
        raise InputError(f"expected at most {MAX_LINE_BYTES // 2**20} MiB in a line, came more")
    try:
        value = _DECODER.decode(line)
    except msgspec.DecodeError as error:
        _raise_json_fault(line, error)
    except RecursionError as error:
        raise InputError(TOO_DEEP) from error
    if isinstance(value, dict):
        return value
    hint = "`jq -c '.[]' FILE > prompts.jsonl` turns one JSON array into lines" if isinstance(value, list) else None
    raise InputError(f"expected a JSON object, came {shown(value)}", hint=hint)


def _raise_json_fault(line: bytes, error: msgspec.DecodeError) -> NoReturn:
    """Raise with the place of the fault: the standard library's reader is slow, but knows columns."""
    try:
        text = line.decode().rstrip()
    except UnicodeDecodeError as bad:
        hint = "the file looks like UTF-16: `iconv -f UTF-16 -t UTF-8` converts it" if line[:2] in UTF16_MARKS else None
        message = f"invalid UTF-8: byte {bad.start + 1} of the line is 0x{line[bad.start]:02x}"
        raise InputError(message, hint=hint) from error
    try:
        json.loads(text)
    except json.JSONDecodeError as bad:
        hint = None
        if text in ("[", "{"):
            hint = "each line must hold one whole object: `jq -c . FILE` (`.[]` for an array) writes it so"
        reason = _DANGLING_AT.sub("", bad.msg[0].lower() + bad.msg[1:])
        raise InputError(f"invalid JSON at column {bad.colno}: {reason}", hint=hint) from error
    except RecursionError:
        raise InputError(TOO_DEEP) from error
    except ValueError:  # Python's own limit of digits in an integer
        raise InputError(OUT_OF_RANGE) from error
    for match in _STRING_OR_CONSTANT.finditer(text):
        if match[1]:
            raise InputError(f"invalid JSON at column {match.start() + 1}: {match[1]} is no JSON value") from error
    if "out of range" in str(error):
        raise InputError(OUT_OF_RANGE) from error
    raise InputError("invalid JSON: a `\\u` escape is half of a surrogate pair") from error


def fault(field: str, expected: str, value: object, *, hint: str | None = None) -> InputError:
    """An error about one field of a line, without file and line yet."""
    return InputError(f"`{field}`: expected {expected}, came {shown(value)}", hint=hint)


def shown(value: object) -> str:
    """A JSON value in words, on one line, short, and harmless to a terminal."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {_shortened(str(value))}"
    if isinstance(value, str):
        return f"the string {quoted(value)}" if value else "an empty string"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object with {keys_shown(value)}" if value else "an empty object"
    return type(value).__name__


def keys_shown(value: dict[str, object]) -> str:
    """The first keys of an object, for a message."""
    names = [_printable(_shortened(key)) for key in list(value)[:SHOWN_KEYS]]
    return ", ".join(f"`{name}`" for name in names) + (", …" if len(value) > SHOWN_KEYS else "")


def quoted(text: str) -> str:
    """The start of `text` in double quotes, what cannot be printed escaped."""
    return f'"{_printable(_shortened(text))}"'


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
