"""What the files beside a tokenizer say: a directory's, or a hub model's that is in the cache. Never downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw_tokenizer(name: str) -> Any:  # Any: tokenizers publishes no complete types
    """`tokenizer.json` as it is written, or None without one."""
    path = _file_of(name, "tokenizer.json")
    if path is None:
        return None
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path))


def generation_end_tokens(name: str) -> frozenset[int]:
    """The end tokens that the model's `generation_config.json` names: servers stop at them all."""
    value = _json_of(name, "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(token for token in ids if isinstance(token, int))


def asks_for_bos(name: str) -> bool:
    """Whether `tokenizer_config.json` wants BOS before a text; not every class of transformers 5 obeys it."""
    return _json_of(name, "tokenizer_config.json").get("add_bos_token") is True


def _json_of(name: str, file: str) -> dict[str, Any]:  # Any: JSON values
    path = _file_of(name, file)
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _file_of(name: str, file: str) -> Path | None:
    local = Path(name) / file
    if local.is_file():
        return local
    if Path(name).exists() or name.startswith(("/", ".")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file)
    return Path(cached) if isinstance(cached, str) else None
