"""A table of bytes gives the library's own text, or is not used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from managed_cli.token_table import byte_of_character, token_table
from tests.servers.tokenizer import shared_tokenizer_directory

SEQUENCES = 300


@pytest.fixture(scope="module")
def library() -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(Path(shared_tokenizer_directory(), "tokenizer.json")))


@pytest.mark.parametrize("skip", [False, True])
def test_the_text_of_any_ids_is_the_librarys(library: Any, skip: bool) -> None:
    table = token_table(library)
    assert table is not None
    chance = random.Random(1)
    for _ in range(SEQUENCES):
        ids = [chance.randrange(len(library)) for _ in range(chance.randrange(60))]
        expected = library.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert table.text(ids, skip_special_tokens=skip) == expected


def test_ids_that_the_vocabulary_lacks_have_no_text(library: Any) -> None:
    table = token_table(library)
    assert table is not None
    beyond = len(library) + 7
    assert table.text([5, beyond, 6]) == table.text([5, 6])
    assert table.text([beyond]) == table.text([]) == ""


def test_every_byte_has_a_character_of_its_own() -> None:
    assert sorted(byte_of_character().values()) == list(range(256))


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.WordPiece()])
def test_a_vocabulary_that_is_not_of_bytes_has_no_table(decoder: Any) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if decoder is not None:
        made.decoder = decoder
    assert token_table(PreTrainedTokenizerFast(tokenizer_object=made)) is None


class Contrary(PreTrainedTokenizerFast):
    """A tokenizer whose class has a text of its own."""

    def decode(self, *arguments: Any, **settings: Any) -> str:
        return str(super().decode(*arguments, **settings)).upper()


def test_a_tokenizer_with_a_text_of_its_own_has_no_table() -> None:
    own = Contrary(tokenizer_file=str(Path(shared_tokenizer_directory(), "tokenizer.json")))
    assert token_table(own) is None
