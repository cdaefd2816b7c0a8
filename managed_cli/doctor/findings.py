"""What a check found: right, worth knowing, wrong, or not to be found out; each with what to do about it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Level(enum.StrEnum):
    """How a finding bears on what would be recorded.

    `note`: rows are true, and this is to be known of them. `unsafe`: rows would be untrue, or none could be recorded.
    `unknown`: it could not be found out.
    """

    OK = "ok"
    NOTE = "note"
    UNSAFE = "unsafe"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of a checkup.

    Attributes:
        check: what was looked at, in a word or two.
        said: what was found, in one sentence.
        advice: what to do about it; None where nothing is to be done.
    """

    check: str
    level: Level
    said: str
    advice: str | None = None


def ok(check: str, said: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, Level.OK, said)


def note(check: str, said: str, advice: str | None = None) -> Finding:
    """To be known of the rows, which are true."""
    return Finding(check, Level.NOTE, said, advice)


def unsafe(check: str, said: str, advice: str | None = None) -> Finding:
    """Rows would be untrue, or there would be none."""
    return Finding(check, Level.UNSAFE, said, advice)


def unknown(check: str, said: str, advice: str | None = None) -> Finding:
    """It could not be found out."""
    return Finding(check, Level.UNKNOWN, said, advice)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All findings, in the order in which they were made.

    Attributes:
        subject: what was looked at: a server and its address, or a tokenizer.
    """

    subject: str
    findings: Sequence[Finding]

    @property
    def is_safe(self) -> bool:
        """Whether what would be recorded can be trusted."""
        return not self.count(Level.UNSAFE)

    def count(self, level: Level) -> int:
        """How many findings are of that level."""
        return sum(finding.level is level for finding in self.findings)
