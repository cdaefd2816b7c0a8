"""What a server does with prompts of ids, seeds and stop strings, and what it sends back: found by asking it.

Every probe is an ordinary request through the backend, whose contract checks run on each reply. What breaks the
contract raises, and is told by the checkup as what makes recording unsafe.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence

import msgspec

from managed_cli.backends.base import Backend
from managed_cli.doctor.findings import Finding, note, ok, unknown, unsafe
from managed_cli.errors import ConfigError, ManagedCliError, ServerContractError, ServerRefused
from managed_cli.tokenizer_disagreement import first_disagreement
from managed_cli.tokenizers import PROBE_TEXTS
from managed_cli.types import UNNAMED_MODEL, Generation, LogprobsMode, SamplingParams, Tokenizer

SPELLED_OUT = "Hello world"
"""A text that no tokenizer writes letter by letter: its letters as ids show whether a server encodes them again."""

QUESTION = "Say hello."
"""Asked of models with a chat template; short, so that its answer soon ends."""

PROMPTS = ("The capital of France is", "Once upon a time", "def add(first, second):", "One, two, three, four,")
"""Continued by any model; several, since a greedy answer to one of them may be too short to tell anything."""

SEED = 7
SHORT, MEDIUM, LONG = 8, 32, 160
"""Tokens sampled: enough to differ by chance, to cut a word out of, and to come to an end of turn."""

CHOICES = 4

ENDINGS = ((8, MEDIUM), (2, LONG))
"""Choices and tokens asked for until a reply ends by itself: many short ones first, which nearly always are enough."""

MOST_ALTERNATIVES = 1024
"""Where the search for the largest top-k of prompt logprobs ends: no trainer asks for more."""

MISALIGNED_NATS = 0.5
"""Mean difference above which logprobs are other tokens': bfloat16 is off by hundredths, a shift by one by more."""

NOISE_NATS = 0.05
"""Mean difference that rounding may make: below it no shift is looked for, since among certain tokens any would fit."""

SHIFTS = (0, 1, -1)
"""Positions by which logprobs are compared: as they are first, then as if they were one too early or too late."""

MODES = {
    LogprobsMode.RAW: "raw: before temperature and filters",
    LogprobsMode.TEMPERATURE: "after temperature, before top-k, top-p and min-p",
    LogprobsMode.PROCESSED: "processed: after temperature and filters",
    LogprobsMode.UNKNOWN: "of a stage that is not known",
}

MODE_ADVICE = {
    LogprobsMode.RAW: "at a temperature other than 1, a trainer must compare with raw logprobs of its own",
    LogprobsMode.TEMPERATURE: "with filters on, these are not the probabilities that were sampled from",
    LogprobsMode.PROCESSED: "a trainer must apply temperature and filters before it compares",
    LogprobsMode.UNKNOWN: "sample at temperature 1 without filters, where every stage gives the same",
}


def sampling(**changed: object) -> SamplingParams:
    """Plain sampling at temperature 1 with the probes' seed, and what is `changed`."""
    plain = SamplingParams(max_tokens=SHORT, seed=SEED)
    return msgspec.structs.replace(plain, **changed)


def about_server(backend: Backend) -> list[Finding]:
    """What the server says of itself."""
    info = backend.info
    version = f" {info.version}" if info.version else ", which does not tell its version"
    named = info.model != UNNAMED_MODEL
    found = [
        ok("server", f"{backend.server_type}{version}"),
        ok("model", info.model)
        if named
        else note("model", "the server does not say which it has", "--model NAME puts its name into the rows"),
    ]
    if info.context_length is None:
        found.append(
            note("context", "the server does not say how long it is", "say it with --context-length, if it is known")
        )
    else:
        found.append(ok("context", f"{info.context_length:,} tokens"))
    found.append(_about_weights(info.weight_version))
    return found


def _about_weights(version: str | None) -> Finding:
    if version is None:
        return note(
            "weight version",
            "the server tells none, so rows cannot say which weights sampled them",
            "do not update its weights in the middle of a run",
        )
    return ok("weight version", f"{version}, and every row will say its own")


