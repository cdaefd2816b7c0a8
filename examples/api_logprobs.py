"""Top-5 alternatives at every prompt position, for distillation. vLLM, SGLang and TRL have them; llama.cpp has not.

usage: api_logprobs.py [SERVER_TYPE [BASE_URL]]     (default: the embedded engine, which says that it has none)
"""

import asyncio
import sys

from managed_cli import APIServerConfig, ServerManager


async def main(server_type: str = "local", base_url: str | None = None) -> None:
    manager = ServerManager(APIServerConfig(server_type=server_type, base_url=base_url))
    async with manager, manager.managed_server() as managed:
        try:
            scored = await managed.get_logprobs(prompt="The capital of France is Paris.", top_k=5)
        except NotImplementedError as reason:
            print(f"no prompt logprobs here: {reason}")
            return
        columns = zip(
            scored["prompt_tokens"],
            scored["prompt_topk_token_ids"],
            scored["prompt_topk_logprobs"],
            strict=True,
        )
        for position, (token, ids, logprobs) in enumerate(columns):
            best = ", ".join(f"{other} {logprob:.2f}" for other, logprob in zip(ids, logprobs, strict=True))
            print(f"{position:3} token {token:6}  alternatives: {best or '(nothing precedes it)'}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
