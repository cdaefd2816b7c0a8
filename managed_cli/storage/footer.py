"""What a file says of itself beside its rows: the run's facts, its fingerprint, its sessions and its counts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from managed_cli.storage.schema import (
    FINGERPRINT_METADATA_KEY,
    RUN_METADATA_KEY,
    SCHEMA_VERSION,
    SESSIONS_METADATA_KEY,
    STATISTICS_METADATA_KEY,
    SUMMARY_METADATA_KEY,
    json_text,
)
from managed_cli.storage.summary import Summary

Fingerprint = Mapping[str, object]
"""Flat JSON object: every setting that decides what is recorded. Two runs are one run when theirs are equal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of a run: the first, or a later one that resumed it.

    Attributes:
        number: counted from 1, in the order of the starts that recorded something.
        rows: how many rows it recorded, of those the footer speaks of.
        samples: and samples.
    """

    number: int
    rows: int
    samples: int


def added_sessions(sessions: Iterable[Session]) -> tuple[Session, ...]:
    """One entry per session with rows, in their order: what several files say of the same session is added up."""
    totals: dict[int, Session] = {}
    for session in sessions:
        before = totals.get(session.number, Session(number=session.number, rows=0, samples=0))
        totals[session.number] = dataclasses.replace(
            before, rows=before.rows + session.rows, samples=before.samples + session.samples
        )
    return tuple(totals[number] for number in sorted(totals) if totals[number].rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The key-value metadata of one of our files, about to be written.

    Attributes:
        run_facts: JSON object, as `facts_json` makes it.
        fingerprint: JSON object, as `json_text` makes it.
        summary: counts over exactly the file's rows.
    """

    run_facts: str
    fingerprint: str
    sessions: tuple[Session, ...]
    summary: Summary

    def key_values(self) -> dict[bytes, str]:
        """As Parquet takes them."""
        statistics = self.summary.statistics
        return {
            **({STATISTICS_METADATA_KEY: statistics.to_json()} if statistics is not None else {}),
            RUN_METADATA_KEY: self.run_facts,
            FINGERPRINT_METADATA_KEY: self.fingerprint,
            SESSIONS_METADATA_KEY: json_text([dataclasses.asdict(session) for session in self.sessions]),
            SUMMARY_METADATA_KEY: self.summary.to_json(),
        }


def facts_json(run_facts: Mapping[str, object]) -> str:
    """`run_facts` as they stand in a footer, with the version of the schema."""
    return json_text({**run_facts, "schema_version": SCHEMA_VERSION})


def find_json_object(text: bytes | None) -> dict[str, Any] | None:  # Any: free-form JSON values
    """The object that `text` is; None when it is none."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return None


def parsed_sessions(text: bytes | None) -> tuple[Session, ...]:
    """The sessions that `Footer.key_values` wrote; empty where `text` is something else."""
    if text is None:
        return ()
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return tuple(
            Session(number=int(entry["number"]), rows=int(entry["rows"]), samples=int(entry["samples"]))
            for entry in json.loads(text)
        )
    return ()
