"""The least that conversations can cost: every turn posts all ids so far and adds those of the reply. No chat template.

`floor_turns.py URL BODY TURNS CONVERSATIONS CONCURRENCY OUT QUESTION_IDS`; BODY is a file with a request as the
recorder sends it, QUESTION_IDS one with a JSON list. Echoes are passed over unread, nothing is checked.
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

URL, BODY, TURNS, CONVERSATIONS, CONCURRENCY, OUT, QUESTION_IDS = sys.argv[1:]
INTS, REALS = pa.list_(pa.int32()), pa.list_(pa.float32())
TYPES = {"full_text": pa.string(), "tokens": INTS, "masked_tokens": INTS, "logprobs": REALS}
DICTIONARY = ["tokens.list.element", "masked_tokens.list.element"]

Values = msgspec.defstruct("Values", [("token_logprobs", list[float])])
Choice = msgspec.defstruct("Choice", [("text", str), ("token_ids", list[int]), ("logprobs", Values)])
Reply = msgspec.defstruct("Reply", [("choices", list[Choice])])
decode = msgspec.json.Decoder(Reply).decode

request = msgspec.json.decode(Path(BODY).read_bytes())
question = msgspec.json.decode(Path(QUESTION_IDS).read_bytes())


async def converse(numbers, session, rows) -> None:
    for _ in numbers:
        text, ids, masked, logprobs = "", [], [], []
        for _ in range(int(TURNS)):
            ids += question
            masked += [-100] * len(question)
            logprobs += [1.0] * len(question)
            body = msgspec.json.encode({**request, "prompt": ids})
            async with session.post(f"{URL}/v1/completions", data=body) as reply:
                (choice,) = decode(await reply.read()).choices
            ids += choice.token_ids
            masked += choice.token_ids
            logprobs += choice.logprobs.token_logprobs
            text += choice.text
        rows.append((text, ids, masked, logprobs))


async def main() -> None:
    numbers, rows = iter(range(int(CONVERSATIONS))), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(converse(numbers, session, rows) for _ in range(int(CONCURRENCY))))
    how = {"compression": "zstd", "use_dictionary": DICTIONARY, "use_byte_stream_split": ["logprobs.list.element"]}
    columns = zip(zip(*rows, strict=True), TYPES.values(), strict=True)
    arrays = [pa.array(values, kind) for values, kind in columns]
    pq.write_table(pa.table(arrays, names=list(TYPES)), OUT, **how)


asyncio.run(main())
