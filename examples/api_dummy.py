"""Trying out code against an OpenAI endpoint: replies are real, rows hold placeholders and are marked as such.

usage: ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 OPENAI_API_KEY=… api_dummy.py [BASE_URL [MODEL]]
BASE_URL is OpenAI's own unless it is given. Without the opt-in it prints why there is nothing to record.
"""

import asyncio
import os
import sys

from managed_cli import OpenAIServer


async def main(base_url: str | None = None, model: str = "gpt-4.1-mini") -> None:
    server = OpenAIServer(base_url=base_url, model_name=model, api_key=os.environ.get("OPENAI_API_KEY"))
    try:
        async with server, server.managed_server() as managed:
            await managed.chat_completion(messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
            node = managed.get_state()["nodes"][0]
            print(node.full_text)
            print(f"{len(node.tokens)} placeholder tokens, dummy_tokens={node.metadata['dummy_tokens']}")
    except NotImplementedError as reason:
        print(f"not recorded: {reason}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
