"""What every test against a real server asks of the recorded rows, and how it runs the recorder."""

from __future__ import annotations

import array
import collections
import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .recording_proxy import Exchange

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHARED_DATA = ROOT.parent / "shared" / "data"
"""Public data sets, where they lie beside the checkout; the examples of the project stand in for them elsewhere."""

NOT_SAMPLED = -100
COMMAND_SECONDS = 1800.0  # a hung recorder must not hang the tests for ever

Row = dict[str, Any]  # Any: a Parquet row as Python objects


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Prompts of one file. `field` holds the text that must appear in each row; None for chats."""

    name: str
    path: Path
    field: str | None = None
    most: int | None = None

    @property
    def arguments(self) -> list[str]:
        """INPUT and what the recorder must be told to read it."""
        chosen = [] if self.field in (None, "prompt") else ["--prompt-field", str(self.field)]
        limit = [] if self.most is None else ["--limit", str(self.most)]
        return [str(self.path), *chosen, *limit]

    def inputs(self) -> list[dict[str, Any]]:
        """The input objects that a run reads."""
        content = self.path.read_bytes()
        text = (gzip.decompress(content) if self.path.suffix == ".gz" else content).decode("utf-8")
        lines = [line for line in text.split("\n") if line.strip()]
        return [json.loads(line) for line in lines[: self.most]]


def limit_or_all(limit: int) -> int | None:
    """`limit`, or None (no limit) where MANAGED_CLI_REAL_ALL=1 asks for whole files."""
    return None if os.environ.get("MANAGED_CLI_REAL_ALL") == "1" else limit


def datasets() -> dict[str, Dataset]:
    """The public data sets where they are to be had, else the example prompts; the example chats always."""
    gsm8k, humaneval = SHARED_DATA / "gsm8k_200.jsonl", SHARED_DATA / "HumanEval.jsonl.gz"
    found = [Dataset(name="example chats", path=EXAMPLES / "chat.jsonl")]
    if gsm8k.exists():
        found.append(Dataset(name="GSM8K", path=gsm8k, field="question", most=limit_or_all(40)))
    if humaneval.exists():
        found.append(Dataset(name="HumanEval", path=humaneval, field="prompt", most=limit_or_all(40)))
    if len(found) == 1:
        found.append(Dataset(name="example prompts", path=EXAMPLES / "prompts.jsonl", field="prompt"))
    return {dataset.name: dataset for dataset in found}


def command(*arguments: object) -> list[str]:
    """`managed-cli ARGUMENTS` of the environment that runs the tests."""
    return [sys.executable, "-m", "managed_cli", *map(str, arguments)]


def managed_cli(
    *arguments: object, exit_code: int | None = 0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command run to its end; AssertionError with its stderr unless it ends with `exit_code` (None: any)."""
    ended = subprocess.run(
        command(*arguments),
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    told = f"managed-cli {' '.join(map(str, arguments))}\nexit code {ended.returncode}\n{ended.stderr[-6000:]}"
    assert exit_code is None or ended.returncode == exit_code, told
    return ended


def read_rows(path: Path) -> list[Row]:
    """All rows, in file order."""
    return pq.read_table(path).to_pylist()


# --- the rows and the input ---------------------------------------------------------------------------------------


def assert_every_input_has_its_choices(rows: Sequence[Row], dataset: Dataset, n: int) -> None:
    """A row for each choice of each input line, with the choice indices 0 … n-1, holding the text of its line.

    A line's own `sampling.n` goes before `n`.
    """
    inputs = dataset.inputs()
    assert inputs, f"{dataset.path} has no prompts"
    indices = collections.defaultdict(list)
    for row in rows:
        indices[row["sample_id"]].append(row["choice_index"])
    assert all(sorted(found) == list(range(len(found))) for found in indices.values()), dict(indices)
    wanted = [item.get("sampling", {}).get("n", n) for item in inputs]
    assert sorted(len(found) for found in indices.values()) == sorted(wanted)
    for item, choices in zip(inputs, wanted, strict=True):
        text = _last_text(item, dataset.field)
        holding = sum(1 for row in rows if text in row["full_text"])
        assert holding >= choices, f"{holding} rows hold the text of an input, not {choices}: {text[:80]!r}"


def _last_text(item: Mapping[str, Any], field: str | None) -> str:
    """The prompt, or the last message of a chat, without space around it: templates may trim that."""
    text = item[field] if field else item["messages"][-1]["content"]
    if isinstance(text, list):
        text = text[0]["text"]
    assert isinstance(text, str)
    return text.strip()


# --- the rows and the wire ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireChoice:
    """One sampled choice as it stood in a reply; a logprob is None where the reply has none for that token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]


def _vllm_choices(exchange: Exchange) -> Iterator[WireChoice]:
    prompt = exchange.request_json()["prompt"]
    if isinstance(prompt, str):
        return  # a probe in words
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    choices = exchange.reply_json()["choices"]
    n = len(choices) // len(prompts)
    for choice in choices:
        yield WireChoice(
            prompt=tuple(prompts[choice["index"] // n]),
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        )


def _sglang_choices(exchange: Exchange) -> Iterator[WireChoice]:
    prompt = exchange.request_json().get("input_ids")
    if not prompt:
        return
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    reply = exchange.reply_json()
    choices = reply if isinstance(reply, list) else [reply]
    n = len(choices) // len(prompts)
    for index, choice in enumerate(choices):
        entries = choice["meta_info"].get("output_token_logprobs")
        if not entries:
            continue  # a probe, or a request for prompt logprobs
        assert [entry[1] for entry in entries] == choice["output_ids"]
        yield WireChoice(
            prompt=tuple(prompts[index // n]),
            tokens=tuple(choice["output_ids"]),
            logprobs=tuple(entry[0] for entry in entries),
        )


def _trl_choices(exchange: Exchange) -> Iterator[WireChoice]:
    prompts = exchange.request_json()["prompts"]
    reply = exchange.reply_json()
    n = len(reply["completion_ids"]) // max(1, len(prompts))
    for index, tokens in enumerate(reply["completion_ids"]):
        prompt = prompts[index // n]
        if isinstance(prompt, str) or reply["logprobs"] is None:
            continue
        # Alternatives stand in order of rank, so the sampled token is looked for by its id.
        logprobs = [
            values[ids.index(token)]
            for token, ids, values in zip(
                tokens, reply["logprob_token_ids"][index], reply["logprobs"][index], strict=True
            )
        ]
        yield WireChoice(prompt=tuple(prompt), tokens=tuple(tokens), logprobs=tuple(logprobs))


def _llamacpp_choices(exchange: Exchange) -> Iterator[WireChoice]:
    request, reply = exchange.request_json(), exchange.reply_json()
    if request.get("logit_bias"):
        return  # a logprob asked for again, under a forced token
    for choice in reply if isinstance(reply, list) else [reply]:
        tokens = choice["tokens"]
        entries = choice.get("completion_probabilities", [])
        # Entries are left out for some tokens; only where none is missing is it plain which belongs to which.
        complete = [entry["id"] for entry in entries] == tokens
        logprobs = [entry["logprob"] for entry in entries] if complete else [None] * len(tokens)
        yield WireChoice(prompt=tuple(request["prompt"]), tokens=tuple(tokens), logprobs=tuple(logprobs))


WIRE_READERS: dict[str, Callable[[Exchange], Iterator[WireChoice]]] = {
    "/v1/completions": _vllm_choices,
    "/generate": _sglang_choices,
    "/generate/": _trl_choices,
    "/completion": _llamacpp_choices,
}
"""By the path of a generation request."""


def wire_choices(exchanges: Iterable[Exchange]) -> list[WireChoice]:
    """Every choice in every successful reply to a generation request with token ids."""
    return [
        choice
        for exchange in exchanges
        if exchange.method == "POST" and exchange.status == 200
        for choice in WIRE_READERS.get(exchange.path.partition("?")[0], lambda _: iter(()))(exchange)
    ]


def wire_choices_by_ids(
    exchanges: Iterable[Exchange],
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[WireChoice]]:
    """Those choices by prompt ids and sampled ids; what was not on the wire has none."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[WireChoice]] = collections.defaultdict(list)
    for choice in wire_choices(exchanges):
        found[choice.prompt, choice.tokens].append(choice)
    return found


def generation_requests(exchanges: Iterable[Exchange]) -> list[dict[str, Any]]:
    """The bodies of all generation requests with token ids."""
    return [
        exchange.request_json()
        for exchange in exchanges
        if exchange.method == "POST" and exchange.status == 200 and wire_choices([exchange])
    ]


def assert_rows_are_what_was_on_the_wire(rows: Sequence[Row], exchanges: Iterable[Exchange]) -> None:
    """Rows and sampled choices belong together one to one: prompt ids sent, ids sampled, and float32 of each logprob.

    A choice whose prompt was recorded, but which is in no row, is a sample that was thrown away.
    """
    waiting = wire_choices_by_ids(exchanges)
    prompts = set()
    for row in rows:
        name = f"sample {row['sample_id']}, choice {row['choice_index']}"
        start = next(position for position, mask in enumerate(row["masked_tokens"]) if mask != NOT_SAMPLED)
        prompt, sampled = tuple(row["tokens"][:start]), tuple(row["tokens"][start:])
        prompts.add(prompt)
        candidates = waiting[prompt, sampled]
        assert candidates, f"{name}: no reply has these {len(sampled)} tokens for a prompt of these {start} tokens"
        logprobs = row["logprobs"][start:]
        match = next((choice for choice in candidates if same_logprobs(choice.logprobs, logprobs)), None)
        assert match is not None, f"{name}: recorded {logprobs}, the reply has {[c.logprobs for c in candidates]}"
        candidates.remove(match)
    left = [choice for choices in waiting.values() for choice in choices if choice.prompt in prompts]
    assert not left, f"{len(left)} sampled choices were not recorded, the first one: {left[0]}"


def same_logprobs(sent: Sequence[float | None], recorded: Sequence[float]) -> bool:
    """Those on the wire, where it has them, are those of a row, as float32 to the bit."""
    known = [(value, row) for value, row in zip(sent, recorded, strict=True) if value is not None]
    return array.array("f", [value for value, _ in known]) == array.array("f", [row for _, row in known])


def with_torch(environment: Path) -> dict[str, str]:
    """Variables under which the recorder of the tests finds the PyTorch of the servers' environment."""
    (packages,) = environment.glob("lib/python3.*/site-packages")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "HF_HUB_OFFLINE": "1"}