def about_logprobs(backend: Backend) -> Finding:
    """At which stage of sampling its logprobs are taken."""
    mode = backend.info.logprobs_mode
    said = f"{MODES[mode]} ({backend.info.logprobs_mode_source})"
    return note("logprobs", said, MODE_ADVICE[mode])


async def ids_of_texts(backend: Backend, tokenizer: Tokenizer) -> Finding:
    """Whether the server's ids of some telling texts are ours."""
    check = "tokenizer"
    if tokenizer.over_network:
        return ok(check, f"the server's own, {tokenizer.vocab_size:,} ids")
    for text in PROBE_TEXTS:
        theirs = await backend.tokenize(text, add_special_tokens=False)
        if theirs is None:
            return unknown(
                check,
                f"{tokenizer.name}, {tokenizer.vocab_size:,} ids; the server has no way to tell its own",
                "make sure that it is the tokenizer of the model that is served",
            )
        difference = first_disagreement(tokenizer, text, theirs)
        if difference is not None:
            return unsafe(
                check,
                f"{tokenizer.name} is not the server's: {difference}",
                "name the model's own tokenizer with --tokenizer",
            )
    return ok(check, f"{tokenizer.name}, {tokenizer.vocab_size:,} ids; {len(PROBE_TEXTS)} texts have the server's ids")


async def prompt_ids_are_kept(backend: Backend, tokenizer: Tokenizer) -> Finding:
    """Whether ids that no text would give reach the model as they are: an echo, or a count, that is another raises."""
    letters, text_ids = await asyncio.to_thread(_both_spellings, tokenizer)
    await backend.generate(letters, sampling(max_tokens=1))
    if len(letters) == len(text_ids):
        return unknown("prompt ids", "this tokenizer spells every text letter by letter, so nothing can be told")
    return ok(
        "prompt ids",
        f"taken as they are: {len(letters)} ids of single letters did not become the {len(text_ids)} of the text",
    )


def _both_spellings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the text's letters, one by one, and ids of the text."""
    letters = [token for letter in SPELLED_OUT for token in tokenizer.encode_suffix(letter)]
    return letters, tokenizer.encode_suffix(SPELLED_OUT)


async def choices_are_whole(backend: Backend, prompt: Sequence[int]) -> list[Finding]:
    """Several choices of one request: ids and logprobs of one length, and not the same answer again and again."""
    reply = await backend.generate(prompt, sampling(n=CHOICES, max_tokens=2 * SHORT))
    tokens = sum(len(choice.token_ids) for choice in reply.choices)
    found = [ok("choices", f"{CHOICES} for n={CHOICES}; {tokens} ids with {tokens} finite logprobs, none above 0")]
    aborted = [choice.finish_reason for choice in reply.choices if choice.finish_reason not in ("stop", "length")]
    if aborted:
        found.append(
            note(
                "finish reason",
                f"{len(aborted)} of {CHOICES} choices ended as {aborted[0]!r}",
                "such rows say so in `finish_reason`; leave them out when training",
            )
        )
    different = len({tuple(choice.token_ids) for choice in reply.choices})
    if different == 1:
        found.append(
            unsafe(
                "distinct choices",
                f"all {CHOICES} choices of one request are the same {len(reply.choices[0].token_ids)} tokens",
                "use -n 1 and repeat the prompt under ids of its own, whose seeds differ",
            )
        )
    else:
        found.append(ok("distinct choices", f"{different} different ones of {CHOICES}"))
    return found


async def seeds_are_honoured(backend: Backend, prompt: Sequence[int]) -> Finding:
    """Whether the same seed samples the same tokens, and another seed others."""
    first, again, other = [
        list((await backend.generate(prompt, sampling(seed=seed, max_tokens=2 * SHORT))).choices[0].token_ids)
        for seed in (SEED, SEED, SEED + 1)
    ]
    if first != again:
        return note(
            "seeds",
            "not honoured: the same seed sampled other tokens",
            "a run cannot be repeated exactly; its rows are as true as others",
        )
    if first == other:
        return unsafe(
            "seeds",
            "another seed sampled the same tokens",
            "repeated prompts would be recorded as if they were sampled independently",
        )
    return ok("seeds", "the same seed samples the same tokens, another one others")


