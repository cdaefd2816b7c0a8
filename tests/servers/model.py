"""A fake language model: deterministic, cheap, and a model in the strict sense.

The logprob of a token is a pure function of the ids before it, whoever asks: sampling, prompt logprobs and tests that
check an alignment all see the same number. What is sampled is a pure function of the prompt ids, the seed, the choice
index and the sampling parameters; temperature 0 ignores the seed.
"""

import math
import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from tests.servers.tokenizer import EMOJI, WORDS, FakeTokenizer

MASK = (1 << 64) - 1
STEP, INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's MMIX generator
CANDIDATES = 32  # tokens with a logprob of their own in each context; all others share a tail
POOLS = 1024  # different contexts
SHAPES = 16  # different distributions over the candidates, from nearly flat to nearly certain
TAIL_LOGPROB = -18.0  # tokens outside the candidates: from here down to one below
WITH_TAIL = 1.0005  # all probability, as a multiple of the candidates'
NEGATIVE_INFINITY = float("-inf")

LogprobsMode = Literal["raw", "temperature", "processed"]


def float32(value: float) -> float:
    """The value as a server would report it: computed in single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def next_context(context: int, token: int) -> int:
    return ((context ^ token) * STEP + INCREMENT) & MASK


def context_after(ids: list[int], context: int = INCREMENT) -> int:
    for token in ids:
        context = ((context ^ token) * STEP + INCREMENT) & MASK
    return context


def unit_hash(ids: list[int], salt: int = 0) -> float:
    """A number in [0, 1) that depends on the ids only: which prompts a fault hits, how long a reply takes."""
    return (next_context(context_after(ids), salt) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks for, in one vocabulary for all servers; 0 or less in `top_k` means off."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    penalties: tuple[float, ...] = ()  # only their hash matters
    forced: int | None = None
    banned: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None
    fixed_length: int | None = None
    keep_stop: bool = False


@dataclass(slots=True)
class Choice:
    """One sampled completion; a contract breach changes its fields. C tokens."""

    ids: list[int] | None
    logprobs: list[float | None] | None  # C, in the server's mode
    contexts: list[tuple[int, int]]  # C: context and last token before each position
    data: bytes  # the text as bytes, cut at a stop string
    finish: str | None  # "stop" or "length"
    matched: int | str | None  # EOS id, stop token id or stop string
    kind: str  # "eos", "token", "word" or "limit"


@dataclass(frozen=True, slots=True)
class Pool:
    """The candidates of a context, most likely first."""

    ids: tuple[int, ...]
    rank: dict[int, int]
    shape: int


def _shape(sharpness: float) -> tuple[float, ...]:
    weights = [math.exp(-sharpness * rank**0.7) for rank in range(CANDIDATES)]
    total = sum(weights) * WITH_TAIL
    return tuple(float32(math.log(weight / total)) for weight in weights)


RAW_SHAPES = tuple(_shape(0.2 + 0.2 * number) for number in range(SHAPES))


@lru_cache(maxsize=4096)
def transformed(
    shape: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Logprobs after temperature, logprobs after temperature and filters, cumulative probabilities of the latter."""
    raw = RAW_SHAPES[shape]
    if temperature == 0:
        return raw, raw, (1.0,)
    top = raw[0] / temperature
    weights = [math.exp(value / temperature - top) for value in raw]
    total = sum(weights)
    scaled = tuple(float32(value / temperature - top - math.log(total * WITH_TAIL)) for value in raw)
    kept, mass = 0, 0.0
    for weight in weights[: top_k if top_k > 0 else None]:
        if kept and (mass / total >= top_p or weight < min_p * weights[0]):
            break
        kept, mass = kept + 1, mass + weight
    left = mass * WITH_TAIL if kept == len(weights) else mass  # a filter takes the tail first
    processed = tuple(float32(math.log(w / left)) if i < kept else NEGATIVE_INFINITY for i, w in enumerate(weights))
    return scaled, processed, tuple(accumulate(weight / mass for weight in weights[:kept]))


