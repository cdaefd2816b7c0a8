"""Rows as trainers see them: streamed sample by sample, each one exported, or dropped for a reason that is counted.

Shapes: a row has T positions. The prompt is the P positions before the first sampled one, the completion is all
C = T - P positions from there on, those between two sampled turns included; only the mask says what was sampled.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from managed_cli.errors import OutputError
from managed_cli.storage.check import KINDS, row_flags
from managed_cli.storage.reader import Recording
from managed_cli.storage.recorded_ids import RecordedIds, sample_ids_of
from managed_cli.storage.schema import json_text
from managed_cli.tracking.messages import answered, flat_content
from managed_cli.types import IGNORED_TOKEN_ID

_ARRAYS = ("tokens", "masked_tokens", "logprobs")


class Drop(enum.StrEnum):
    """Why a row is not exported."""

    INNER_NODE = "inner_node"
    NOTHING_SAMPLED = "nothing_sampled"
    NONFINITE_LOGPROB = "nonfinite_logprob"
    NO_REWARD = "no_reward"


DROP_MEANINGS = {
    Drop.INNER_NODE: "another row of the sample goes on from it, and holds its tokens (`--nodes all` keeps it)",
    Drop.NOTHING_SAMPLED: "the model sampled no token of it",
    Drop.NONFINITE_LOGPROB: "a sampled token has the logprob -inf, which no ratio can be taken of",
    Drop.NO_REWARD: "the reward function returned None",
}
"""Reason → what it means, for people."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One recorded row.

    Attributes:
        row: number of the row in the recording, from 0.
        columns: the columns that are no arrays, `metadata` as text.
        metadata: the same, parsed.
        tokens, masked_tokens, logprobs: [T], as recorded.
        sampled: [T], whether the model sampled the position.
        reward, advantage: None where nothing scores.
    """

    row: int
    columns: Mapping[str, Any]  # Any: the columns' values
    metadata: Mapping[str, Any]  # Any: free-form JSON values
    tokens: npt.NDArray[np.int32]
    masked_tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled: npt.NDArray[np.bool_]
    reward: float | None = None
    advantage: float | None = None

    @property
    def sample_id(self) -> str:
        """Which sample it is of."""
        return str(self.columns["sample_id"])

    @property
    def prompt_end(self) -> int:
        """P: how many positions stand before the first sampled one."""
        return int(self.sampled.argmax()) if self.sampled.any() else len(self.sampled)

    @property
    def temperature(self) -> float | None:
        """What it was sampled at; None where the row does not say."""
        sampling = self.metadata.get("sampling")
        value = sampling.get("temperature") if isinstance(sampling, dict) else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def turn_texts(self) -> list[str]:
        """The sampled turns as a person reads them."""
        turns = self.metadata.get("turns")
        found = turns if isinstance(turns, list) else []
        return [str(turn.get("text") or "") for turn in found if isinstance(turn, dict)]

    @property
    def conversation(self) -> list[dict[str, Any]] | None:  # Any: what chat templates read
        """The chat that was sent for the last sampled turn, and then the answer; None for what was no chat.

        Content given as text parts is the text. A last message that the model continued has what it added.
        """
        sent, texts = self.metadata.get("messages"), self.turn_texts
        if not isinstance(sent, list) or not sent or not texts or not all(isinstance(m, dict) for m in sent):
            return None
        return [{**m, "content": flat_content(m.get("content"))} for m in answered(sent, texts[-1])]

    @property
    def tools_text(self) -> str | None:
        """The tools that the chat template was given, as JSON: their schemas differ too much for one type of column."""
        tools = self.metadata.get("tools")
        return json_text(tools) if isinstance(tools, list) and tools else None

    def logprobs_with(self, unsampled: float) -> list[float]:
        """The logprobs, [T], with `unsampled` where the model did not sample: each project has its own filler."""
        filled: list[float] = np.where(self.sampled, self.logprobs, np.float32(unsampled)).tolist()
        return filled

    def at_sampled(self, value: float) -> list[float]:
        """`value` at sampled positions and 0.0 elsewhere: [T]."""
        spread: list[float] = np.where(self.sampled, value, 0.0).tolist()
        return spread


@dataclasses.dataclass(slots=True)
class Tally:
    """Where every row went: `read` is always `kept` and `dropped` together, once the last one is read.

    Attributes:
        samples: samples of which a row was kept.
        dropped: reason → rows.
    """

    read: int = 0
    kept: int = 0
    samples: int = 0
    dropped: dict[Drop, int] = dataclasses.field(default_factory=dict)

    def drop(self, reason: Drop) -> None:
        """Count one row that is not exported."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def samples_of(recording: Recording, tally: Tally, *, every_node: bool) -> Iterator[list[Rollout]]:
    """The rows of each sample that can be trained on, in their order; samples without one are left out.

    Memory is one batch and one sample. `tally` counts what is read and dropped.

    Args:
        every_node: keep rows that another row of the sample goes on from.

    Raises:
        OutputError: a file is damaged, a row breaks a rule, holds placeholders, or stands apart from its sample.
    """
    known = len(RecordedIds.of(sample_ids_of(file.path for file in recording.files)))
    group: list[Rollout] = []
    groups = 0
    for rollout in _rollouts(recording):
        tally.read += 1
        if group and rollout.sample_id != group[0].sample_id:
            yield from _kept(group, tally, every_node=every_node)
            group = []
        if not group:
            groups += 1
            if groups > known:
                raise OutputError(
                    f"`{recording.path}`: the rows of a sample do not stand together, seen at row {rollout.row}",
                    hint="rows of a sample are recorded next to each other: sort the file by sample_id",
                )
        group.append(rollout)
    yield from _kept(group, tally, every_node=every_node)


