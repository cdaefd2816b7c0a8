"""The forward pass in this process, against distributions that are worked out here one position at a time."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from managed_cli.cli.app import run
from managed_cli.scoring.rows import RowChoice
from managed_cli.scoring.verify import Verifier, VerifyReport
from managed_cli.storage.reader import open_recording
from tests.scoring.recordings import report, rows_at, sampled, verify_here, write_rows
from tests.servers.tokenizer import shared_tokenizer_directory
from tests.storage.rows import make_node, write_output

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the tests of real servers have it")

NEUTRAL = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
PROMPTS = [[5, 17, 300, 42, 8], [9, 9, 250, 31], [100, 7, 7, 61, 88, 19, 2]]
LENGTHS = [20, 33, 12]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights and peaked distributions, beside the fake servers' tokenizer."""
    transformers = importlib.import_module("transformers")
    folder = shutil.copytree(shared_tokenizer_directory(), tmp_path_factory.mktemp("model") / "weights")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=704,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(0.0, 0.6)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(weights: Path) -> Any:  # Any: a model of transformers
    transformers = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(weights).eval()


def distribution(model: Any, ids: list[int], sampling: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Probabilities of the next token after `ids`, worked out token by token in float64."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
    for token in set(ids):
        penalty = sampling["repetition_penalty"]
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    weights = np.exp((logits - logits.max()) / sampling["temperature"])
    weights[weights < sampling["min_p"] * weights.max()] = 0.0
    order = np.argsort(-weights)
    if sampling["top_k"] > 0:
        weights[order[sampling["top_k"] :]] = 0.0
    total, mass = weights.sum(), 0.0
    for token in order:
        if mass >= sampling["top_p"] * total:
            weights[token] = 0.0
        mass += weights[token]
    return weights / weights.sum()


def record(model: Any, path: Path, mode: str, **changes: Any) -> Path:
    """Rows that are sampled with those settings, their logprobs taken at the stage that `mode` names."""
    sampling, draw = NEUTRAL | changes, np.random.default_rng(3)
    stage = {
        "raw": NEUTRAL,
        "temperature": NEUTRAL | {"temperature": sampling["temperature"]},
        "processed": sampling,
    }[mode]
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(shared_tokenizer_directory())
    samples = []
    for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids, logprobs = list(prompt), []
        for _ in range(length):
            probabilities = distribution(model, ids, sampling)
            token = int(draw.choice(len(probabilities), p=probabilities))
            logprobs.append(math.log(distribution(model, ids, stage)[token]))
            ids.append(token)
        node = make_node(
            f"s-{index}",
            prompt=prompt,
            sampled=ids[len(prompt) :],
            logprobs=logprobs,
            full_text=tokenizer.decode(ids, clean_up_tokenization_spaces=False),
            sampling=sampling,
            logprobs_mode=mode,
            server_type="vllm",
        )
        samples.append([node])
    return write_output(path, samples)


def scored(weights: Path, path: Path, **settings: Any) -> VerifyReport:
    from managed_cli.scoring.forward import ForwardScorer
    from managed_cli.tokenizers import load_tokenizer

    scorer = ForwardScorer.load(str(weights), load_tokenizer(str(weights)), device="cpu", **settings)
    return asyncio.run(Verifier(scorer).run(open_recording(path), RowChoice()))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("raw", {}),
    ("raw", {"temperature": 0.7, "top_k": 20}),
    ("temperature", {"temperature": 0.6}),
    ("processed", {"temperature": 1.3}),
    ("processed", {"top_k": 8}),
    ("processed", {"top_p": 0.8}),
    ("processed", {"min_p": 0.1}),
    ("processed", {"repetition_penalty": 1.3}),
    ("processed", {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}),
]