async def logprobs_belong_to_their_ids(backend: Backend, prompts: Sequence[Sequence[int]]) -> Finding:
    """Whether the logprobs of greedy completions are those that the server gives the same ids as a prompt.

    They are another position's where a shift by one fits twice as well.
    """
    check = "alignment"
    differences: dict[int, list[float]] = {shift: [] for shift in SHIFTS}
    compared = 0
    for prompt in prompts:
        greedy = (await backend.generate(prompt, sampling(temperature=0.0, max_tokens=2 * SHORT))).choices[0]
        try:
            scored = await backend.prompt_logprobs([*prompt, *greedy.token_ids], 1)
        except (NotImplementedError, ServerRefused, ConfigError):
            return unknown(
                check, "the server scores no prompts, so there is no second source to compare its logprobs with"
            )
        best = zip(scored.topk_token_ids[len(prompt) :], scored.topk_logprobs[len(prompt) :], strict=True)
        # A tie may fall the other way when the same ids are computed as a prompt: then there is nothing to compare.
        scores = [top[0] if ids == [token] else None for token, (ids, top) in zip(greedy.token_ids, best, strict=True)]
        compared += len(scores)
        for shift, found in differences.items():
            found += _differences(greedy.logprobs, scores, shift)
    means = {shift: statistics.fmean(found) for shift, found in differences.items() if found}
    as_it_is = means.get(0, math.inf)
    is_shifted = as_it_is > NOISE_NATS and 2 * min(means.values()) < as_it_is
    if 2 * len(differences[0]) < compared or as_it_is > MISALIGNED_NATS or is_shifted:
        return unsafe(
            check,
            f"the logprobs of {compared} sampled ids are not those of the same ids scored as a prompt",
            "is there a proxy, or a speculative model, between? record nothing until they agree",
        )
    return ok(
        check,
        f"{len(differences[0])} logprobs are the server's score of these ids, within {max(differences[0]):.1g} nats",
    )


def _differences(logprobs: Sequence[float], scores: Sequence[float | None], shift: int) -> list[float]:
    """How far each logprob lies from the score `shift` positions on, where there is one."""
    pairs = ((logprob, place + shift) for place, logprob in enumerate(logprobs))
    inside = ((logprob, scores[place]) for logprob, place in pairs if 0 <= place < len(scores))
    return [abs(logprob - score) for logprob, score in inside if score is not None]


async def largest_top_k(backend: Backend, prompt: Sequence[int]) -> Finding:
    """The most alternatives that the server gives for a prompt's positions, found by doubling and then by halving."""
    check, advice = "prompt logprobs", "get_logprobs() is not to be had from it; recording does not need it"
    try:
        reason = await _refusal_of_top_k(backend, prompt, 1)
    except NotImplementedError as error:
        return note(check, str(error), advice)
    if reason is not None:
        return note(check, f"none: {reason}", advice)
    most = min(MOST_ALTERNATIVES, backend.info.vocab_size or MOST_ALTERNATIVES)
    works, fails = 1, most + 1
    while fails - works > 1:
        # Above the search's own limit nothing is tried; below it, the next power of two until one is refused.
        tried = min(2 * works, most) if fails > most else (works + fails) // 2
        if await _refusal_of_top_k(backend, prompt, tried) is None:
            works = tried
        else:
            fails = tried
    return ok(check, f"up to top-k {works:,}" + (" at least" if works == most else ""))


async def _refusal_of_top_k(backend: Backend, prompt: Sequence[int], top_k: int) -> str | None:
    """Why the server gives no `top_k` alternatives, or not as it should; None where it does."""
    try:
        await backend.prompt_logprobs(prompt, top_k)
    except (ServerRefused, ServerContractError, ConfigError) as error:
        return error.message
    return None


