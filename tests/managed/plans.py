"""What a random conversation is made of: plans that Hypothesis draws and shrinks, and the samples they stand for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Literal

from hypothesis import strategies as st

from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import Generation
from tests.managed.scripted import generation, server_text

STOP = "\nUser:"
MOST_SAMPLED = 14  # tokens of one random sample

PHRASES = (
    "42",
    "4",
    "The answer is 42.",
    " leading space",
    "trailing newline\n",
    " \n ",
    "don't . stop ,  now",
    "naïve café 漢字",
    "<think>\nhm\n</think>\n\nyes",
    "🦜🏴 flags",
)

Kind = Literal["noise", "specials", "phrase", "spelled", "split", "nothing"]
Ending = Literal["end", "other_end", "length", "stop"]


@dataclasses.dataclass(frozen=True)
class ChoicePlan:
    """One choice; equal plans give equal ids.

    Attributes:
        kind: `noise` uniform over the vocabulary; `specials` half of it special tokens; `phrase` as the tokenizer
            encodes it; `spelled` the same text, character by character; `split` ends inside an emoji; `nothing`.
        server_sends_text: otherwise the text is left to be made from the ids, as with TRL.
    """

    kind: Kind
    ending: Ending
    seed: int
    server_sends_text: bool = True


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """One call.

    Attributes:
        chat: `chat_completion()`, otherwise `completion()`.
        source: `fresh` prompt, `continue` an earlier choice, the same prompt `again`, or write an answer `further`.
        pick: which earlier choice or call.
        words: which user text.
        parts: the user's content is sent as text parts.
    """

    chat: bool
    source: Literal["fresh", "continue", "again", "further"]
    pick: int
    words: int
    choices: tuple[ChoicePlan, ...]
    system: bool = False
    parts: bool = False
    fails: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """One conversation: rounds of calls that are in flight together, and how it ends."""

    history: Literal["template", "verbatim"]
    tree: bool
    rounds: tuple[tuple[CallPlan, ...], ...]
    finish_seed: int
    ending: Literal["none", "reset", "close"]


def plans(*, history: Sequence[str] = ("template", "verbatim")) -> st.SearchStrategy[Plan]:
    """Conversations of one to five rounds."""
    seeds = st.integers(0, 7)  # few, so that identical samples and siblings are common
    choice = st.builds(
        ChoicePlan,
        kind=st.sampled_from(("noise", "noise", "specials", "phrase", "phrase", "spelled", "split", "nothing")),
        ending=st.sampled_from(("end", "end", "other_end", "length", "stop")),
        seed=seeds | st.integers(8, 2**32),
        server_sends_text=st.booleans(),
    )
    call = st.builds(
        CallPlan,
        chat=st.sampled_from((True, True, False)),
        source=st.sampled_from(("continue", "continue", "continue", "fresh", "again", "further")),
        pick=st.integers(0, 9),
        words=st.integers(0, 9),
        choices=st.lists(choice, min_size=1, max_size=3).map(tuple),
        system=st.booleans(),
        parts=st.booleans(),
        fails=st.sampled_from((False,) * 9 + (True,)),
    )
    calls = st.lists(call, min_size=1, max_size=3).map(tuple)
    return st.builds(
        Plan,
        history=st.sampled_from(tuple(history)),
        tree=st.booleans(),
        rounds=st.lists(calls, min_size=1, max_size=5).map(tuple),
        finish_seed=st.integers(0, 99),
        ending=st.sampled_from(("none", "reset", "close")),
    )


class Sampler:
    """Turns choice plans into choices of one tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.end_ids = list(end_ids)
        self.specials = [token for token in tokenizer._tokenizer.all_special_ids if token not in self.end_ids]
        self._encoded: dict[str, list[int]] = {}

    def choice(self, plan: ChoicePlan, seed: int) -> Generation:
        """The choice; `seed` gives the logprobs, so that no two calls share them."""
        body = self._body(plan)
        end_id = stop_reason = None
        finish_reason = "length"
        if plan.ending in ("end", "other_end"):
            end_id = self.end_ids[0] if plan.ending == "end" else self.end_ids[-1]
            body, finish_reason = [*body, end_id], "stop"
        elif plan.ending == "stop":
            body, finish_reason, stop_reason = [*body, *self._encode(STOP + " past the stop")], "stop", STOP
        shown = self.expected_text(body, end_id)
        return generation(
            body,
            text=shown if plan.server_sends_text else None,
            finish_reason=finish_reason,
            end_token_id=end_id,
            stop_reason=stop_reason if plan.server_sends_text else None,
            seed=seed,
        )

    def expected_text(self, ids: Sequence[int], end_id: int | None) -> str:
        """What a person is to read of these ids."""
        text = server_text(self.tokenizer, ids if end_id is None else ids[:-1])
        return text.partition(STOP)[0]

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self.tokenizer.encode_suffix(text)
        return self._encoded[text]

    def _body(self, plan: ChoicePlan) -> list[int]:
        source = random.Random(plan.seed)
        if plan.kind == "nothing":
            return []
        if plan.kind in ("phrase", "spelled"):
            phrase = PHRASES[plan.seed % len(PHRASES)]
            pieces = phrase if plan.kind == "spelled" else [phrase]
            return [token for piece in pieces for token in self._encode(piece)]
        if plan.kind == "split":
            emoji = self._encode("🦜")
            return [*self._encode("so "), *emoji[: source.randint(1, max(1, len(emoji) - 1))]]
        ids = [source.randrange(self.tokenizer.vocab_size) for _ in range(source.randint(1, MOST_SAMPLED))]
        if plan.kind == "specials" and self.specials:
            ids = [source.choice(self.specials) if source.random() < 0.5 else token for token in ids]
        return [token for token in ids if token not in self.end_ids]


def user_words(number: int, words: int, special: str) -> str:
    """A user's text that no other call of the conversation begins with."""
    kinds = (
        "What is 6 times 7?",
        "",
        "4",
        "2",
        f"look: {special} and {special}",
        "🦜🏴 emoji",
        "  spaces  before and after  ",
        "\n\nlines\n",
        "漢字かな交じり",
        "don't . stop",
    )
    return f"({number}) {kinds[words % len(kinds)]}"


def as_content(text: str, *, parts: bool) -> Any:  # Any: a message's content
    """The text as one string, or as text parts that mean the same."""
    if not parts or "\n" not in text:
        return text
    return [{"type": "text", "text": piece} for piece in text.split("\n")]
