"""Two answers from two contexts, and a third context that judges them; each context has rows of its own."""

import asyncio

from managed_cli import APIServerConfig, ServerManager

QUESTION = "Explain in one sentence what a tide is."


async def main() -> None:
    manager = ServerManager(APIServerConfig(server_type="local"))
    async with manager, manager.managed_server() as first, manager.managed_server() as second:
        asked = [{"role": "user", "content": QUESTION}]
        short, long = await asyncio.gather(
            first.chat_completion(messages=asked, max_tokens=16, seed=1),
            second.chat_completion(messages=asked, max_tokens=48, seed=2),
        )
        answers = [response.choices[0].message.content for response in (short, long)]
        verdict = f"Question: {QUESTION}\nA: {answers[0]}\nB: {answers[1]}\nWhich is better, A or B?"
        async with manager.managed_server() as judge:
            judged = await judge.chat_completion(messages=[{"role": "user", "content": verdict}], max_tokens=12, seed=3)
            print("judge:", judged.choices[0].message.content)
            rows = {"A": first, "B": second, "judge": judge}
            for name, context in rows.items():
                node = context.get_state()["nodes"][0]
                print(f"{name}: {len(node.tokens)} tokens, mean logprob {node.mean_logprob():.3f}")


if __name__ == "__main__":
    asyncio.run(main())