@pytest.mark.parametrize(("mode", "changes"), SETTINGS, ids=str)
def test_honest_rows_agree_at_every_stage(mode: str, changes: Any, model: Any, weights: Path, tmp_path: Path) -> None:
    found = scored(weights, record(model, tmp_path / "out.parquet", mode, **changes))
    assert found.ok, found
    assert found.differences.count + found.unscored == sum(LENGTHS)
    assert found.unscored <= 2
    assert found.differences.largest < 1e-4


def test_long_rows_in_pieces_and_short_ones_together_score_alike(model: Any, weights: Path, tmp_path: Path) -> None:
    path = record(model, tmp_path / "out.parquet", "processed", top_k=9, repetition_penalty=1.2)
    for budget in (7, 26, 500):
        found = scored(weights, path, tokens_per_batch=budget)
        assert found.ok
        assert found.differences.count + found.unscored == sum(LENGTHS)


@pytest.mark.parametrize(
    ("recorded", "claimed", "diagnosis"),
    [("temperature", "raw", "temperature"), ("raw", "temperature", "no_temperature")],
)
def test_logprobs_of_another_stage_than_is_said_are_named(
    recorded: str, claimed: str, diagnosis: str, model: Any, weights: Path, tmp_path: Path
) -> None:
    honest = record(model, tmp_path / "out.parquet", recorded, temperature=0.7)
    rows = rows_at(honest)
    for row in rows:
        row["metadata"]["logprobs_mode"] = claimed
    found = scored(weights, write_rows(tmp_path / "false.parquet", rows, honest))
    assert not found.ok
    assert {kind: finding.rows for kind, finding in found.diagnoses.items()} == {diagnosis: len(rows)}


def test_other_weights_are_told_from_damage(model: Any, weights: Path, tmp_path: Path) -> None:
    other = shutil.copytree(weights, tmp_path / "other")
    changed = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(weights)
    torch.manual_seed(1)
    changed.lm_head.weight.data.normal_(0.0, 0.6)
    changed.save_pretrained(other)
    path = record(model, tmp_path / "out.parquet", "raw")
    done = verify_here(path, "--server-type", "transformers", "--model", other, "--device", "cpu", "--json")
    assert done.returncode == 6
    assert [found["kind"] for found in report(done)["diagnoses"]] == ["other_context"]
    assert "are these the weights that sampled them?" in done.stderr


def test_rounded_weights_are_told_from_damage(model: Any, weights: Path, tmp_path: Path) -> None:
    rounded = shutil.copytree(weights, tmp_path / "rounded")
    changed = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(weights)
    changed.to(torch.bfloat16).save_pretrained(rounded)
    path = record(model, tmp_path / "out.parquet", "raw")
    options = ("--server-type", "transformers", "--model", rounded, "--device", "cpu", "--json")
    done = verify_here(path, *options)
    assert done.returncode == 6
    assert [found["kind"] for found in report(done)["diagnoses"]] == ["rounding"]
    assert "--tolerance 0.5" in done.stderr
    assert verify_here(path, *options, "--tolerance", 0.5).returncode == 0


def test_the_command_takes_the_weights_from_where_the_tokenizer_was(
    model: Any, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from managed_cli.storage.shards import open_output

    honest = record(model, tmp_path / "out.parquet", "raw")
    rows = [row for batch in open_recording(honest).iter_batches() for row in batch.to_pylist()]
    nodes = [
        make_node(
            row["sample_id"],
            prompt=row["tokens"][: row["prompt_length"]],
            sampled=row["tokens"][row["prompt_length"] :],
            logprobs=row["logprobs"][row["prompt_length"] :],
            full_text=row["full_text"],
            sampling=NEUTRAL,
            logprobs_mode="raw",
        )
        for row in rows
    ]
    facts = {"tokenizer": str(weights)}
    with open_output(str(tmp_path / "named.parquet"), run_facts=facts, rows_per_shard=9, fingerprint={}) as output:
        output.add(nodes)
        path = output.finish()
    assert run(["verify", str(path), "--server-type", "transformers", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared_positions"] == sum(len(sampled(row)) for row in rows_at(path))
