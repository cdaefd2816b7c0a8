"""The least that recording can cost: post, typed decode, the same columns to Parquet. No tracking, checks or retries.

`floor.py KIND URL BODY SAMPLES CONCURRENCY OUT TOKENIZER`; BODY is a file with a request as the recorder sends it.
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

KIND, URL, BODY, SAMPLES, CONCURRENCY, OUT, TOKENIZER = sys.argv[1:]
PATH = {"vllm": "/v1/completions", "sglang": "/generate", "trl": "/generate/"}[KIND]
INT, TEXT, INTS, REALS = pa.int32(), pa.string(), pa.list_(pa.int32()), pa.list_(pa.float32())
TYPES = [TEXT, INT, TEXT, TEXT, TEXT, INTS, INTS, REALS, INT, INT, pa.float32(), TEXT, TEXT]
NAMES = "sample_id choice_index node_id parent_id full_text tokens masked_tokens logprobs prompt_length"
NAMES += " completion_length mean_logprob finish_reason metadata"
SCHEMA = pa.schema(list(zip(NAMES.split(), TYPES, strict=True)))
DICTIONARY = ["sample_id", "tokens.list.element", "masked_tokens.list.element", "finish_reason"]
ROWS_PER_WRITE = 2048

Floats, Ids = list[float], list[int]
Values = msgspec.defstruct("Values", [("token_logprobs", Floats)])
Choice = msgspec.defstruct("Choice", [("text", str), ("finish_reason", str), ("token_ids", Ids), ("logprobs", Values)])
Vllm = msgspec.defstruct("Vllm", [("choices", list[Choice])])
Reason = msgspec.defstruct("Reason", [("type", str)])
Meta = msgspec.defstruct("Meta", [("finish_reason", Reason), ("output_token_logprobs", list[tuple[float, int, None]])])
Sglang = msgspec.defstruct("Sglang", [("text", str), ("output_ids", Ids), ("meta_info", Meta)])
Trl = msgspec.defstruct("Trl", [("completion_ids", list[Ids]), ("logprobs", list[list[Floats]])])
REPLY = {"vllm": Vllm, "sglang": Sglang | list[Sglang], "trl": Trl}[KIND]
decode = msgspec.json.Decoder(REPLY).decode

tokenizer = tokenizers.Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
request = msgspec.json.decode(Path(BODY).read_bytes())
prompt = request.get("input_ids") or request.get("prompt") or request["prompts"][0]
prompt_text, masked, ones = (
    tokenizer.decode(prompt, skip_special_tokens=False),
    [-100] * len(prompt),
    [1.0] * len(prompt),
)
facts = {key: value for key, value in request.items() if key not in ("input_ids", "prompt", "prompts")}


def parts_of(body: bytes) -> list[tuple[Ids, Floats, str, str]]:
    reply = decode(body)
    if KIND == "vllm":
        return [(c.token_ids, c.logprobs.token_logprobs, c.text, c.finish_reason) for c in reply.choices]
    if KIND == "trl":
        both = zip(reply.completion_ids, reply.logprobs, strict=True)
        return [(ids, [value for (value,) in values], tokenizer.decode(ids), "stop") for ids, values in both]
    metas = [(c, c.meta_info) for c in (reply if isinstance(reply, list) else [reply])]
    return [(c.output_ids, [v for v, _, _ in m.output_token_logprobs], c.text, m.finish_reason.type) for c, m in metas]


async def work(numbers, session, rows, writer) -> None:
    for number in numbers:
        async with session.post(URL + PATH, data=msgspec.json.encode(request)) as reply:
            parts = parts_of(await reply.read())
        for index, (ids, logprobs, text, reason) in enumerate(parts):
            meta = msgspec.json.encode({**facts, "sample_id": number, "turns": [{"text": text}]}).decode()
            arrays = (prompt + ids, masked + ids, ones + logprobs, len(prompt), len(ids), sum(logprobs) / len(ids))
            rows.append((f"s-{number}", index, f"0.{index}", None, prompt_text + text, *arrays, reason, meta))
        if len(rows) >= ROWS_PER_WRITE:
            write(rows, writer)


def write(rows, writer) -> None:
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), TYPES, strict=True)]
    writer.write_table(pa.table(columns, schema=SCHEMA))
    rows.clear()


async def main() -> None:
    numbers, rows, split = iter(range(int(SAMPLES))), [], ["logprobs.list.element"]
    how = {"compression": "zstd", "use_dictionary": DICTIONARY, "use_byte_stream_split": split}
    with pq.ParquetWriter(OUT, SCHEMA, **how) as writer:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(work(numbers, session, rows, writer) for _ in range(int(CONCURRENCY))))
        if rows:
            write(rows, writer)


asyncio.run(main())
