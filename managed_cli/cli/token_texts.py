"""The text of each token of a row, and of its sampled parts, where they can be known without guessing.

No `transformers` here: `tokenizer.json` is read by `tokenizers` alone, and the vocabulary of a GGUF file by
`gguf_texts`. Either counts only where it lies on this machine and gives back the text that was recorded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from managed_cli.cli.gguf_texts import find_gguf_texts, gguf_files

UNFINISHED_CHARACTER = "\ufffd"
"""What `decode` writes for bytes that are no whole UTF-8 character."""


def find_token_texts(
    run_facts: Mapping[str, Any],  # Any: free-form JSON values
    tokens: Sequence[int],
    full_text: str,
) -> list[str] | None:
    """One text per token, `""` where a character is completed by a later token; joined they are `full_text`.

    None where no tokenizer of the run is at hand, or the one that is does not give `full_text` back.
    """
    for texts in _possible_texts(run_facts, tokens):
        joined = "".join(texts)
        if full_text == joined:
            return texts
        tail = full_text.removeprefix(joined)
        if texts and full_text.startswith(joined) and not tail.strip(UNFINISHED_CHARACTER):
            return [*texts[:-1], texts[-1] + tail]
    return None


def _possible_texts(run_facts: Mapping[str, Any], tokens: Sequence[int]) -> Iterator[list[str]]:  # Any: as above
    """One text per token by each tokenizer of the run that lies on this machine."""
    for path in _tokenizer_files(run_facts):
        if (texts := _decoded_one_by_one(path, tokens)) is not None:
            yield texts
    for path in gguf_files(run_facts):
        if (texts := find_gguf_texts(path, tokens)) is not None:
            yield texts


def find_sampled_spans(turns: object, full_text: str, token_count: int) -> list[tuple[int, int]] | None:
    """Where the texts of the sampled turns stand in `full_text`, as (start, end) in characters, in order.

    None where a text is not found, or stands in more than one place and so could be a prompt's.
    """
    if not isinstance(turns, list) or not turns:
        return None
    spans: list[tuple[int, int]] = []
    bound = len(full_text)
    for turn in reversed(turns):
        text = turn.get("text") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            return None
        start = full_text.rfind(text, 0, bound) if text else bound
        # The last turn ends the row, so its text is the last of its kind; any other must be the only one.
        ends_row = turn is turns[-1] and turn.get("end") == token_count
        if start < 0 or (text and not ends_row and full_text.find(text, 0, bound) != start):
            return None
        if text:
            spans.append((start, start + len(text)))
            bound = start
    return spans[::-1]


def _tokenizer_files(run_facts: Mapping[str, Any]) -> Iterator[Path]:  # Any: free-form JSON values
    """`tokenizer.json` of each tokenizer or model that the run names, where it lies on this machine."""
    for key in ("tokenizer", "tokenizer_name", "model"):
        value = run_facts.get(key)
        names = value.values() if isinstance(value, dict) else [value]
        for name in names:
            if isinstance(name, str) and name:
                yield from (path for path in _places_of(name) if path.is_file())


def _places_of(name: str) -> Iterator[Path]:
    """Where the `tokenizer.json` of a directory or hub name would lie."""
    yield Path(name) / "tokenizer.json"
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # not in the cache, or a name that no file can have
        return
    yield cached / "snapshots" / revision / "tokenizer.json"


@functools.lru_cache(maxsize=2)  # a report asks for the tokens of every row
def _tokenizer(path: Path) -> Any:  # Any: tokenizers publishes no types
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _decoded_one_by_one(path: Path, tokens: Sequence[int]) -> list[str] | None:
    """The text that each token adds to those before it; None where the file cannot be used."""
    try:
        from tokenizers.decoders import DecodeStream
    except ImportError:
        return None
    try:
        tokenizer = _tokenizer(path)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in tokens]
    except Exception as error:  # tokenizers raises nothing narrower for a file or an id it cannot use
        if type(error) not in (Exception, OverflowError, TypeError):
            raise
        return None
