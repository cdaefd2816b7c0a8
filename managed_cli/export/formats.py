"""The formats there are: what a line holds, column by column, and where each convention comes from.

A format is data (its fields, for people) and one function from the kept rows of a sample to lines. It loads nothing of
the project that it is for: what that project reads was looked up in its source, which `source` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from managed_cli.errors import ConfigError

if TYPE_CHECKING:  # numpy and pyarrow, which describing a format does without
    from managed_cli.export.rollouts import Rollout

Line = dict[str, Any]  # Any: JSON values


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One key of a line.

    Attributes:
        type: as the project writes it, with its shape: P prompt, C completion, T = P + C positions, n rows.
    """

    name: str
    type: str
    meaning: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One trainer's format.

    Attributes:
        name: what `--to` takes.
        project: who reads it, and what a line is there.
        source: the code that reads it, and the version that was looked at.
        unit: what a line is: `group` (all rows of a sample) or `row`.
        lines: the kept rows of a sample, in order, and the sample's number → the lines.
        conventions: what a reader must know beyond the fields.
        loading: a Python program, in lines, that hands `OUT` to the project.
        needs_reward: whether a line cannot be without a score.
    """

    name: str
    project: str
    source: str
    unit: str
    fields: tuple[Field, ...]
    lines: Callable[[Sequence[Rollout], int], list[Line]]
    conventions: tuple[str, ...]
    loading: tuple[str, ...]
    needs_reward: bool = False


REWARD = Field("reward", "float | null", "what --reward gave the row; null without it")
ADVANTAGE = Field("advantage", "float | null", "reward less the sample's mean (--advantage); null without --reward")
IDENTITY = (
    Field("sample_id", "str", "which input sample; rows of one sample are a group and stand next to each other"),
    Field("choice_index", "int", "which of its choices"),
    Field("node_id", "str", "which row of it"),
    Field("finish_reason", "str", "why the last completion ended: stop, length, …"),
    Field("temperature", "float | null", "what it was sampled at"),
    Field("logprobs_mode", "str", "raw (before temperature), temperature, processed or unknown"),
)
"""Fields of every row format: no project reads them, all pass them on or leave them."""

LOGPROBS_CONVENTION = (
    "logprobs are the server's, in the mode that the row names: raw ones at a temperature other than 1 are not those "
    "of the distribution that was sampled from, so a trainer must score its own at the same stage"
)
UNSHIFTED = "ids, masks and logprobs of a position stand at the same index; no array is shifted"


def identity_of(rollout: Rollout) -> Line:
    """The values of `IDENTITY`."""
    return {
        "sample_id": rollout.sample_id,
        "choice_index": rollout.columns["choice_index"],
        "node_id": rollout.columns["node_id"],
        "finish_reason": rollout.columns["finish_reason"],
        "temperature": rollout.temperature,
        "logprobs_mode": str(rollout.metadata.get("logprobs_mode", "unknown")),
    }


def formats() -> dict[str, Format]:
    """Every format by its name, in the order of `--help`."""
    from managed_cli.export import atropos, huggingface, prime_rl, slime, trl, verl

    known = (atropos.FORMAT, trl.FORMAT, verl.FORMAT, prime_rl.FORMAT, slime.FORMAT, huggingface.FORMAT)
    return {format.name: format for format in known}


def format_named(name: str) -> Format:
    """The format that `--to NAME` means.

    Raises:
        ConfigError: there is none.
    """
    known = formats()
    if name not in known:
        raise ConfigError(f"--to {name!r} is not known", details=[f"known are: {', '.join(known)}"])
    return known[name]
