"""Pieces give the ids of the whole text, for every tokenizer that is cut; the others are not cut."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from managed_cli import piece_encoder
from managed_cli.piece_encoder import PATTERNS, PieceEncoder, can_be_cut
from managed_cli.quick_encoder import quick_encoder
from managed_cli.tokenizers import PROBE_TEXTS
from tests.servers.tokenizer import shared_tokenizer_directory
from tests.tokenizers import catalog

CUT = ("smollm2", "qwen3", "llama3_1", "gptoss", "deepseek_v3")
TEXT = "What is 17 * 23? Think about it, and answer in 1.7*2 words or one word."

SEPARATORS = (
    *" " * 12,
    "", "", "", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ",
    "\u00a0", "\u3000", "\u2028", "\x0b", "\x1c", "\x85",
)  # fmt: skip
"""Single spaces most of all, and other white space."""

FRAGMENTS = (
    "a", "I", "is", "The", "NASA", "reading", "Twelve", "antidisestablishment", "qzx",
    "$18,652.", "(3-4)=", "2025-11-30", "1.2.3.4:80", "00012345", "7", "--3", "5..", "#1", "%2f",
    "aB", "iPhone", "straße", "don't", "'s", "'LL", "'", "’", "“so”", "é", "e\u0301", "\u0301",
    "\u0308", ">\u0338", "\u037e", "Ġ", "ĠĠ", "Ω", "ſ", "Привет", "漢字", "と", "、", "각", "😀", "👩‍🔬", "½", "²", "٣",
    "1", "12", "345", "6789", "0.5", "1,652", ".", ",", "!", "?!", "...", ":", "--", "==", "/", "//", "$", "(", ")",
    "x:\n    return", "_", "#", "\\", "\"", "\x00", "\x01", "\x7f", "\u0378", "\u200b", "\ufeff", "a/b?c=d", "0f" * 40,
)  # fmt: skip
"""What patterns treat in ways of their own."""


def library_ids(rust: Any, text: str) -> list[int]:
    ids: list[int] = rust.encode(text, add_special_tokens=False).ids
    return ids


def small() -> Any:  # Any: tokenizers publishes no types
    """GPT-2's pattern over a small vocabulary, to be changed by a test."""
    return Tokenizer.from_file(str(shared_tokenizer_directory() / "tokenizer.json"))


def taught(*texts: str, rust: Any = None) -> PieceEncoder:
    encoder = PieceEncoder(small() if rust is None else rust)
    for text in texts:
        encoder.encode(text)
    return encoder


class Silent(PieceEncoder):
    """Fails where the library would be asked."""

    silent = False

    def _ids(self, text: str) -> list[int]:
        assert not self.silent, text
        return super()._ids(text)


@pytest.mark.parametrize("most_pieces", [30, piece_encoder.MOST_PIECES])
@pytest.mark.parametrize("name", CUT)
def test_the_ids_of_the_pieces_are_those_of_the_text(name: str, most_pieces: int) -> None:
    tokenizer = catalog.loaded(name)._tokenizer
    rust = tokenizer.backend_tokenizer
    assert can_be_cut(rust)
    encoder = PieceEncoder(rust, most_pieces=most_pieces)
    specials = sorted(token.content for token in rust.get_added_tokens_decoder().values())[:20]
    fragment = st.sampled_from([*FRAGMENTS, *specials, *(special[1:] for special in specials)])
    words = st.lists(st.tuples(fragment, st.sampled_from(SEPARATORS)), max_size=30)

    seen: set[str] = set()

    @settings(max_examples=400, deadline=None)
    @given(words.map(lambda pairs: "".join(chain.from_iterable(pairs))))
    def same(text: str) -> None:
        encoder._allowance = piece_encoder.FULL_ALLOWANCE  # texts this odd would soon be left to the library
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == ids
        assert encoder.encode(text) == ids
        assert len(encoder._words) + len(encoder._pieces) <= most_pieces
        seen.update(encoder._words)

    same()
    assert len(seen) > 20  # else nothing was compared


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_sentencepiece_is_not_cut(name: str) -> None:
    assert not can_be_cut(catalog.loaded(name)._tokenizer.backend_tokenizer)


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), last])


(LLAMA,) = PATTERNS["Llama 3"]


def set_pre_tokenizer(made: Any) -> Callable[[Any], None]:
    return lambda rust: setattr(rust, "pre_tokenizer", made)


def set_normalizer(made: Any) -> Callable[[Any], None]:
    return lambda rust: setattr(rust, "normalizer", made)


def add(token: AddedToken) -> Callable[[Any], None]:
    def change(rust: Any) -> None:
        rust.add_tokens([token])

    return change


def drop_merges(rust: Any) -> None:
    model = rust.model
    model.dropout = 1.0  # all of them, so that both ways of encoding agree in this test
    rust.model = model


