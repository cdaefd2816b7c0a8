"""atroposlib 0.4's ManagedServer on the same work, its nodes to JSON lines.

Arguments: URL PROMPTS N MAX_TOKENS CONCURRENCY OUT TOKENIZER.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer

URL, PROMPTS, N, MAX_TOKENS, CONCURRENCY, OUT, TOKENIZER = sys.argv[1:]


async def main() -> None:
    """One managed context a prompt, as its environments do it."""
    server = VLLMServer(
        APIServerConfig(
            base_url=f"{URL}/v1",
            model_name=TOKENIZER,
            api_key="none",
            num_max_requests_at_once=int(CONCURRENCY),
            server_type="vllm",
            health_check=False,
        )
    )
    with Path(PROMPTS).open(encoding="utf-8") as lines, Path(OUT).open("w", encoding="utf-8") as out:  # noqa: ASYNC230

        async def work() -> None:
            for line in lines:
                managed = ManagedServer(server, tokenizer=server.tokenizer)
                await managed.completion(
                    prompt=json.loads(line)["prompt"], n=int(N), max_tokens=int(MAX_TOKENS), temperature=1.0
                )
                for node in managed.get_state()["nodes"]:
                    out.write(node.model_dump_json() + "\n")

        await asyncio.gather(*(work() for _ in range(int(CONCURRENCY))))


asyncio.run(main())
