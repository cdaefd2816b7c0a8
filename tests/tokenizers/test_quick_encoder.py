"""Encoding by the Rust library gives the ids of the library above it, whatever else happens to the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.quick_encoder import quick_encoder
from managed_cli.tokenizers import PROBE_TEXTS
from tests.servers.tokenizer import shared_tokenizer_directory

TEXT = "What is 17 * 23? Answer <|im_end|> in one word."


@pytest.fixture
def tokenizer() -> Any:  # Any: transformers publishes no complete types
    return transformers.AutoTokenizer.from_pretrained(shared_tokenizer_directory())


def test_ids_are_those_of_the_library(tokenizer: Any) -> None:
    encode = quick_encoder(tokenizer, PROBE_TEXTS)
    assert encode.__name__ == "quick"  # type: ignore[attr-defined]  # else nothing is compared below

    @settings(max_examples=200, deadline=None)
    @given(st.text(), st.booleans())
    def same(text: str, specials: bool) -> None:
        text = text.encode("utf-8", "replace").decode()
        assert encode(text, add_special_tokens=specials) == tokenizer.encode(text, add_special_tokens=specials)

    same()


def test_truncation_and_padding_that_others_left_on_a_shared_tokenizer_do_not_touch_a_prompt(tokenizer: Any) -> None:
    encode = quick_encoder(tokenizer, PROBE_TEXTS)
    whole = encode(TEXT, add_special_tokens=False)
    tokenizer(TEXT, truncation=True, max_length=3)
    assert encode(TEXT, add_special_tokens=False) == whole
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer([TEXT, "x"], padding=True)
    assert encode(TEXT, add_special_tokens=False) == whole
    tokenizer(TEXT, split_special_tokens=True)
    assert encode(TEXT, add_special_tokens=False) == whole


def test_a_tokenizer_whose_library_adds_something_is_asked_itself() -> None:
    class Shouting:
        def __init__(self, tokenizer: Any) -> None:
            self.backend_tokenizer = tokenizer.backend_tokenizer
            self._tokenizer = tokenizer

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            ids: list[int] = self._tokenizer.encode(text.upper(), add_special_tokens=add_special_tokens)
            return ids

    shouting = Shouting(transformers.AutoTokenizer.from_pretrained(Path(shared_tokenizer_directory())))
    assert quick_encoder(shouting, PROBE_TEXTS)("no", add_special_tokens=False) == shouting.encode(
        "no", add_special_tokens=False
    )
