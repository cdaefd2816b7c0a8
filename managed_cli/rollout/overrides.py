"""The `sampling` object of a line: what one sample asks for instead of the run's settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping

from managed_cli.errors import InputError
from managed_cli.rollout.jsonl import fault, quoted
from managed_cli.types import TOP_K_OFF, SamplingParams

MAX_INT32 = 2**31 - 1
"""Counts and token ids: the columns of a row are 32 bits wide."""

MAX_SEED = 2**63 - 1
"""Largest seed that every server takes: a signed 64-bit integer."""


def _integer(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(accepts: Callable[[float], bool]) -> Callable[[object], bool]:
    def test(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        try:
            return accepts(float(value))  # JSON as it is read here has no NaN and no infinity
        except OverflowError:
            return False

    return test


def _is_stop_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _list_of(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(accepts(item) for item in value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """What one sampling parameter may be; `kept` is the form it is sent in."""

    expected: str
    accepts: Callable[[object], bool]
    kept: Callable[..., object]


_COUNT = _Rule(f"an integer from 1 to {MAX_INT32}", _integer(1, MAX_INT32), int)
_RULES: dict[str, _Rule] = {
    "n": _COUNT,
    "max_tokens": _COUNT,
    "temperature": _Rule("a number of at least 0", _number(lambda value: value >= 0), float),
    "top_p": _Rule("a number above 0 and at most 1", _number(lambda value: 0 < value <= 1), float),
    "top_k": _Rule("-1 (off) or an integer from 1", _integer(TOP_K_OFF, MAX_INT32), lambda value: value or TOP_K_OFF),
    "min_p": _Rule("a number from 0 to 1", _number(lambda value: 0 <= value <= 1), float),
    "repetition_penalty": _Rule("a number above 0", _number(lambda value: value > 0), float),
    "seed": _Rule(f"an integer from 0 to {MAX_SEED}", _integer(0, MAX_SEED), int),
    "stop": _Rule(
        "a non-empty string or a list of them",
        lambda value: _is_stop_text(value) or _list_of(_is_stop_text)(value),
        lambda value: (value,) if isinstance(value, str) else tuple(value),
    ),
    "stop_token_ids": _Rule(
        f"a list of integers from 0 to {MAX_INT32}", _list_of(_integer(0, MAX_INT32)), lambda value: tuple(value)
    ),
}


def parse_overrides(
    value: object, run: SamplingParams | None, places: Mapping[str, str] | None = None
) -> Mapping[str, object]:
    """The sampling parameters of a line, checked, in the forms of `SamplingParams`; null leaves one to the run.

    Args:
        value: the line's `sampling`.
        run: the run's settings, against which n and temperature are checked together; None checks the line alone.
        places: parameter → the field it stands in, for messages; None: in `sampling`, under its own name.

    Raises:
        InputError: an unknown name, a wrong type, a value out of range, or n > 1 at temperature 0.
    """
    if not isinstance(value, dict):
        raise fault("sampling", "an object of sampling parameters", value)
    fields = {} if places is None else places
    overrides = {
        name: _parsed(name, given, fields.get(name, f"sampling.{name}"))
        for name, given in value.items()
        if given is not None
    }
    if overrides:
        _refuse_greedy_siblings(overrides, run or SamplingParams(), fields.get("n", "sampling"))
    return overrides


def _parsed(name: str, value: object, field: str) -> object:
    rule = _RULES.get(name)
    if rule is None:
        near = difflib.get_close_matches(name, _RULES, n=1)
        expected = f"did you mean `{near[0]}`?" if near else f"expected {', '.join(_RULES)}"
        raise InputError(f"`sampling`: {quoted(name)} is no sampling parameter, {expected}")
    if not rule.accepts(value):
        raise fault(field, rule.expected, value)
    return rule.kept(value)


def _refuse_greedy_siblings(overrides: Mapping[str, object], run: SamplingParams, field: str) -> None:
    """Raise when n > 1 choices would all be the same greedy one."""
    n, temperature = overrides.get("n", run.n), overrides.get("temperature", run.temperature)
    if temperature == 0 and isinstance(n, int) and n > 1:
        raise InputError(
            f"`{field}`: expected n = 1 at temperature 0, came n = {n}",
            hint="at temperature 0 all choices are the same; raise `temperature` or leave `n` at 1",
        )
