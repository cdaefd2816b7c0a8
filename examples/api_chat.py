"""A chat: the template is rendered here, sent as token ids, and the answer's ids come back."""

import asyncio

from managed_cli import LocalServer


async def main() -> None:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    async with LocalServer() as server, server.managed_server() as managed:
        response = await managed.chat_completion(messages=messages, max_tokens=40, temperature=0.7, seed=1)
        print(response.choices[0].message.content)
        print(f"{response.usage.prompt_tokens} prompt tokens, {response.usage.completion_tokens} sampled")
        print(managed.get_state()["nodes"][0].full_text)


if __name__ == "__main__":
    asyncio.run(main())