# --- the rows and the truth ---------------------------------------------------------------------------------------


def forward_report(rows: Path, *, environment: Path, report: Path, temperature: float = 1.0) -> dict[str, Any]:
    """What `forward.py` says of the file `rows`, computed with the float32 SmolLM2 of the servers' environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("forward.py")
    arguments = [rows, environment / "models" / "smollm2-135m", "--temperature", temperature, "--out", report]
    ended = subprocess.run(
        [str(environment / "bin" / "python"), str(script), *map(str, arguments)],
        env={**variables, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    result = json.loads(report.read_text(encoding="utf-8"))
    assert isinstance(result, dict)
    return result


def forward_topk(token_ids: list[int], environment: Path, report: Path) -> list[dict[str, float]]:
    """Per position, logprob by id (as text) of the likeliest tokens, from the float32 model."""
    script = Path(__file__).with_name("forward_topk.py")
    model = environment / "models" / "smollm2-135m"
    subprocess.run(
        [str(environment / "bin" / "python"), str(script), str(model), json.dumps(token_ids), str(report)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=True,
    )
    positions: list[dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))
    return positions


MOST_NATS, MEAN_NATS = 5e-3, 5e-4
"""By which a logprob, and all of them in the mean, may differ from the forward pass where both compute in float32.