def _rotated(items: list[int], places: int) -> list[int]:
    places %= len(items)
    return items[places:] + items[:places]


class Model:
    """Distributions over the ids of one tokenizer."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_id
        self.pieces = [b"" if i in tokenizer.special_ids else piece for i, piece in enumerate(tokenizer.pieces)]
        words = sorted(set(tokenizer.encode(WORDS, add_special_tokens=False)) - tokenizer.special_ids)
        characters = dict.fromkeys("".join(EMOJI))
        split = [ids for text in characters if len(ids := tokenizer.encode(text, add_special_tokens=False)) > 1]
        self.starts = sorted({ids[0] for ids in split})
        followers: dict[int, set[int]] = {}
        for ids in split:
            for token, following in pairwise(ids):
                followers.setdefault(token, set()).add(following)
        self.pools = [self._pool(number, words) for number in range(POOLS)]
        self.inside_character = {
            token: [self._pool(number, words, _rotated(sorted(following), number)) for number in range(4)]
            for token, following in followers.items()
            if token not in words
        }

    def _pool(self, number: int, words: list[int], first: list[int] | None = None) -> Pool:
        state = context_after([number, *(first or ())])
        ids = dict.fromkeys(first or ())
        while len(ids) < min(CANDIDATES, len(words)):
            state = next_context(state, len(ids))
            ids[words[(state >> 33) % len(words)]] = None
        order, ends = list(ids), first is None and number % 21 == 1
        if first is None:
            if number % 3 == 0:
                order.insert(1 + number % 7, self.starts[number // 3 % len(self.starts)])
            if number % 2 == 0 and not ends:
                order.insert(3 + number % 5, self.eos)
            elif ends:
                order.insert(0, self.eos)
        order = list(dict.fromkeys(order))[:CANDIDATES]
        shape = SHAPES - 1 if first is not None else (state >> 40) % SHAPES
        if ends:  # likely, and never certain: the choices of one prompt shall differ
            shape = number % 5
        return Pool(tuple(order), {token: rank for rank, token in enumerate(order)}, shape)

    def pool(self, context: int, last: int) -> Pool:
        inside = self.inside_character.get(last)
        return self.pools[context >> 54] if inside is None else inside[context >> 62]

    def logprob(self, context: int, last: int, token: int) -> float:
        """Raw logprob of `token` after `context`."""
        pool = self.pool(context, last)
        rank = pool.rank.get(token)
        return self._tail(context, token) if rank is None else RAW_SHAPES[pool.shape][rank]

    @staticmethod
    def _tail(context: int, token: int) -> float:
        return float32(TAIL_LOGPROB - (next_context(context, token) >> 40) / (1 << 24))

    def top(self, context: int, last: int, count: int, sampling: Sampling | None = None, mode: LogprobsMode = "raw"):
        """The `count` most likely tokens as (id, logprob), most likely first; -inf where a filter removed the token."""
        pool = self.pool(context, last)
        logprobs = RAW_SHAPES[pool.shape]
        if sampling is not None and mode != "raw":
            logprobs = self._transformed(pool, sampling)[0 if mode == "temperature" else 1]
        if sampling is not None and mode == "processed" and sampling.allowed is not None:
            return [(token, NEGATIVE_INFINITY) for token in range(count)]  # all but the sampled one, which is known
        top = list(zip(pool.ids, logprobs, strict=False))[:count]
        if len(top) < count:
            tail = [(t, self._tail(context, t)) for t in range(self.tokenizer.size) if t not in pool.rank]
            top += sorted(tail, key=lambda entry: -entry[1])[: count - len(top)]
        return top

    def rank(self, context: int, last: int, token: int) -> int:
        """1 for the most likely token; in the tail, the token's place among all ids."""
        rank = self.pool(context, last).rank.get(token)
        return CANDIDATES + 1 + token if rank is None else rank + 1

    @staticmethod
    def _transformed(pool: Pool, sampling: Sampling):
        return transformed(pool.shape, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def score(self, prompt: list[int], completion: list[int]) -> list[float]:
        """Raw logprobs of the completion's tokens: the oracle for tests."""
        context, last, logprobs = context_after(prompt), prompt[-1] if prompt else -1, []
        for token in completion:
            logprobs.append(self.logprob(context, last, token))
            context, last = next_context(context, token), token
        return logprobs

    def prompt_positions(self, prompt: list[int]) -> list[tuple[int, int]]:
        """Context and last token before each prompt position from the second on: P - 1 entries."""
        context, positions = INCREMENT, []
        for token in prompt:
            context = next_context(context, token)
            positions.append((context, token))
        return positions[:-1]

    def sample(self, prompt: list[int], sampling: Sampling, choice: int = 0, mode: LogprobsMode = "raw") -> Choice:
        """Completion number `choice` of `prompt`."""
        context, last = context_after(prompt), prompt[-1] if prompt else -1
        state = 0
        if sampling.temperature > 0:
            state = context_after([(sampling.seed or 0) & MASK, choice, hash(sampling.penalties) & MASK], context)
        ids: list[int] = []
        logprobs: list[float | None] = []
        contexts: list[tuple[int, int]] = []
        data = bytearray()
        stops = [(text, text.encode()) for text in sampling.stop]
        finish, matched, kind = "length", None, "limit"
        while len(ids) < sampling.max_tokens:
            pool = self.pool(context, last)
            state = (state * STEP + INCREMENT) & MASK
            cumulative = self._transformed(pool, sampling)[2]
            rank = min(bisect_right(cumulative, (state >> 11) / (1 << 53)), len(cumulative) - 1)
            token = self._constrained(pool, pool.ids[rank], rank, sampling, len(ids))
            logprobs.append(self._sampled_logprob(context, pool, token, sampling, mode))
            ids.append(token)
            contexts.append((context, last))
            context, last = ((context ^ token) * STEP + INCREMENT) & MASK, token
            if token == self.eos and not sampling.ignore_eos:
                finish, matched, kind = "stop", token, "eos"
                break
            if token in sampling.stop_token_ids:
                finish, matched, kind = "stop", token, "token"
                break
            length = len(data)
            data += self.pieces[token]
            found = next(((t, at) for t, b in stops if (at := data.find(b, max(0, length - len(b) + 1))) >= 0), None)
            if found is not None:
                finish, matched, kind = "stop", found[0], "word"
                del data[found[1] + (len(found[0].encode()) if sampling.keep_stop else 0) :]
                break
        return Choice(ids, logprobs, contexts, bytes(data), finish, matched, kind)

    def _sampled_logprob(self, context: int, pool: Pool, token: int, sampling: Sampling, mode: LogprobsMode) -> float:
        rank = pool.rank.get(token)
        if mode == "raw":
            return self._tail(context, token) if rank is None else RAW_SHAPES[pool.shape][rank]
        if rank is None:
            return 0.0  # the request left no other choice
        logprob: float = self._transformed(pool, sampling)[0 if mode == "temperature" else 1][rank]
        return 0.0 if logprob == NEGATIVE_INFINITY else logprob

    def _constrained(self, pool: Pool, token: int, rank: int, sampling: Sampling, position: int) -> int:
        """`token`, or what the constraints of the request put in its place."""
        if sampling.forced is not None:
            return sampling.forced
        if sampling.fixed_length is not None:
            if position == sampling.fixed_length - 1:
                return self.eos
            no_eos = True
        else:
            no_eos = sampling.ignore_eos or position < sampling.min_tokens
        if sampling.allowed is not None:
            allowed = [t for t in pool.ids if t in sampling.allowed] or sorted(sampling.allowed)
            return token if token in sampling.allowed else allowed[0]
        if (no_eos and token == self.eos) or token in sampling.banned:
            ids = [*pool.ids[rank + 1 :], *pool.ids[:rank]]
            return next(t for t in ids if not (no_eos and t == self.eos) and t not in sampling.banned)
        return token
