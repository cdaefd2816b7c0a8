"""What has happened to a row whose logprobs are not those of its tokens, where the pattern tells.

Each hypothesis says what the recorded values should be if it were true. It is named where they then agree at nearly
all positions, and far better than they do as they stand. n = sampled positions that are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from managed_cli.scoring.faults import Fault, find_turn_positions
from managed_cli.scoring.rows import Floats, Row
from managed_cli.scoring.scorers import Score
from managed_cli.types import Tokenizer

Flags = npt.NDArray[np.bool_]

Fits = Callable[[Floats, Floats], bool]
"""Whether recorded and expected values, [n] each, agree so well that the hypothesis behind them is named."""

DIAGNOSES = {
    "filled": "positions hold one constant instead of logprobs",
    "shifted": "the logprobs stand at other positions than their tokens",
    "scaled": "the logprobs are in another unit: all of them times one factor",
    "probabilities": "probabilities instead of logprobs",
    "temperature": "the logprobs were taken after temperature, and are recorded as taken before it",
    "no_temperature": "the logprobs were taken before temperature, and are recorded as taken after it",
    "another_row": "the logprobs of another row",
    "reordered": "the row's own logprobs in another order",
    "mask_shifted": "the mask stands at other positions than the sampled tokens",
    "truncated": "the row ends before its last turn does",
    "doubled_bos": "the beginning-of-sequence token stands twice, and the model saw it once",
    "retokenised": "the text is right and the ids are not the sampled ones: a turn was encoded again",
    "tokens_changed": "from one token on nothing agrees: tokens there are not the sampled ones",
    "logprobs_changed": "single logprobs are not those of their tokens; what follows them agrees",
    "rounding": "small differences in both directions: another numeric precision, not another model",
    "other_context": "nothing agrees from the first sampled token on: another prompt, or other weights",
}
"""Kind of diagnosis → what it means."""

FIT_SHARE = 0.9
"""A hypothesis holds where so many of the positions agree …"""

FIT_GAIN = 0.3
"""… and this many more than without it."""

LEAST_POSITIONS = 3
"""Fewer positions agree by chance."""

LOG_FACTORS = {
    1 / math.log(10): "log10",
    1 / math.log(2): "log2",
    -1.0: "negated",
}
"""Factor → what values multiplied by it are."""

ROUNDING_MEDIAN, ROUNDING_MOST = 0.05, 0.6
"""Nats: how far bfloat16 and 8-bit weights lie from float32 ones at most, at half of the positions and at any."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """A named pattern: which one, and what was seen."""

    kind: str
    detail: str


class Examined:
    """A scored row, its compared positions side by side.

    Attributes:
        positions: [n], ascending; sampled, scored, and on no filter's edge.
        recorded, expected: [n], natural logs.
        differences: [n], expected - recorded; 0 where both are -inf.
        largest: of them, absolute; 0 without any.
    """

    def __init__(self, row: Row, score: Score) -> None:
        self.row, self.score = row, score
        usable = ~np.isnan(score.logprobs[row.sampled])
        if score.on_edge is not None:
            usable &= ~score.on_edge[row.sampled]
        self.positions = row.sampled[usable]
        self.recorded = row.logprobs[self.positions]
        self.expected = score.logprobs[self.positions]
        with np.errstate(invalid="ignore"):
            self.differences = np.where(self.recorded == self.expected, 0.0, self.expected - self.recorded)
        self.largest = float(np.abs(self.differences).max(initial=0.0))

    @property
    def worst(self) -> int:
        """Index into the arrays of the largest difference."""
        return int(np.argmax(np.abs(self.differences)))


def diagnose(
    row: Examined, window: Sequence[Examined], faults: Sequence[Fault], tokenizer: Tokenizer, tolerance: float
) -> Diagnosis | None:
    """What has happened to a row that differs by more than `tolerance`; None where no pattern tells.

    Args:
        window: scored rows in which its logprobs may be found.
        faults: what was found without scoring.
    """
    for found in _hypotheses(row, window, faults, tokenizer, tolerance):
        if found is not None:
            return found
    return None


def _hypotheses(
    row: Examined, window: Sequence[Examined], faults: Sequence[Fault], tokenizer: Tokenizer, tolerance: float
) -> Iterator[Diagnosis | None]:
    """From what is certain to what is left when nothing else fits."""
    yield structural_diagnosis(row.row, faults)
    if len(row.positions) == 0:
        return
    agrees = np.abs(row.differences) <= tolerance
    yield _filled(row, agrees)
    if len(row.positions) >= LEAST_POSITIONS:
        yield from _value_patterns(row, window, agrees, tolerance)
    yield _doubled_bos(row.row, tokenizer)
    if not any(fault.kind in ("masked_text", "sampled_text") for fault in faults):
        yield _rounding(row, window, agrees, tolerance)
    yield _first_difference(row, agrees, faults, tokenizer)


def structural_diagnosis(row: Row, faults: Sequence[Fault]) -> Diagnosis | None:
    """What mask and turns say without any score."""
    sizes = [size for size in row.sizes if size is not None]
    if "length" in row.breaches and len(sizes) == len(row.sizes):
        names = ("tokens", "masked_tokens", "logprobs")
        short = [name for name, size in zip(names, sizes, strict=True) if size < max(sizes)]
        return Diagnosis("truncated", f"{', '.join(short)} shorter than the rest by {max(sizes) - min(sizes)}")
    turns = find_turn_positions(row) if row.is_whole else None
    if turns is None or not len(turns):
        return None
    for places in (row.sampled, np.flatnonzero(row.logprobs != 1.0)):
        for shift in (1, -1, 2, -2):
            if np.array_equal(places, turns + shift):
                return Diagnosis("mask_shifted", f"by {shift:+d} against the turns in the metadata")
    if np.array_equal(turns, row.sampled):
        return None
    length = len(row.tokens)
    if turns[-1] >= length and np.array_equal(turns[turns < length], row.sampled):
        return Diagnosis("truncated", f"the last turn ends at {turns[-1] + 1}, the row at {length}")
    if not any(fault.kind in ("sampled_text", "masked_text") for fault in faults) and len(turns) != len(row.sampled):
        detail = f"{len(turns)} tokens were sampled, {len(row.sampled)} stand there for the same text"
        return Diagnosis("retokenised", detail)
    return None


def _agreement(recorded: Floats, expected: Floats, tolerance: float) -> float:
    """The share of positions that agree, 0 to 1."""
    return float(np.mean(np.abs(recorded - expected) <= tolerance)) if len(recorded) else 0.0


def _filled(row: Examined, agrees: Flags) -> Diagnosis | None:
    wrong = row.recorded[~agrees]
    if not len(wrong) or not np.all(wrong == wrong[0]) or (len(wrong) == 1 and wrong[0] != 0.0):
        return None
    first = int(row.positions[~agrees][0])
    count = f"{len(wrong)} positions" if len(wrong) > 1 else "1 position"
    return Diagnosis("filled", f"{wrong[0]:g} at {count} from {first} on")


def _value_patterns(
    row: Examined,
    window: Sequence[Examined],
    agrees: Flags,
    tolerance: float,
) -> Iterator[Diagnosis | None]:
    least = max(FIT_SHARE, float(np.mean(agrees)) + FIT_GAIN)

    def fits(recorded: Floats, expected: Floats) -> bool:
        return len(recorded) >= LEAST_POSITIONS and _agreement(recorded, expected, tolerance) >= min(least, 1.0)

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        yield from (_shifted(row, shift, fits) for shift in (1, -1, 2, -2))
        yield from (
            Diagnosis("scaled", f"{name}: the factor is {factor:.6g}")
            if fits(row.recorded, row.expected * factor)
            else None
            for factor, name in LOG_FACTORS.items()
        )
        yield (
            Diagnosis("probabilities", "their natural logs agree") if fits(np.log(row.recorded), row.expected) else None
        )
        for kind, values in row.score.variants.items():
            yield Diagnosis(kind, "taken that way they agree") if fits(row.recorded, values[row.positions]) else None
        yield from (_of_other(row, other, fits) for other in window if other is not row)
        ordered = fits(np.sort(row.recorded), np.sort(row.expected))
        yield Diagnosis("reordered", "sorted by size they agree") if ordered else None
        yield _one_factor(row, fits)


def _shifted(row: Examined, shift: int, fits: Fits) -> Diagnosis | None:
    """`recorded[p]` is the logprob of the token at p + shift."""
    there = row.positions + shift
    inside = (there >= 1) & (there < len(row.row.tokens))
    if not fits(row.recorded[inside], row.score.logprobs[there[inside]]):
        return None
    way = "early" if shift > 0 else "late"
    return Diagnosis("shifted", f"by {abs(shift)}: each stands {abs(shift)} too {way}")


def _of_other(row: Examined, other: Examined, fits: Fits) -> Diagnosis | None:
    common = min(len(row.recorded), len(other.expected))
    if not fits(row.recorded[:common], other.expected[:common]):
        return None
    name = f"row {other.row.number} (sample {other.row.sample_id}, choice {other.row.choice_index})"
    return Diagnosis("another_row", f"they are those of {name}")


def _one_factor(row: Examined, fits: Fits) -> Diagnosis | None:
    total = float(np.sum(row.expected * row.expected))
    if not math.isfinite(total) or total == 0.0:
        return None
    factor = float(np.sum(row.recorded * row.expected)) / total
    return Diagnosis("scaled", f"the factor is {factor:.4g}") if fits(row.recorded, row.expected * factor) else None


def _doubled_bos(row: Row, tokenizer: Tokenizer) -> Diagnosis | None:
    text = "a"
    bare = tokenizer.encode_rendered(text)
    prefix = tokenizer.encode_prompt(text)[: -len(bare)] if bare else []
    if prefix and row.tokens[: 2 * len(prefix)].tolist() == 2 * prefix:
        return Diagnosis("doubled_bos", f"the row begins with {2 * prefix}")
    return None


def _rounding(row: Examined, window: Sequence[Examined], agrees: Flags, tolerance: float) -> Diagnosis | None:
    """Only where most other rows differ too: precision is a matter of the whole recording."""
    others = [other.largest <= tolerance for other in window if other is not row]
    if others and np.mean(others) > 0.5:
        return None
    median = float(np.median(np.abs(row.differences)))
    if np.mean(agrees) > 1 - FIT_GAIN or median > ROUNDING_MEDIAN or row.largest > ROUNDING_MOST:
        return None
    return Diagnosis("rounding", f"half of them below {median:.2g}, all below {row.largest:.2g}")


def _first_difference(
    row: Examined,
    agrees: Flags,
    faults: Sequence[Fault],
    tokenizer: Tokenizer,
) -> Diagnosis | None:
    """Where the differences begin, and whether what follows agrees again."""
    wrong = np.flatnonzero(~agrees)
    first, last = int(wrong[0]), int(wrong[-1])
    begins, texts = int(row.positions[first]), {fault.kind for fault in faults}
    if last < len(agrees) - 1 and "sampled_text" not in texts and len(wrong) <= FIT_GAIN * len(agrees):
        places = ", ".join(str(int(place)) for place in row.positions[wrong][:4])
        return Diagnosis("logprobs_changed", f"at {places}{', …' if len(wrong) > 4 else ''}")
    if np.mean(agrees[first:]) > 1 - FIT_GAIN or len(agrees) < LEAST_POSITIONS:
        return None
    if first == 0 and "sampled_text" not in texts:
        if "masked_text" in texts:
            return Diagnosis("other_context", "and the prompt's ids are not those of its text")
        return Diagnosis("other_context", f"from {begins} on")
    if "sampled_text" not in texts and first > 0 and _is_encoded_again(row.row, tokenizer):
        return Diagnosis("retokenised", f"from {begins} on; these are the ids that the tokenizer would choose")
    if first > 0 or "sampled_text" in texts:
        return Diagnosis("tokens_changed", f"from {begins} on")
    return None


def _is_encoded_again(row: Row, tokenizer: Tokenizer) -> bool:
    """Whether each run of sampled ids is what its text is encoded as."""
    runs = np.split(row.sampled, np.flatnonzero(np.diff(row.sampled) != 1) + 1)
    for run in runs:
        ids = row.tokens[run].tolist()
        if ids and tokenizer.encode_suffix(tokenizer.decode(ids)) != ids:
            return False
    return True
