"""Three turns become one row: every answer stays trainable, and no sampled token is tokenised again."""

import asyncio

from managed_cli import LocalServer

QUESTIONS = ["Name a fruit.", "And one of another colour.", "Which of the two is sweeter?"]


async def main() -> None:
    messages: list[dict[str, str]] = []
    async with LocalServer() as server, server.managed_server() as managed:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            response = await managed.chat_completion(messages=messages, max_tokens=24, seed=3)
            messages.append({"role": "assistant", "content": response.choices[0].message.content})
        nodes = managed.get_state()["nodes"]
    print(f"{len(nodes)} row for {len(QUESTIONS)} turns" if len(nodes) == 1 else f"{len(nodes)} rows")
    for turn in nodes[-1].metadata["turns"]:
        print(f"  positions {turn['start']} to {turn['end']} were sampled: {turn['text']!r}")


if __name__ == "__main__":
    asyncio.run(main())
