"""Throughput on real servers, beside clients that record nothing; needs the environment of `tests/real_servers`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import pyarrow.parquet as pq
import tokenizers

from managed_cli.backends.embedded import EmbeddedBackend, EngineConfig
from tests.bench.children import environment
from tests.bench.jobs import PROMPT, varied, write_lines
from tests.bench.tables import markdown
from tests.real_servers.servers import SERVED_NAME, running

CONCURRENCY = 16
TOKENS = 64
SLEEP_WHEN_IDLE = {"OMP_WAIT_POLICY": "passive"}
"""As the bare server has it: threads of llama.cpp that wait do not take the cores from those that work."""

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""Sampling as the recorder asks for it: the server's own defaults filter by five samplers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """One program on one server: sampled tokens, and the seconds they took."""

    server: str
    program: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of wall time."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, object]:
        """As it stands in the JSON file."""
        return dataclasses.asdict(self)


def real_paces(servers: Path, samples: int, repeats: int, told: Callable[[str], None]) -> tuple[str, list[Pace]]:
    """Tokens per second: a real vLLM under `vllm bench serve` and under the recorder; llama.cpp likewise."""
    with tempfile.TemporaryDirectory(prefix="managed-cli-bench-") as directory:
        where = Path(directory)
        found = on_vllm(servers, where, samples, repeats, told)
        found += on_llamacpp(servers, where, max(samples // 2, 1), repeats, told)
    rows = []
    for server in dict.fromkeys(pace.server for pace in found):
        best: dict[str, Pace] = {}
        for pace in (pace for pace in found if pace.server == server):
            if pace.program not in best or pace.tokens_per_second > best[pace.program].tokens_per_second:
                best[pace.program] = pace
        bare = next(iter(best.values()))
        for program, pace in best.items():
            share = pace.tokens_per_second / bare.tokens_per_second
            rows.append([server, program, f"{pace.tokens:,}", pace.seconds, pace.tokens_per_second, share])
    return markdown(["server", "program", "tokens", "s", "tokens / s", "of the first"], rows), found


def questions(samples: int) -> list[str]:
    """As many different prompts, of about a hundred tokens."""
    return [varied(PROMPT, number) for number in range(samples)]


def on_vllm(servers: Path, where: Path, samples: int, repeats: int, told: Callable[[str], None]) -> list[Pace]:
    """Both clients in turns on one server, every completion as long as it may be."""
    prompts = write_lines(where / "bench.jsonl", ({"prompt": text} for text in questions(samples)))
    found = []
    with running("vllm", environment=servers, log_folder=where) as server:
        for turn in range(-1, repeats):  # the first turn warms the server up
            paces = [
                by_vllm_bench(servers, server.base_url, str(server.model), prompts, where, samples),
                by_recorder("vllm", where, samples, "--base-url", server.base_url),
            ]
            if turn >= 0:
                found += paces
                told("; ".join(f"{pace.program}: {pace.tokens_per_second:.1f} tokens/s" for pace in paces))
    return found


def by_vllm_bench(servers: Path, url: str, model: str, prompts: Path, where: Path, samples: int) -> Pace:
    """`vllm bench serve` over the prompts."""
    command = [
        servers / "bin" / "vllm", "bench", "serve", "--backend", "openai", "--base-url", url,
        "--endpoint", "/v1/completions", "--model", SERVED_NAME, "--tokenizer", model,
        "--dataset-name", "custom", "--dataset-path", prompts, "--skip-chat-template", "--disable-shuffle",
        "--custom-output-len", TOKENS, "--num-prompts", samples, "--max-concurrency", CONCURRENCY,
        "--temperature", 1.0, "--save-result", "--result-dir", where, "--result-filename", "vllm.json",
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], env=environment(), cwd=where, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    result = json.loads((where / "vllm.json").read_text(encoding="utf-8"))
    return Pace("vllm", "vllm bench serve", int(result["total_output_tokens"]), float(result["duration"]))


def by_recorder(kind: str, where: Path, samples: int, *options: object) -> Pace:
    """`managed-cli rollout` over the same prompts, by its own count of tokens and seconds."""
    prompts = write_lines(
        where / f"{kind}.jsonl", ({"id": str(number), "prompt": text} for number, text in enumerate(questions(samples)))
    )
    command = [
        sys.executable, "-m", "managed_cli", "rollout", prompts, "--server-type", kind, *options,
        "--max-tokens", TOKENS, "--concurrency", CONCURRENCY, "--temperature", 1.0, "--seed", 1,
        "--out", where / f"{kind}.parquet", "--overwrite", "--quiet", "--json",
    ]  # fmt: skip
    variables = {**environment(), **SLEEP_WHEN_IDLE}
    done = subprocess.run(
        [str(part) for part in command], env=variables, cwd=where, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the recorder ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    return Pace(
        "llama.cpp" if kind == "local" else kind, "managed-cli", summary["completion_tokens"], summary["seconds"]
    )


def on_llamacpp(servers: Path, where: Path, samples: int, repeats: int, told: Callable[[str], None]) -> list[Pace]:
    """A bare loop on llama.cpp's own server, and the embedded engine, in turns; the same file of weights.

    The loop sends the recorder's seeds, so that the same answers end early: one token costs nearly what 64 do.
    """
    model = servers / "models" / "smollm2-135m-f32.gguf"
    tokenizer = tokenizers.Tokenizer.from_file(str(servers / "models" / "smollm2-135m" / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in questions(samples)]
    found = []
    for turn in range(-1, repeats):
        recorder = by_recorder("local", where, samples, "--model", model)
        prompts = list(zip(ids, _seeds(where / "local.parquet"), strict=True))
        with running("llamacpp", environment=servers, log_folder=where) as server:
            paces = [asyncio.run(_bare_loop("bare loop", server.base_url, prompts))]
        paces += [asyncio.run(_bare_loop_on_engine(model, prompts)), recorder]
        if turn >= 0:
            found += paces
            told("; ".join(f"{pace.program}: {pace.tokens_per_second:.1f} tokens/s" for pace in paces))
    return found


def _seeds(recording: Path) -> list[int]:
    """What was sent for each of the samples 0, 1, …"""
    rows = pq.read_table(recording, columns=["sample_id", "metadata"]).to_pylist()
    rows.sort(key=lambda row: int(row["sample_id"]))
    return [json.loads(row["metadata"])["sampling"]["seed"] for row in rows]


async def _bare_loop_on_engine(model: Path, prompts: list[tuple[list[int], int]]) -> Pace:
    """As the bare loop, on the engine as the recorder starts it: attention in float32, where llama.cpp's is in half."""
    backend = await EmbeddedBackend.start(EngineConfig(model=str(model)))
    try:
        return await _bare_loop("bare loop, float32 attention", backend.http.base_url, prompts, key=backend.api_key)
    finally:
        await backend.aclose()


async def _bare_loop(program: str, url: str, prompts: list[tuple[list[int], int]], *, key: str | None = None) -> Pace:
    """Every prompt posted by one of `CONCURRENCY` workers; nothing but the number of tokens is read."""
    waiting, tokens = iter(prompts), 0
    request = {**PLAIN, "n_predict": TOKENS, "cache_prompt": False}

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for prompt, seed in waiting:
            body = msgspec.json.encode({**request, "prompt": prompt, "seed": seed})
            async with session.post(f"{url}/completion", data=body) as reply:
                tokens += msgspec.json.decode(await reply.read())["tokens_predicted"]

    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    async with aiohttp.ClientSession(headers=headers) as session:
        started = time.monotonic()
        await asyncio.gather(*(work(session) for _ in range(CONCURRENCY)))
        seconds = time.monotonic() - started
    return Pace("llama.cpp", program, tokens, seconds)


def servers_environment() -> Path | None:
    """The environment of real servers, where the variable names one."""
    named = os.environ.get("MANAGED_CLI_REAL_SERVERS")
    return Path(named) if named else None
