"""Small GGUF files, written by llama.cpp's own package: a vocabulary, or a whole model of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

CONTEXT_LENGTH, EMBEDDING, HEADS, FEED_FORWARD = 256, 32, 2, 64

SENTENCE_PIECES: list[tuple[str, TokenType]] = [
    ("<unk>", TokenType.UNKNOWN),
    ("<s>", TokenType.CONTROL),
    ("</s>", TokenType.CONTROL),
    *((f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)),
    *((letter, TokenType.NORMAL) for letter in "▁abcdefghijklmnopqrstuvwxyzé日"),
    ("▁hello", TokenType.NORMAL),
    ("▁▁", TokenType.USER_DEFINED),
    ("<tool>", TokenType.USER_DEFINED),
    ("gone", TokenType.UNUSED),
]
"""Every kind of token that a SentencePiece vocabulary has."""


def write_vocabulary(
    path: Path, model: str, tokens: Sequence[str | bytes], kinds: Sequence[TokenType] | None = None
) -> Path:
    """A file with entries of every type, then the vocabulary, then merges; no tensors."""
    writer = GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"test.uint{bits}", 7)
        getattr(writer, f"add_int{bits}")(f"test.int{bits}", -7)
    writer.add_float32("test.float32", 0.5)
    writer.add_float64("test.float64", 0.5)
    writer.add_bool("test.bool", True)
    writer.add_array("test.strings", ["one", "", "zwei"])
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))  # type: ignore[arg-type]  # each may be text or bytes
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    if kinds is not None:
        writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_sentence_piece_model(path: Path) -> Path:
    """A Llama of one layer and random weights, which samples every token of `SENTENCE_PIECES` about as often."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in SENTENCE_PIECES])
    writer.add_token_scores([-float(index) for index in range(len(SENTENCE_PIECES))])
    writer.add_token_types([kind for _, kind in SENTENCE_PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    source = np.random.default_rng(0)
    square, up, down = (EMBEDDING, EMBEDDING), (FEED_FORWARD, EMBEDDING), (EMBEDDING, FEED_FORWARD)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(SENTENCE_PIECES), EMBEDDING),
        "output": (len(SENTENCE_PIECES), EMBEDDING),
        "output_norm": (EMBEDDING,),
        "blk.0.attn_norm": (EMBEDDING,),
        "blk.0.ffn_norm": (EMBEDDING,),
        **{f"blk.0.attn_{part}": square for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": up,
        "blk.0.ffn_up": up,
        "blk.0.ffn_down": down,
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", source.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