def _kept(group: Sequence[Rollout], tally: Tally, *, every_node: bool) -> Iterator[list[Rollout]]:
    """The rows of one sample that are exported, once; nothing where all are dropped.

    Raises:
        OutputError: two rows have one identity.
    """
    identities = {(rollout.columns["choice_index"], rollout.columns["node_id"]) for rollout in group}
    if len(identities) < len(group):
        raise OutputError(
            f"sample {group[0].sample_id}, from row {group[0].row} on, has two rows of one identity",
            hint="`managed-cli inspect --check` names them",
        )
    parents = {rollout.columns["parent_id"] for rollout in group}
    kept = []
    for rollout in group:
        reason = _drop_reason(rollout, parents, every_node=every_node)
        if reason is None:
            kept.append(rollout)
        else:
            tally.drop(reason)
    if kept:
        yield kept


def _drop_reason(rollout: Rollout, parents: set[str | None], *, every_node: bool) -> Drop | None:
    if not every_node and rollout.columns["node_id"] in parents:
        return Drop.INNER_NODE
    if not rollout.sampled.any():
        return Drop.NOTHING_SAMPLED
    if not np.isfinite(rollout.logprobs).all():
        return Drop.NONFINITE_LOGPROB
    return None


def _rollouts(recording: Recording) -> Iterator[Rollout]:
    first_row = 0
    for batch in recording.iter_batches():
        _refuse_broken(recording, batch, first_row)
        yield from _rollouts_of(recording, batch, first_row)
        first_row += batch.num_rows


def _refuse_broken(recording: Recording, batch: pa.RecordBatch, first_row: int) -> None:
    """Raise OutputError for the first row that breaks a rule of the schema."""
    for kind, flags in row_flags(batch):
        if flags.any():
            raise OutputError(
                f"`{recording.path}`: row {first_row + int(flags.argmax())} breaks a rule: {KINDS[kind]}",
                details=("nothing was exported",),
                hint=f"`managed-cli inspect --check {recording.path}` lists every broken rule",
            )


def _rollouts_of(recording: Recording, batch: pa.RecordBatch, first_row: int) -> Iterator[Rollout]:
    columns = [name for name in batch.schema.names if name not in _ARRAYS]
    narrow = batch.select(columns).to_pylist()
    ends = np.cumsum(pc.list_value_length(batch.column("tokens")).to_numpy())
    tokens, masks, logprobs = (batch.column(name).flatten().to_numpy() for name in _ARRAYS)
    start = 0
    for index, end in enumerate(ends):
        metadata = json.loads(narrow[index]["metadata"])
        if metadata.get("dummy_tokens") is True:
            raise placeholder_error(recording, row=first_row + index)
        place = slice(start, int(end))
        yield Rollout(
            row=first_row + index,
            columns=narrow[index],
            metadata=metadata,
            tokens=tokens[place],
            masked_tokens=masks[place],
            logprobs=logprobs[place],
            sampled=masks[place] != IGNORED_TOKEN_ID,
        )
        start = int(end)


def placeholder_error(recording: Recording, *, row: int | None = None) -> OutputError:
    """What is said of rows of the OpenAI dummy."""
    subject = f"`{recording.path}`" if row is None else f"`{recording.path}`: row {row}"
    return OutputError(
        f"{subject} holds placeholder tokens, not tokens of a model: they are never exported",
        details=("they come from an OpenAI endpoint, which gives no token ids",),
        hint="record the same prompts with a server that gives token ids: vllm, sglang, trl, llamacpp or local",
    )
