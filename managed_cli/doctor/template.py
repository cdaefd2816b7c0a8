"""What a tokenizer and its chat template do to a conversation: BOS, whose turn it is, and whether history is kept.

A model sees the tokens that it sampled. What a template writes of them in the next turn decides whether one row can
hold the whole conversation, so each kind of answer is rendered into a second turn and looked for there, by its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from managed_cli.doctor.findings import Finding, note, ok, unknown, unsafe
from managed_cli.errors import ManagedCliError
from managed_cli.tokenizers import PROBE_TEXTS
from managed_cli.types import Message, Tokenizer

FIRST, SECOND = "What is the capital of France?", "And of Italy?"
"""Two turns of a user; any would do."""

THOUGHT = "Easy.\n"
"""What stands in a think block of a model that has one."""

THINK, END_OF_THINK = "<think>", "</think>"

ANSWERS = {
    "plain": "Paris.",
    "think": f"{THINK}\n{THOUGHT}{END_OF_THINK}\n\nParis.",
    "spaces": "  Paris. \n",
}
"""What is peculiar about an answer → the answer, as it is sampled."""

LONGEST_QUOTE = 100
"""Characters of a template's own text that are shown."""

KEEP_TOKENS = "`--history verbatim` keeps the sampled tokens; else the next turn begins a new row"


@dataclasses.dataclass(frozen=True, slots=True)
class _Rewriting:
    """Where a second turn leaves the tokens of the first: what was sent and sampled, and what is written instead."""

    position: int
    sampled: str
    written: str


def examine_tokenizer(tokenizer: Tokenizer) -> Iterator[Finding]:
    """What the tokenizer and its template do; nothing is sent but by a tokenizer behind a server's endpoints."""
    yield from _roundtrip(tokenizer)
    try:
        opening = tokenizer.render_chat([_user(FIRST)])
    except ManagedCliError as error:
        yield unknown("chat template", error.message, "text prompts (`prompt`) need none; chats do")
        return
    yield _bos(tokenizer, opening)
    yield from _turns(tokenizer, opening)
    yield from _histories(tokenizer, opening)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _roundtrip(tokenizer: Tokenizer) -> Iterator[Finding]:
    """Whether text that is encoded comes back; a tokenizer that loses spaces makes prompts of another text."""
    about = getattr(tokenizer, "note", None)
    if about:
        yield note("tokenizer", str(about))
    for text in PROBE_TEXTS:
        decoded = tokenizer.decode(tokenizer.encode_suffix(text))
        if decoded != text:
            yield note(
                "text and ids",
                f"{text!r} is encoded and comes back as {decoded!r}",
                "text prompts are sent as the ids say; check `full_text` of a row",
            )
            return
    yield ok("text and ids", f"{len(PROBE_TEXTS)} telling texts come back as they were encoded")


def _bos(tokenizer: Tokenizer, opening: str) -> Finding:
    """Whether the beginning-of-sequence token stands exactly once, in text prompts and in chats."""
    plain = tokenizer.encode_rendered("a")
    with_prefix = tokenizer.encode_prompt("a")
    prefix = with_prefix[: len(with_prefix) - len(plain)]
    chat = tokenizer.encode_rendered(opening)
    if not prefix:
        return ok("BOS", "the tokenizer puts none before a text, and nothing is added")
    name = f"{tokenizer.decode(prefix)!r} (id {', '.join(map(str, prefix))})"
    doubled = tokenizer.encode_prompt(tokenizer.decode(prefix) + "a")
    if doubled != with_prefix or chat[: 2 * len(prefix)] == [*prefix, *prefix]:
        return unsafe("BOS", f"{name} stands twice at the beginning", "name the model's own tokenizer with --tokenizer")
    if chat[: len(prefix)] != prefix:
        return note(
            "BOS",
            f"{name} begins text prompts, but the chat template does not write it",
            "chats are sent as the template writes them; was the model trained on that?",
        )
    return ok("BOS", f"{name} stands once, in text prompts and in chats")


