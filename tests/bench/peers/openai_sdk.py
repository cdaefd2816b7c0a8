"""The openai SDK on the same work, its choices to JSON lines.

Arguments: URL PROMPTS N MAX_TOKENS CONCURRENCY OUT TOKENIZER, the last unused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import openai

URL, PROMPTS, N, MAX_TOKENS, CONCURRENCY, OUT, _ = sys.argv[1:]


async def main() -> None:
    """Text prompts, with logprobs and with vLLM's token ids, which the SDK keeps as extra fields."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    with Path(PROMPTS).open(encoding="utf-8") as lines, Path(OUT).open("w", encoding="utf-8") as out:  # noqa: ASYNC230

        async def work() -> None:
            for line in lines:
                prompt = json.loads(line)["prompt"]
                reply = await client.completions.create(
                    model="smollm2",
                    prompt=prompt,
                    n=int(N),
                    max_tokens=int(MAX_TOKENS),
                    logprobs=0,
                    extra_body={"return_token_ids": True},
                )
                for choice in reply.choices:
                    row = {
                        "prompt": prompt,
                        "text": choice.text,
                        "tokens": choice.token_ids,
                        "logprobs": choice.logprobs.token_logprobs,
                        "finish_reason": choice.finish_reason,
                    }
                    out.write(json.dumps(row) + "\n")

        await asyncio.gather(*(work() for _ in range(int(CONCURRENCY))))


asyncio.run(main())
