"""One text prompt, four completions, four aligned rows."""

import asyncio

from managed_cli import LocalServer


async def main() -> None:
    async with LocalServer() as server, server.managed_server() as managed:
        response = await managed.completion(prompt="The capital of France is", n=4, max_tokens=12, seed=7)
        for choice, node in zip(response.choices, managed.get_state()["nodes"], strict=True):
            sampled = [token for token in node.masked_tokens if token != -100]
            print(f"{choice.index}: {choice.text!r} ({choice.finish_reason})")
            print(f"   {len(node.tokens)} tokens, {len(sampled)} of them sampled, logprobs {node.logprobs[-3:]}")


if __name__ == "__main__":
    asyncio.run(main())