def _turns(tokenizer: Tokenizer, opening: str) -> Iterator[Finding]:
    """What is put before a conversation, whose turn it is at the end of one, and how an answer is ended."""
    before = opening.partition(FIRST)[0]
    if "system" in before.lower():
        yield note(
            "system message",
            f"the template puts one in where there is none: {shortened(before)}",
            "give your own with --system, or in the messages",
        )
    closed = tokenizer.render_chat([_user(FIRST)], add_generation_prompt=False)
    added = opening.removeprefix(closed) if opening.startswith(closed) else opening
    if not added:
        yield note(
            "generation prompt",
            "the template adds nothing that tells the model that it is its turn",
            "some templates end a user's turn so; if answers begin with a role's name, the template is wrong",
        )
    elif added.rstrip().endswith(THINK):
        yield note("generation prompt", f"{added!r}: it opens a think block, so answers begin inside of one")
    else:
        yield ok("generation prompt", f"{added!r} tells the model that it is its turn")
    yield _end_of_turn(tokenizer)


def _end_of_turn(tokenizer: Tokenizer) -> Finding:
    """Whether what the template writes behind an answer begins with a token that ends generation."""
    answer = ANSWERS["plain"]
    text = tokenizer.render_chat([_user(FIRST), _assistant(answer), _user(SECOND)])
    after = text.partition(answer)[2]
    ids = tokenizer.encode_suffix(after.partition(SECOND)[0])
    if not ids or not after:
        return unknown("end of turn", "the template does not show an answer as it was given")
    spelled = f"{tokenizer.decode(ids[:1])!r} (id {ids[0]})"
    if ids[0] in tokenizer.eos_token_ids:
        return ok("end of turn", f"the template ends an answer with {spelled}, which ends generation too")
    known = ", ".join(f"{tokenizer.decode([token])!r}" for token in sorted(tokenizer.eos_token_ids)) or "none is known"
    return note(
        "end of turn",
        f"the template ends an answer with {spelled}, which is none of the end tokens: {known}",
        "a model that ends its turns so runs on: stop it with --stop-token-id or --stop",
    )


def _histories(tokenizer: Tokenizer, opening: str) -> Iterator[Finding]:
    """For each kind of answer, whether the second turn begins with the tokens of the first."""
    for name, answer in _answers(opening).items():
        rewriting = _rewriting(tokenizer, opening, answer)
        check = f"history: {name}"
        if rewriting is None:
            yield ok(check, "kept: the second turn begins with the tokens of the first")
        else:
            yield note(
                check,
                f"rewritten: at token {rewriting.position} {rewriting.sampled!r} was sampled, "
                f"and the second turn has {rewriting.written!r}",
                KEEP_TOKENS,
            )


def _answers(opening: str) -> dict[str, str]:
    """The answers to look for; behind a generation prompt that opens a think block, each begins inside of one."""
    if not opening.rstrip().endswith(THINK):
        return ANSWERS
    ends = f"{THOUGHT}{END_OF_THINK}\n\n"
    return {name: ends + answer for name, answer in ANSWERS.items() if THINK not in answer}


def _rewriting(tokenizer: Tokenizer, opening: str, sampled: str) -> _Rewriting | None:
    """Where the second turn leaves the first, at the first differing token; None where it keeps it."""
    later = tokenizer.render_chat([_user(FIRST), _assistant(sampled), _user(SECOND)])
    first = opening + sampled
    if later.startswith(first):
        return None
    ours, theirs = tokenizer.encode_rendered(first), tokenizer.encode_rendered(later)
    position = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return _Rewriting(position, _spelled(tokenizer, ours, position), _spelled(tokenizer, theirs, position))


def shortened(text: str) -> str:
    """`text` quoted, without what goes beyond `LONGEST_QUOTE`."""
    return repr(text) if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]!r}…"


def _spelled(tokenizer: Tokenizer, ids: Sequence[int], position: int) -> str:
    return tokenizer.decode(ids[position : position + 1])
