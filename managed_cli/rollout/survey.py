"""What an input holds, for a person: kinds of lines, their fields, bad lines, and how many tokens the prompts have.

Samples are seen one at a time and forgotten; what is kept grows with the number of different lengths, not of samples.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from managed_cli.errors import InputError, ServerRefused
from managed_cli.rollout.chats import content_text
from managed_cli.rollout.samples import BadLine, Task
from managed_cli.types import SamplingParams, Tokenizer

MAX_BAD_LINES_KEPT = 1000
"""Bad lines listed for a script; all are counted."""

MAX_OVER_BUDGET_KEPT = 10
"""Prompts without room that are named: enough to look at, the rest is counted."""

MAX_FIELD_NAMES = 100
"""Different fields counted for a kind: names that hold data, such as ids, would fill the memory."""

MAX_EXAMPLE_CHARACTERS = 1000
"""How much of an example prompt is kept: more than a line of any terminal shows."""


@dataclasses.dataclass(slots=True)
class KindSummary:
    """All samples of one dialect.

    Attributes:
        first: where the first stands; `example` is the beginning of what it sends.
        fields: name of a kept field → samples that have it.
    """

    first: str
    example: str
    count: int = 0
    with_sampling: int = 0
    with_tools: int = 0
    continued: int = 0
    fields: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, task: Task) -> None:
        """One more sample of this kind."""
        self.count += 1
        self.with_sampling += bool(task.overrides)
        self.with_tools += task.tools is not None
        self.continued += task.continue_final
        for name in task.fields:
            if name in self.fields or len(self.fields) < MAX_FIELD_NAMES:
                self.fields[name] += 1


@dataclasses.dataclass(frozen=True, slots=True)
class OverBudget:
    """A prompt that leaves no room for a single sampled token."""

    sample_id: str
    source: str
    length: int


class Lengths:
    """Tokens per prompt, of conversations in turns their first one.

    Args:
        budget: most prompt + completion tokens; None counts nothing as too long.
        sampling: the run's settings, whose max_tokens an answer may have; None where there is no run.

    Attributes:
        shortened: prompts that fit, but with less room behind them than max_tokens.
    """

    def __init__(self, budget: int | None, sampling: SamplingParams | None = None) -> None:
        self.budget = budget
        self.sampling = sampling
        self.shortened = 0
        self.samples = 0
        self.first_turns = 0
        self.over_budget = 0
        self.first_over_budget: list[OverBudget] = []
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, task: Task, length: int) -> None:
        """One more prompt."""
        self.samples += 1
        self.first_turns += task.turns is not None
        self._counts[length] += 1
        if self.budget is not None and length >= self.budget:
            self.over_budget += 1
            if len(self.first_over_budget) < MAX_OVER_BUDGET_KEPT:
                self.first_over_budget.append(OverBudget(task.sample_id, task.source, length))
        elif self.budget is not None and self.sampling is not None:
            self.shortened += length + task.sampling(self.sampling).max_tokens > self.budget

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the prompts keep to; at least one prompt was added."""
        left = share * self.samples
        for length in sorted(self._counts):
            left -= self._counts[length]
            if left <= 0:
                return length
        return max(self._counts)

    @property
    def total(self) -> int:
        """Tokens of all prompts together."""
        return sum(length * count for length, count in self._counts.items())

    def histogram(self) -> Iterator[tuple[int, int, int]]:
        """First and last length of a range, and the prompts in it; ranges double, from the shortest to the longest."""
        if not self._counts:
            return
        bins: collections.Counter[int] = collections.Counter()
        for length, count in self._counts.items():
            bins[length.bit_length()] += count
        for bits in range(min(bins), max(bins) + 1):
            yield 2**bits // 2, max(2**bits - 1, 0), bins[bits]


class Survey:
    """Everything seen so far.

    Args:
        tokenizer: counts tokens with it; None counts none.
        budget, sampling: as for `Lengths`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None = None, budget: int | None = None, sampling: SamplingParams | None = None
    ) -> None:
        self.samples = 0
        self.kinds: dict[str, KindSummary] = {}
        self.bad_count = 0
        self.bad_lines: list[BadLine] = []
        self.lengths = None if tokenizer is None else Lengths(budget, sampling)
        self._tokenizer = tokenizer

    def add(self, sample: Task | BadLine) -> None:
        """One more sample; one that the chat template refuses, or whose ids the vocabulary lacks, is a bad line.

        Raises:
            TokenizerError: a chat, and the tokenizer has no chat template.
        """
        self.samples += 1
        if isinstance(sample, BadLine):
            self._add_bad(sample)
            return
        if sample.kind not in self.kinds:
            self.kinds[sample.kind] = KindSummary(sample.source, example_text(sample)[:MAX_EXAMPLE_CHARACTERS])
        self.kinds[sample.kind].add(sample)
        if self._tokenizer is None or self.lengths is None:
            return
        try:
            length = prompt_length(sample, self._tokenizer)
        except (InputError, ServerRefused) as error:
            said = error if isinstance(error, InputError) else InputError("; ".join([error.message, *error.details]))
            self._add_bad(
                BadLine(
                    sample_id=sample.sample_id,
                    source=sample.source,
                    line=sample.line,
                    place=sample.source,
                    error=said,
                )
            )
        else:
            self.lengths.add(sample, length)

    @property
    def tokenizer_name(self) -> str | None:
        """Whose tokens are counted; None where none are."""
        return None if self._tokenizer is None else self._tokenizer.name

    def _add_bad(self, bad: BadLine) -> None:
        self.bad_count += 1
        if len(self.bad_lines) < MAX_BAD_LINES_KEPT:
            self.bad_lines.append(bad)


def example_text(task: Task) -> str:
    """What a sample sends first, in words: a text prompt, the last message of a chat, a first turn, or token ids."""
    if task.prompt is not None:
        return task.prompt
    if task.prompt_ids is not None:
        return str(list(task.prompt_ids[:MAX_EXAMPLE_CHARACTERS]))
    messages = task.first_messages
    assert messages is not None, "a task has one of prompt, prompt_ids, messages and turns"
    return content_text(messages[-1])


def prompt_length(task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of what is sent first, the generation prompt and BOS included.

    Raises:
        InputError: the chat template refuses the messages, or an id is outside the vocabulary.
        ServerRefused: the same, where the tokenizer is a server's.
        TokenizerError: a chat, and there is no chat template.
    """
    if task.prompt is not None:
        return len(tokenizer.encode_prompt(task.prompt))
    if task.prompt_ids is not None:
        highest = max(task.prompt_ids)
        if highest >= tokenizer.vocab_size:
            raise InputError(f"the token id {highest} is outside the vocabulary of {tokenizer.vocab_size} ids")
        return len(task.prompt_ids)
    messages = task.first_messages
    assert messages is not None, "a task has one of prompt, prompt_ids, messages and turns"
    text = tokenizer.render_chat(messages, tools=task.tools, continue_final_message=task.continue_final)
    return len(tokenizer.encode_rendered(text))
