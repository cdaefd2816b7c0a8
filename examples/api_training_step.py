"""Recorded rows handed on to a training step: ids, labels and old logprobs, padded into one batch."""

import asyncio

import numpy as np

from managed_cli import LocalServer, SequenceNode

PAD_ID = 0


def batch_of(nodes: list[SequenceNode]) -> dict[str, np.ndarray]:
    """Arrays [rows, longest]: what a policy-gradient loss reads. Labels are -100 wherever nothing was sampled."""
    longest = max(len(node.tokens) for node in nodes)
    batch = {
        "input_ids": np.full((len(nodes), longest), PAD_ID, dtype=np.int64),
        "labels": np.full((len(nodes), longest), -100, dtype=np.int64),
        "old_logprobs": np.zeros((len(nodes), longest), dtype=np.float32),
    }
    for row, node in enumerate(nodes):
        length = len(node.tokens)
        sampled = np.array(node.masked_tokens) != -100
        batch["input_ids"][row, :length] = node.tokens
        batch["labels"][row, :length] = node.masked_tokens
        batch["old_logprobs"][row, :length] = np.where(sampled, node.logprobs, 0.0)
    return batch


async def main() -> None:
    async with LocalServer() as server, server.managed_server() as managed:
        await managed.completion(prompt="2 + 2 =", n=4, max_tokens=8, seed=5)
        nodes = managed.get_state()["nodes"]
    batch = batch_of(nodes)
    rewards = np.array(["4" in node.metadata["turns"][-1]["text"] for node in nodes], dtype=np.float32)
    advantages = rewards - rewards.mean()
    sampled = batch["labels"] != -100
    print("batch", batch["input_ids"].shape, "of which sampled", int(sampled.sum()))
    print("rewards", rewards.tolist(), "advantages", advantages.round(2).tolist())


if __name__ == "__main__":
    asyncio.run(main())
