"""Text → ids from pieces that were encoded before: a prompt of 113 tokens in 9 µs, where the library takes 100.

A text is cut before each space that stands between two visible characters, and the library's ids of each piece are
kept. Together they are the library's ids of the text, because every pre-tokenizer that is taken (`PATTERNS`) has this
property: **a match holds a space only as its first character or among further white space, whatever is looked ahead at
is white space, and white space is always matched.** So a match begins at a single space between visible characters,
and neither side is matched otherwise for standing alone. Byte pairs are merged inside a match only; an added token
without spaces lies inside one piece; NFC leaves a space alone and composes nothing with it.

New words in plain letters are asked of the model alone, numbers are put together from runs of digits and signs. Other
words that were never seen cost more than in the library, and a run begins with them: 200 different questions of GSM8K
take 0.85 to 1.05 of its time, the second hundred of them 0.75 to 1.0. Where too little comes again (lines of code, hex,
the most varied prompts) up to 5 ms are lost, once; then the library gets such texts as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

PATTERNS = {
    "GPT-2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "Qwen 2, Qwen 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "GPT-4o, gpt-oss": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "DeepSeek V3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}
"""Whose → the patterns of its `tokenizer.json`, each applied to the matches of those before it (and to what stood
between them)."""

SPACE = "Ġ"
"""A space as tokens spell it."""

BEGINS_WITHOUT, BEGINS_WITH_SPACE = 1, 2
"""What a token of an id is."""

MOST_PIECES = 32_768
"""Kept at most, then all are forgotten: 7 MB with words of English, 35 MB at worst."""

LONGEST_PIECE = 64
"""Characters of a piece that is kept; longer ones seldom come again."""

LONGEST_IDS = 16
"""Ids of a piece that is kept."""

FEWEST_PARTS = 4
"""Between spaces; in a shorter text there is nothing to win."""

LONGEST_TEXT = 262_144
"""Characters; all other threads stand still for 5 ms meanwhile, which the library does not ask of them."""

PIECE_CHARACTERS = 12
"""So much text the library encodes in the time that a call takes beside encoding (3 µs)."""

PIECES_OF_WHOLE_TEXT = 2
"""Learned from a text with so many unknown pieces that it is encoded as a whole."""

KNOWN_GAIN, WORD_COST, PIECE_COST, TEXT_COST = 1, 2, 6, 10
"""Microseconds, about: saved by a part that is known; lost by a word or a piece that is not, and by looking at all."""

FULL_ALLOWANCE = 5000
"""Microseconds that may be lost before known pieces have gained them: once, where no word ever comes again."""

LEAST_ALLOWANCE = 100
"""Microseconds; below it the library gets texts as they come."""

REST_CHARACTERS = 400
"""Of such texts, for each microsecond that may be lost again: the library takes a hundred for them."""

Ids = tuple[int, ...]

_HAS_LETTER = re.compile(r"[A-Za-z]").search
_HAS_NO_LETTER = re.compile(r"[!-@\[-`{-~]+").fullmatch
_RUNS = re.compile(r"[0-9]+|[^0-9]+").findall
"""Of printable ASCII."""


class PieceEncoder:
    """The library's ids of a text without special tokens, by pieces where that is faster; any thread may ask.

    The tables are read and written by single operations of a `dict`, and what another thread forgets meanwhile is only
    learned again.

    Args:
        rust: a `tokenizers.Tokenizer` that `can_be_cut`. A token with a new id that is added to it later is noticed,
            and the library takes over; other changes are not.
        most_pieces: kept at most.
    """

    def __init__(self, rust: Any, *, most_pieces: int = MOST_PIECES) -> None:  # Any: tokenizers publishes no types
        self._rust = rust
        self._most_pieces = most_pieces
        added = rust.get_added_tokens_decoder()
        self._next_added_id = max([rust.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        self._kinds = bytearray(self._next_added_id)  # by id: unknown (0), or one of the two below
        # An added token may lie in a word of letters alone, or in one without any.
        self._knows_words = all(_HAS_LETTER(token.content) and not token.content.isalpha() for token in added.values())
        self._model = rust.model
        self._words: dict[str, Ids] = {}  # key: without the space before it, visible at both ends, so cuts hold
        self._pieces: dict[str, Ids] = {}  # key: as encoded; one without a space began a text and was cut off there
        self._allowance = FULL_ALLOWANCE

    def encode(self, text: str) -> list[int]:
        """Ids of the text, a new list."""
        parts = text.split(" ")
        if len(parts) < FEWEST_PARTS or len(text) > LONGEST_TEXT or self._rests(text) or self._has_new_tokens():
            return self._ids(text)
        found = list(map(self._words.get, parts))
        found[0] = self._pieces.get(parts[0])
        if not all(found) and not self._complete(found, parts, text):
            return self._ids(text)
        return list(chain.from_iterable(found))  # type: ignore[arg-type]  # no None is left

    def _has_new_tokens(self) -> bool:
        return self._rust.id_to_token(self._next_added_id) is not None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _rests(self, text: str) -> bool:
        """Whether pieces have cost more than they gained, and not enough has been encoded since to try again."""
        if self._allowance >= LEAST_ALLOWANCE:
            return False
        self._allowance += 1 + len(text) // REST_CHARACTERS
        return True

    def _complete(self, found: list[Ids | None], parts: Sequence[str], text: str) -> bool:
        """Whether the ids of all pieces are in `found` now; not where it is faster to encode the text as a whole.

        Args:
            found: ids of each part; of a piece of several parts, they stand at the first.
        """
        unknown = [at for at, ids in enumerate(found) if ids is None]
        gain = KNOWN_GAIN * (len(parts) - len(unknown)) - TEXT_COST
        words, pieces, done = self._unknown(unknown, found, parts, text)
        gain -= WORD_COST * len(words) + PIECE_COST * len(pieces)
        if not done:
            words, pieces = words[: self._allowance // WORD_COST], pieces[:PIECES_OF_WHOLE_TEXT]
        self._allowance = min(max(self._allowance + gain, 0), FULL_ALLOWANCE)
        for start, piece in pieces:
            found[start] = self._learned_piece(piece)
        return self._learn_words(found, parts, words) and done

    def _unknown(
        self, unknown: Sequence[int], found: list[Ids | None], parts: Sequence[str], text: str
    ) -> tuple[list[int], list[tuple[int, str]], bool]:
        """What `found` lacks: parts that are pieces with the space before them; other pieces, each with its first part.

        And whether that is all: it stops where these are too many.
        """
        words: list[int] = []
        pieces: list[tuple[int, str]] = []
        every_cut_holds = text.isprintable() and "" not in parts
        room, most_words, end = len(text), self._allowance // WORD_COST, 0
        for at in unknown:
            if at < end:
                continue
            start, end = (at, at + 1) if every_cut_holds else _piece_around(parts, at)
            if 0 < start == end - 1 and parts[at][-1].isprintable():
                if len(words) >= most_words:
                    return words, pieces, False
                words.append(at)
                continue
            piece = " ".join(("", *parts[start:end]) if start else parts[:end])
            found[start:end] = [self._pieces.get(piece), *[()] * (end - start - 1)]
            if found[start] is None:
                pieces.append((start, piece))
                room -= len(piece) + PIECE_CHARACTERS
                if room < 0:
                    return words, pieces, False
        return words, pieces, True

    def _learned_piece(self, piece: str) -> Ids:
        """Ids of a piece of a text, kept unless it is long."""
        ids = tuple(self._ids(piece))
        self._keep(self._pieces, piece, ids)
        return ids

    def _learn_words(self, found: list[Ids | None], parts: Sequence[str], words: Sequence[int]) -> bool:
        """Whether the ids of the parts `words` are in `found` now."""
        if self._knows_words:
            for at in words:
                word = parts[at]
                if _is_plain(word):  # a space and such a word are one match of every pattern
                    found[at] = tuple([token.id for token in self._model.tokenize(SPACE + word)])
                elif _HAS_NO_LETTER(word) and len(runs := _RUNS(word)) > 1:
                    found[at] = self._ids_of_runs(runs)
            for at in words:
                if (new := found[at]) is not None:
                    self._keep(self._words, parts[at], new)
            words = [at for at in words if found[at] is None]
        if not words:
            return True
        # One call for all others: each begins with a token's space.
        ids = self._ids(" ".join(("", *[parts[at] for at in words])))
        kinds = self._kinds
        starts = [at for at, token in enumerate(ids) if (kinds[token] or self._kind(token)) == BEGINS_WITH_SPACE]
        if len(starts) != len(words):  # the vocabulary has no space
            return False
        for at, start, end in zip(words, starts, [*starts[1:], len(ids)], strict=True):
            found[at] = new = tuple(ids[start:end])
            self._keep(self._words, parts[at], new)
        return True

    def _ids_of_runs(self, runs: Sequence[str]) -> Ids:
        """Ids of a space and then runs of digits and of other signs: where they meet, every pattern ends a match."""
        first, *others = runs
        ids = self._words.get(first)
        if ids is None:
            ids = tuple(self._ids(" " + first))
            self._keep(self._words, first, ids)
        rest = [self._pieces.get(run) or self._learned_piece(run) for run in others]
        return (*ids, *chain.from_iterable(rest))

    def _kind(self, token_id: int) -> int:
        begins = self._rust.id_to_token(token_id).startswith(SPACE)
        self._kinds[token_id] = kind = BEGINS_WITH_SPACE if begins else BEGINS_WITHOUT
        return kind

    def _keep(self, table: dict[str, Ids], key: str, ids: Ids) -> None:
        if len(self._words) + len(self._pieces) >= self._most_pieces:
            self._words.clear()
            self._pieces.clear()
        if len(key) <= LONGEST_PIECE and len(ids) <= LONGEST_IDS:
            table[key] = ids


def _is_plain(word: str) -> bool:
    """Whether it is a word in small letters of ASCII, perhaps with a capital before them."""
    return word.isascii() and word.isalpha() and word[1:].islower()


def _piece_around(parts: Sequence[str], at: int) -> tuple[int, int]:
    """The first part of the piece in which part `at` lies, and the first behind it."""
    start, end = at, at + 1
    while start and not _may_cut(parts[start - 1], parts[start]):
        start -= 1
    while end < len(parts) and not _may_cut(parts[end - 1], parts[end]):
        end += 1
    return start, end


def _may_cut(left: str, right: str) -> bool:
    """Whether the space between two parts stands between visible characters: no part holds a space itself."""
    return left != "" and right != "" and (left[-1] + right[0]).isprintable()


def can_be_cut(rust: Any) -> bool:  # Any: tokenizers publishes no types
    """Whether `tokenizer.json` shows that pieces have the ids of the text."""
    return (
        type(rust.model).__name__ == "BPE"
        and rust.model.dropout is None
        and _keeps_spaces(_written(rust.normalizer))
        and _begins_matches_at_spaces(_written(rust.pre_tokenizer))
        and not any(
            " " in token.content or SPACE in token.content or token.lstrip or token.rstrip or token.single_word
            for token in rust.get_added_tokens_decoder().values()
        )
    )


def _written(component: Any) -> Any:  # Any: a part of a `tokenizers.Tokenizer`, as JSON
    return json.loads(component.__getstate__()) if component is not None else None


def _keeps_spaces(normalizer: Any) -> bool:  # Any: JSON
    if normalizer is None or normalizer["type"] == "NFC":
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_spaces, normalizer["normalizers"]))


def _begins_matches_at_spaces(pre_tokenizer: Any) -> bool:  # Any: JSON
    if pre_tokenizer is None:
        return False
    *before, last = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:  # GPT-2's pattern is built in
        return all(step["type"] == "Digits" for step in before)
    if any(step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] for step in before):
        return False
    return tuple(step["pattern"].get("Regex") for step in before) in PATTERNS.values()