async def end_of_turn_is_recorded(backend: Backend, tokenizer: Tokenizer, prompt: Sequence[int]) -> Finding:
    """Whether the token that ends a reply stands in its ids, with a logprob of its own."""
    check = "end token"
    ended = await _ended_choice(backend, prompt)
    if ended is None:
        return unknown(
            check,
            f"none of {sum(n for n, _ in ENDINGS)} replies ended within {MEDIUM} to {LONG} tokens",
            "look at the last tokens of a row that ended: managed-cli inspect out.parquet --row N",
        )
    last, logprob = ended.token_ids[-1], ended.logprobs[-1]
    spelled = f"{await _text_of(tokenizer, [last])!r} (id {last})"
    if tokenizer.eos_token_ids and last not in tokenizer.eos_token_ids and ended.stop_reason != last:
        return unsafe(
            check,
            f"a reply that ended has {spelled} as its last id, which ends nothing: the end token was left out",
            "a model cannot learn to end its turns from such rows; is there a proxy that cuts replies?",
        )
    return ok(check, f"{spelled} stands in the ids of a reply that ended, with logprob {logprob:.3f}")


async def _ended_choice(backend: Backend, prompt: Sequence[int]) -> Generation | None:
    """A reply that the model ended by itself; None where none did."""
    for choices, most_tokens in ENDINGS:
        reply = await backend.generate(prompt, sampling(n=choices, max_tokens=most_tokens))
        for choice in reply.choices:
            if choice.finish_reason == "stop" and choice.token_ids and not isinstance(choice.stop_reason, str):
                return choice
    return None


async def stop_strings(backend: Backend, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> Finding:
    """What a stop string leaves of a reply: its text, its ids, and their logprobs."""
    check = "stop strings"
    greedy = sampling(temperature=0.0, max_tokens=MEDIUM)
    for prompt in prompts:
        plain = (await backend.generate(prompt, greedy)).choices[0]
        stop = _word_inside(await _text_of(tokenizer, plain.token_ids))
        if stop is None:
            continue
        cut = (await backend.generate(prompt, msgspec.structs.replace(greedy, stop=(stop,)))).choices[0]
        spelled = await _text_of(tokenizer, cut.token_ids)
        if cut.finish_reason == "stop" and cut.end_token_id is None:
            text = (
                "no text is sent" if cut.text is None else f"{'kept in' if stop in cut.text else 'cut from'} the text"
            )
            ids = "kept in the ids" if stop in spelled else "not in the ids"
            return ok(
                check, f"{stop!r} ends a reply: {text}, {ids}; each of its {len(cut.token_ids)} ids has a logprob"
            )
        if stop in spelled:
            return note(check, f"{stop!r} was sampled and did not end the reply", "use --stop-token-id instead")
        # Greedy replies repeat themselves only nearly everywhere: another prompt may.
    return unknown(check, f"none of {len(prompts)} greedy replies came to a word that it was to stop at")


async def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, specials kept; in a thread, since a tokenizer may be behind endpoints."""
    return await asyncio.to_thread(tokenizer.decode, ids)


def _word_inside(text: str) -> str | None:
    """A word that stands in the middle of `text`, and not before; None where there is none."""
    words = text.split()
    for word in words[len(words) // 3 : -1]:
        if len(word) > 1 and word.isascii() and word.isprintable() and text.find(word) > 0:
            return word
    return None


def fault_of(check: str, error: ManagedCliError | NotImplementedError) -> Finding:
    """An error in a probe as a finding: what a sample of a run would meet too."""
    if isinstance(error, NotImplementedError):
        return unsafe(check, str(error))
    said = f"{error.message}: {error.details[0]}" if error.details else error.message
    advice = error.hint or "every sample of a run would fail so"
    if isinstance(error, ConfigError):
        return unknown(check, said, advice)
    return unsafe(check, said, advice)
