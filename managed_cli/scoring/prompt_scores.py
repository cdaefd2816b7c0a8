"""Top-k alternatives at every position of prompts, conversations and recorded rows, as rows of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from managed_cli.errors import ConfigError, InputError
from managed_cli.managed.servers import Server
from managed_cli.rollout.input_options import InputOptions
from managed_cli.rollout.sample_run import task_metadata
from managed_cli.rollout.samples import Task
from managed_cli.storage.reader import Recording
from managed_cli.storage.recorded_ids import sample_digest
from managed_cli.storage.schema import Column, RowFormat, json_text
from managed_cli.types import PromptLogprobs

FOR_PROMPTS = "for prompts, which are no recorded rows"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """One prompt of P tokens with its alternatives: a row of the output.

    Attributes:
        metadata: `sample_id`, where the prompt is from, and who scored it.
        choice_index, node_id: of the recorded row that was scored; None for a prompt.
    """

    found: PromptLogprobs
    metadata: Mapping[str, Any]  # Any: JSON values
    choice_index: int | None = None
    node_id: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Ids of the prompt, [P]."""
        return self.found.prompt_tokens


COLUMNS: tuple[Column, ...] = (
    Column(
        "sample_id",
        pa.string(),
        "identity of the input sample",
        lambda row: row.metadata["sample_id"],
        unit="id",
        dictionary=True,
    ),
    Column(
        "choice_index",
        pa.int32(),
        "which of the sample's choices the recorded row is",
        lambda row: row.choice_index,
        unit="0 … n-1",
        null_rule=FOR_PROMPTS,
    ),
    Column(
        "node_id",
        pa.string(),
        "identity of the recorded row within its sample",
        lambda row: row.node_id,
        unit="id",
        null_rule=FOR_PROMPTS,
    ),
    Column("prompt_length", pa.int32(), "tokens scored", lambda row: len(row.tokens), unit="tokens"),
    Column(
        "prompt_tokens",
        pa.list_(pa.int32()),
        "ids that were scored",
        lambda row: row.tokens,
        unit="[P] token ids",
        dictionary=True,
    ),
    Column(
        "prompt_topk_token_ids",
        pa.list_(pa.list_(pa.int32())),
        "the likeliest ids at each position, best first; none at position 0",
        lambda row: row.found.topk_token_ids,
        unit="[P][k] token ids",
        dictionary=True,
    ),
    Column(
        "prompt_topk_logprobs",
        pa.list_(pa.list_(pa.float32())),
        "their natural logs, before temperature and filters",
        lambda row: row.found.topk_logprobs,
        unit="[P][k] nats",
        byte_stream_split=True,
    ),
    Column(
        "metadata",
        pa.string(),
        "where the prompt is from, server, model, input `fields`",
        lambda row: json_text(row.metadata),
        unit="JSON object",
    ),
)

PROMPT_LOGPROBS = RowFormat("an output of prompt logprobs", COLUMNS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """The recorded rows of one sample, to be scored token by token.

    Attributes:
        rows: choice index, node id and ids of each.
        source: the recording and the sample's first row in it: `out.parquet:row 12`.
        line: that row, from 0.
    """

    sample_id: str
    source: str
    line: int
    rows: tuple[tuple[int, str, list[int]], ...]


async def score_prompt(task: Task, server: Server, *, top_k: int) -> list[ScoredPrompt]:
    """The one row of a prompt or conversation.

    Raises:
        InputError: user turns, which have no answers yet; or the chat template refuses the conversation.
        ServerError: the prompt cannot be sent, or the reply is not all of it.
    """
    if task.turns is not None:
        raise InputError(
            "user turns cannot be scored: the answers between them are not there",
            hint="give the whole conversation as `messages`",
        )
    async with server.managed_server() as managed:
        prompt = await managed.plan(
            prompt=task.prompt, prompt_ids=task.prompt_ids, messages=task.messages, tools=task.tools
        )
    found = await server.backend.prompt_logprobs(prompt.token_ids, top_k)
    return [ScoredPrompt(found=found, metadata={**task_metadata(task), **_who(server)})]


async def score_recorded(sample: RecordedSample, server: Server, *, top_k: int) -> list[ScoredPrompt]:
    """A row for each recorded row of a sample, in their order.

    Raises:
        ServerError: one of them cannot be sent, or a reply is not all of it.
    """
    scored = []
    for choice_index, node_id, ids in sample.rows:
        found = await server.backend.prompt_logprobs(ids, top_k)
        metadata = {"sample_id": sample.sample_id, "source": sample.source, **_who(server)}
        scored.append(ScoredPrompt(found=found, metadata=metadata, choice_index=choice_index, node_id=node_id))
    return scored


def _who(server: Server) -> dict[str, Any]:  # Any: JSON values
    backend = server.backend
    return {"server": backend.base_url, "server_type": backend.server_type, "model": backend.info.model}


def recorded_samples(recording: Recording, options: InputOptions) -> Iterator[RecordedSample]:
    """The samples of a recording, in its order; `limit` and `part` of the options hold.

    Raises:
        ConfigError: it holds placeholders of the OpenAI dummy.
        InputError: the rows of a sample do not stand next to each other, or one holds no ids.
        OutputError: a file is damaged or has gone.
    """
    if recording.run_facts.get("server_type") == "openai":
        raise ConfigError(f"`{recording.path}` holds placeholders of the OpenAI dummy, not tokens of a model")
    seen: set[bytes] = set()
    for sample in itertools.islice(_grouped(recording), options.limit):
        digest = sample_digest(sample.sample_id)
        if digest in seen:
            raise InputError(
                f"{sample.source}: rows of sample {sample.sample_id} stand in two places",
                hint=f"`managed-cli inspect {recording.path} --check` tells more",
            )
        if options.part is None or options.part.holds(sample.sample_id):
            yield sample
        seen.add(digest)


def _grouped(recording: Recording) -> Iterator[RecordedSample]:
    sample: RecordedSample | None = None
    number = 0
    for batch in recording.iter_batches(("sample_id", "choice_index", "node_id", "tokens")):
        for sample_id, choice_index, node_id, ids in zip(*(column.to_pylist() for column in batch), strict=True):
            source = f"{recording.path.name}:row {number}"
            if not ids or None in ids:
                raise InputError(f"{source}: expected token ids, sample {sample_id} has none there")
            row = (choice_index, node_id, ids)
            if sample is not None and sample.sample_id == sample_id:
                sample = dataclasses.replace(sample, rows=(*sample.rows, row))
            else:
                if sample is not None:
                    yield sample
                sample = RecordedSample(sample_id=sample_id, source=source, line=number, rows=(row,))
            number += 1
    if sample is not None:
        yield sample
