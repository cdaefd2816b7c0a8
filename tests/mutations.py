"""JSON documents damaged at random: in what they say, and in their bytes; and a limit on how long anything may take."""

from __future__ import annotations

import copy
import gc
import gzip
import itertools
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Json = Any
"""A value decoded from JSON."""  # Any: of any shape

_RAW, _AGAIN = "\ue000", "\ue001"
"""Private characters: around what is written as it is, and behind a key that is written a second time."""

_RAW_STRING = re.compile(rf'"{_RAW}((?:[^"\\]|\\.)*?){_RAW}"', re.DOTALL)

DEPTHS = (3, 40, 1_100, 30_000)
"""Below and above what readers bear: Python's limit of recursion is 1000."""

TRANSPLANTED = 0.1
"""Of the changes: a value takes the place of another."""

NUMBERS = (
    *("0", "-0.0", "-1", "0.5", "1e-7", "-1e-400", "-9999.0", "-3.4e38", "49151", "49152", "2147483648", "-2147483649"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "-1e308", "1e400", "-1e400", "1E+2", "5.0"),
    *("NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x10", "9" * 400, "-" + "9" * 5_000),
)

VALUES = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"":{}}', '""', '"text"', '"7"', '" \\n"'),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\u001b[31m"', '"\\ud83d\\ude00"', '"\\x"', "tru", '"open', ""),
)

REPLACEMENTS = (
    *(
        "null",
        "true",
        "7",
        "-1",
        "1.5",
        "1e400",
        "1" * 30,
        '""',
        '"text"',
        "[]",
        '[["a"]]',
        "[7]",
        "{}",
        '{"type":["a"]}',
    ),
    *('"\\u0000"', "[" * 1_100 + "]" * 1_100),
)
"""One value of each kind, and some that are not JSON or not to be borne."""

JUNK = (
    *(
        b"\0",
        b"\x01",
        b"\x1b[2J",
        b"\x7f",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf5",
        b"\xe2\x80",
    ),
    *(
        b"\r",
        b"\t",
        b"\x0b",
        b"\x0c",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b",",
        b":",
        b"-",
    ),
    *(b"/*", b"#", b"'", b"NaN", b"1e999"),
)


def mutated(document: Json, chance: random.Random) -> bytes:
    """`document` as JSON, damaged in one to five places."""
    in_words, in_bytes = chance.choice([(1, 0), (1, 0), (2, 0), (3, 0), (0, 1), (0, 1), (0, 2), (2, 2)])
    value = copy.deepcopy(document)
    for _ in range(in_words):
        value = _damaged(value, chance)
    data = written(value)
    for _ in range(in_bytes):
        data = damaged_bytes(data, chance)
    return data


def replaced_everywhere(document: Json) -> Iterator[bytes]:
    """`document` as JSON with one value replaced: every one of them by each of `REPLACEMENTS`."""
    for number in range(sum(1 for _ in _spots(document))):
        for replacement in REPLACEMENTS:
            value = copy.deepcopy(document)
            container, key = next(itertools.islice(_spots(value), number, None))
            container[key] = _raw(replacement)
            yield written(value)