vLLM stays within 7.2e-5 and 6.2e-6. In one of dozens of runs it was 2.7e-3, and 7e-5 in the mean, and not again with
the same seed and as many sampled positions: the cause is not known. What the recorder could do wrong (a neighbour's
logprob, another temperature, another context) begins at 1e-2, and what it was sent is compared to the bit beside this.
"""


def assert_true(report: Mapping[str, Any], rows: int, *, most: float = MOST_NATS, mean: float = MEAN_NATS) -> None:
    """All `rows` obey the rules of alignment; no logprob is further than `most` nats from the truth, in half of the
    rows none further than a tenth of that, and their mean difference is at most `mean`."""
    assert report["problems"] == []
    assert len(report["rows"]) == rows > 0
    worst = max(report["rows"], key=lambda row: row["max_abs"])
    far = [row for row in report["rows"] if row["max_abs"] > most / 10]
    print(
        f"{report['sampled']} sampled positions in {rows} rows: recorded − forward pass at most "
        f"{report['max_abs']:.2e}, mean {report['mean_abs']:.2e} nats"
    )
    if far:
        print(f"{len(far)} rows further than {most / 10:.0e}: {far}")
    assert report["max_abs"] <= most, f"the worst row: {worst}"
    assert len(far) <= rows / 2
    assert report["mean_abs"] <= mean