@pytest.mark.parametrize(
    "change",
    [
        set_pre_tokenizer(None),
        set_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        set_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        set_pre_tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)])),
        set_pre_tokenizer(split(r"\S+ \S+|\s+")),
        set_pre_tokenizer(split(LLAMA.replace(r"[\r\n]*", r"\s*"))),
        set_pre_tokenizer(split(LLAMA, "merged_with_next")),
        set_pre_tokenizer(split(LLAMA, invert=True)),
        set_normalizer(normalizers.NFKC()),
        set_normalizer(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a b", "ab")])),
        add(AddedToken("in one", normalized=False)),
        add(AddedToken("Ġ", normalized=False)),
        add(AddedToken("about", normalized=False, lstrip=True)),
        add(AddedToken("about", normalized=False, rstrip=True)),
        add(AddedToken("bout", normalized=False, single_word=True)),
        drop_merges,
    ],
)
def test_what_is_not_known_to_begin_a_match_at_each_space_is_not_cut(change: Callable[[Any], None]) -> None:
    rust = small()
    assert can_be_cut(rust)
    change(rust)
    assert not can_be_cut(rust)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust)
    encode = quick_encoder(tokenizer, PROBE_TEXTS)
    for _ in range(2):
        assert encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.mark.parametrize(
    "change",
    [
        set_pre_tokenizer(split(LLAMA)),
        set_pre_tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])),
        set_normalizer(normalizers.Sequence([normalizers.NFC()])),
        add(AddedToken("bout", normalized=True)),
        add(AddedToken("T")),
        add(AddedToken("h")),
        add(AddedToken(".7")),
    ],
)
def test_what_is_known_to_is_cut(change: Callable[[Any], None]) -> None:
    rust = small()
    change(rust)
    assert can_be_cut(rust)
    encoder = taught(TEXT, rust=rust)
    assert encoder._words
    assert encoder.encode(TEXT) == library_ids(rust, TEXT)


def test_new_words_and_numbers_of_known_runs_ask_only_the_model() -> None:
    encoder = Silent(small())
    encoder.encode("A few of them here")
    encoder.silent = True
    text = "A number of them Twice"
    assert encoder.encode(text) == library_ids(small(), text)
    encoder.silent = False
    encoder.encode("A few of them, 1,2.3 more")
    encoder.silent = True
    text = "A number of 1.2,3 Twice 1,3"
    assert encoder.encode(text) == library_ids(small(), text)


def test_a_known_text_asks_the_library_nothing() -> None:
    encoder = Silent(small())
    ids = encoder.encode(TEXT)
    encoder.silent = True
    assert encoder.encode(TEXT) == ids == library_ids(small(), TEXT)
    assert encoder.encode("What about 23? Think is it, in one") == library_ids(
        small(), "What about 23? Think is it, in one"
    )


@pytest.mark.parametrize("name", CUT)
def test_a_word_known_from_the_end_of_a_text_is_not_cut_off_behind_its_white_space(name: str) -> None:
    rust = catalog.loaded(name)._tokenizer.backend_tokenizer
    special = rust.id_to_token(min(rust.get_added_tokens_decoder()))
    for white in "\n\t":  # before a special token, one of them makes one token with a space
        encoder = taught(f"one two three four{white}", f"one two {special} three", rust=rust)
        text = f"one two four{white} {special} three"
        assert encoder.encode(text) == library_ids(rust, text)


def test_a_vocabulary_that_has_no_space_is_left_to_the_library() -> None:
    rust = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert can_be_cut(rust)
    assert taught("a b a b a", rust=rust).encode("a b a b a") == [0, 1, 0, 1, 0]


def test_a_caller_may_change_the_ids_it_got() -> None:
    encoder = taught(TEXT)
    encoder.encode(TEXT).clear()
    assert encoder.encode(TEXT) == library_ids(small(), TEXT)


@pytest.mark.parametrize("name", ["small", "smollm2", "deepseek_v3"])
def test_a_token_that_is_added_later_is_found_in_known_pieces(name: str) -> None:
    if name == "small":
        rust = small()
    else:
        rust = Tokenizer.from_str(catalog.loaded(name)._tokenizer.backend_tokenizer.to_str())
    encoder = taught(TEXT, rust=rust)
    before = encoder.encode(TEXT)
    rust.add_tokens(["k about"])
    assert encoder.encode(TEXT) == library_ids(rust, TEXT) != before


def test_a_piece_that_is_long_or_has_many_ids_is_not_kept() -> None:
    ends, emoji = "<|im_end|>" * 8, "👩‍🔬" * 10  # 80 characters, 8 ids; 30 characters, 110 ids
    text = f"{TEXT} {ends} and {emoji} are in one word {TEXT}"
    encoder = taught(text)
    assert encoder.encode(text) == library_ids(small(), text)
    assert encoder._words
    assert not {ends, emoji} & encoder._words.keys()


def test_words_that_never_come_again_are_soon_left_to_the_library() -> None:
    encoder = PieceEncoder(small())
    for start in range(0, 20_000, 50):
        encoder.encode(" ".join(f"w{number:x}z" for number in range(start, start + 50)))
    assert len(encoder._words) < piece_encoder.FULL_ALLOWANCE // piece_encoder.WORD_COST + 1000


def test_words_that_come_again_after_all_are_learned_after_all() -> None:
    encoder = Silent(small())
    encoder._allowance = 0
    for _ in range(1000):
        encoder.encode(TEXT)
    encoder.silent = True
    assert encoder.encode(TEXT) == library_ids(small(), TEXT)


def test_threads_that_share_the_tables_get_the_ids_of_their_own_texts() -> None:
    rust = small()
    encoder = PieceEncoder(rust, most_pieces=20)
    words = TEXT.split(" ")
    texts = [" ".join(words[at:] + words[: at + 3]) for at in range(len(words))] * 100
    expected = [library_ids(rust, text) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoder.encode, texts)) == expected