def written(value: Json) -> bytes:
    """`value` as JSON, with what stands in it raw."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=True).replace(_AGAIN, "")
    return _RAW_STRING.sub(lambda match: json.loads(f'"{match[1]}"'), text).encode()


def _raw(text: str) -> str:
    return f"{_RAW}{text}{_RAW}"


def _spots(value: Json) -> Iterator[tuple[Json, Any]]:  # Any: an index or a key
    """Every place in `value`, as its container and its key there."""
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in places:
        yield value, key
        yield from _spots(inner)


def _damaged(value: Json, chance: random.Random) -> Json:
    """`value`, changed in one place."""
    spots = list(_spots(value))
    if not spots:
        return _other(value, value, chance)
    container, key = chance.choice(spots)
    if chance.random() < TRANSPLANTED:
        other, place = chance.choice(spots)
        container[key] = copy.deepcopy(other[place])
    else:
        change = chance.choice([_drop, _double, _retype, _retype, _nudge, _nudge, _reorder, _resize, _rename])
        change(container, key, chance)
    return value


def _drop(container: Json, key: Any, chance: random.Random) -> None:
    del container[key]


def _double(container: Json, key: Any, chance: random.Random) -> None:
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        again = copy.deepcopy(container[key])
        container[f"{key}{_AGAIN}"] = _other(again, container, chance) if chance.random() < 0.5 else again


def _retype(container: Json, key: Any, chance: random.Random) -> None:
    container[key] = _other(container[key], container, chance)


def _other(value: Json, around: Json, chance: random.Random) -> Json:
    """Something that should not stand where `value` does."""
    others: list[Callable[[], Json]] = [
        lambda: _raw(chance.choice(NUMBERS)),
        lambda: _raw(chance.choice(NUMBERS)),
        lambda: _raw(chance.choice(VALUES)),
        lambda: _raw(chance.choice(VALUES)),
        lambda: [copy.deepcopy(value)],
        lambda: {"value": copy.deepcopy(value)},
        lambda: str(value),
        lambda: copy.deepcopy(around),
        lambda: _nested(chance),
        lambda: "long " * chance.choice([10, 1_000, 20_000]),
    ]
    return chance.choice(others)()


def _nested(chance: random.Random) -> Json:
    depth = chance.choice(DEPTHS)
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    return _raw(opening * depth + "1" + closing * chance.choice([depth, depth, depth - 1]))


def _nudge(container: Json, key: Any, chance: random.Random) -> None:
    value = container[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        _retype(container, key, chance)
    else:
        container[key] = chance.choice([value + 1, value - 1, -value, value * 1e3, float(value), str(value), value / 2])


def _reorder(container: Json, key: Any, chance: random.Random) -> None:
    """Shift, reverse or shuffle the list that stands there, or else the one around it."""
    found = container[key] if isinstance(container[key], list) else container
    if not isinstance(found, list):
        return _rename(container, key, chance)
    change = chance.randrange(3)
    if change == 0:
        found[:] = found[1:] + found[:1]
    elif change == 1:
        found.reverse()
    else:
        chance.shuffle(found)
    return None


def _resize(container: Json, key: Any, chance: random.Random) -> None:
    """Make what stands there shorter or longer."""
    value = container[key]
    if isinstance(value, list | str) and value:
        cut = chance.randrange(len(value))
        longer = [*value, *value[cut:]] if isinstance(value, list) else value + value[cut:]
        container[key] = value[:cut] if chance.random() < 0.5 else longer
    else:
        _drop(container, key, chance)


def _rename(container: Json, key: Any, chance: random.Random) -> None:
    if isinstance(container, dict):
        name = chance.choice([key.upper(), f"{key} ", f"{key}\0", "", "id", "prompt", "messages", "logprobs", "tokens"])
        container[name] = container.pop(key)
    else:
        _drop(container, key, chance)


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """`data`, changed in one place, cut, or encoded as something else."""
    at, until = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    changes: list[Callable[[], bytes]] = [
        lambda: (
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data[1:]
        ),
        lambda: data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + chance.choice(JUNK) + data[at:],
        lambda: data[:at] + chance.choice(JUNK) + data[at:],
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[until:],
        lambda: data[:until] + data[at:],
        lambda: data + data,
        lambda: b" \t " + data + b"\x0b ",
        lambda: chance.choice(JUNK) + data,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: gzip.compress(data, mtime=0),
        lambda: chance.randbytes(chance.randrange(200)),
    ]
    return chance.choice(changes)()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """The block, ended with an AssertionError where it takes longer: whether it computes or waits.

    Garbage is not collected meanwhile: in the depths of a nested document, at the limit of recursion, the callbacks
    that other libraries have for that fail.
    """

    def expired(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"this took longer than {seconds} s")

    gc.disable()
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
