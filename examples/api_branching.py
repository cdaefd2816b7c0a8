"""A tree: two first sentences, each continued twice. Every node is kept, with its parent."""

import asyncio

from managed_cli import LocalServer

PROMPT = "Once upon a time there was a lighthouse"


async def main() -> None:
    async with LocalServer() as server, server.managed_server(track_tree=True) as managed:
        first = await managed.completion(prompt=PROMPT, n=2, max_tokens=10, seed=11)
        for choice in first.choices:
            await managed.completion(prompt=PROMPT + choice.text, n=2, max_tokens=10, seed=12 + choice.index)
        for node in managed.nodes():
            facts = node.metadata
            indent = "" if facts["parent_id"] is None else "    "
            print(f"{indent}{facts['node_id']} (parent {facts['parent_id']}): {facts['turns'][-1]['text']!r}")
        print(f"{len(managed.get_state()['sequences'])} different texts")


if __name__ == "__main__":
    asyncio.run(main())
