"""What a project makes of an exported file, by its own code: `python -m tests.export.load_with PROJECT FILE`.

Prints one JSON array: a row each, as `ids`, `sampled`, `logprobs` (at sampled positions) and `reward`, in file order.
A program of its own, since these projects warn, print and take gigabytes when they are imported.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def read_lines(file: str) -> Rows:
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


def with_atropos(file: str) -> Rows:
    """Pushed to Atropos's own API server, taken from it as a batch, and made into tensors by its example trainer."""
    from atroposlib.api.server import app
    from example_trainer.data import pad_data_to_good_offset
    from fastapi.testclient import TestClient

    groups = read_lines(file)
    sequences = sum(len(group["tokens"]) for group in groups)
    with TestClient(app) as api:
        registration = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": sequences,
            "max_token_len": 4096,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 1,
        }
        api.post("/register", json=registration).raise_for_status()
        for group in groups:
            assert api.post("/scored_data", json=group).json() == {"status": "received"}
        batch = api.get("/batch").json()
    scores = {
        str(tokens): score for group in groups for tokens, score in zip(group["tokens"], group["scores"], strict=True)
    }
    sizes = {str(tokens): len(tokens) for group in groups for tokens in group["tokens"]}
    order = [str(tokens) for item in batch["batch"] for tokens in item["tokens"]]
    tokens, labels, _, _, logprobs = pad_data_to_good_offset(batch, batch_size=1)
    by_ids = {}
    for key, ids, label, logprob in zip(order, tokens, labels, logprobs, strict=True):
        length = sizes[key] - 1  # the trainer has cut off the last input and the first label
        target = label[0, :length].tolist()
        by_ids[key] = {
            "ids": [*ids[0, :length].tolist(), json.loads(key)[-1]],
            "sampled": [False, *(value != -100 for value in target)],
            "logprobs": [v for v, t in zip(logprob[0, :length].tolist(), target, strict=True) if t != -100],
            "reward": scores[key],
        }
        assert all(t in (-100, i) for t, i in zip(target, json.loads(key)[1:], strict=True))
    return [by_ids[str(tokens)] for group in groups for tokens in group["tokens"]]


def with_trl(file: str) -> Rows:
    """One step of GRPOTrainer whose `rollout_func` gives the recorded rows; what the loss would be taken of."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    from tests.servers.tokenizer import shared_tokenizer_directory

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    lines = read_lines(file)
    rows = collections.defaultdict(list)
    for line in lines:
        rows[line["sample_id"]].append(line)
    group_size = len(next(iter(rows.values())))

    def rollout_func(prompts: list[str], trainer: object) -> dict[str, list[Any]]:
        taken = [rows[prompt].pop(0) for prompt in prompts]
        return {key: [row[key] for row in taken] for key in taken[0]}

    def recorded(reward: list[float], **_: object) -> list[float]:
        return reward

    seen: list[dict[str, Any]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            made = super()._generate_and_score_completions(inputs)
            for index, example in enumerate(inputs):
                prompt = made["prompt_ids"][index][made["prompt_mask"][index].bool()].tolist()
                real = made["completion_mask"][index].bool()
                sampled = made["tool_mask"][index][real].bool()
                seen.append(
                    {
                        "sample_id": example["prompt"],
                        "ids": prompt + made["completion_ids"][index][real].tolist(),
                        "sampled": [False] * len(prompt) + sampled.tolist(),
                        "logprobs": made["sampling_per_token_logps"][index][real][sampled].tolist(),
                    }
                )
            return made

    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_tokenizer_directory())
    tokenizer.pad_token = tokenizer.eos_token
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Watched(
            model=transformers.LlamaForCausalLM(config),
            reward_funcs=recorded,
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=len(lines),
                num_generations=group_size,
                max_completion_length=64,
                max_steps=1,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                beta=0.0,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(rows)}),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )
        trainer.train()
    by_ids = {str(row["ids"]): row for row in seen}
    return [{**by_ids[str(line["prompt_ids"] + line["completion_ids"])], "reward": line["reward"]} for line in lines]


def with_sft(file: str) -> Rows:
    """Rows of `datasets`, batched one by one by the collator of TRL's SFTTrainer."""
    import datasets
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache).to_list()
    collate = DataCollatorForLanguageModeling(pad_token_id=0)
    made = []
    for row in rows:
        batch = collate([row])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        sampled = [label != -100 for label in labels]
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        logprobs = [v for v, is_sampled in zip(row["logprobs"], sampled, strict=True) if is_sampled]
        made.append({"ids": ids, "sampled": sampled, "logprobs": logprobs, "reward": row["reward"]})
    return made


def with_verl(file: str) -> Rows:
    """Made into verl's own type, and by that into its tensors."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    made = []
    for line in read_lines(file):
        tensors = AgentLoopOutput(**line).as_dict()
        prompt, mask = tensors["prompts"].tolist(), tensors["response_mask"].bool()
        made.append(
            {
                "ids": prompt + tensors["responses"].tolist(),
                "sampled": [False] * len(prompt) + mask.tolist(),
                "logprobs": tensors["rollout_log_probs"][mask].tolist(),
                "reward": tensors["rm_scores"].tolist()[-1],
            }
        )
    return made


LOADERS = {"atropos": with_atropos, "trl": with_trl, "hf": with_sft, "verl": with_verl}

if __name__ == "__main__":
    found = LOADERS[sys.argv[1]](sys.argv[2])
    print("\n@" + json.dumps(found))
