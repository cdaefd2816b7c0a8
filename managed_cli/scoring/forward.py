"""Logprobs by a float32 forward pass of the weights in this process; the only importer of PyTorch.

Memory is bounded twice: rows are batched up to a budget of padded tokens, and a row that alone exceeds it is read in
pieces over a key-value cache, so that the logits of no more tokens than the budget are held at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from managed_cli.errors import ConfigError
from managed_cli.scoring.processing import RAW, Processing, sampling_of
from managed_cli.scoring.rows import Floats, Row
from managed_cli.scoring.scorers import Score
from managed_cli.types import Tokenizer

HOW_TO_GET_TORCH = "pip install 'managed-cli[transformers]'   (PyTorch, several GB; CPU builds are smaller)"

LOGITS_BYTES = 512 * 1024 * 1024
"""Of one batch: 4 bytes for each of its padded tokens and each id of the vocabulary."""

POSITIONS_AT_ONCE = 128
"""Positions whose whole distribution is copied at a time: some tens of MB with a vocabulary of 150,000."""

CUMULATIVE_EDGE = 2e-5
"""How far a sum of float32 probabilities over a vocabulary may lie from another implementation's."""

RELATIVE_EDGE = 1e-4
"""Likewise a probability, relative to another one."""

EDGE_MASS = 1e-4
"""Tokens that lie on an edge matter to the others once they hold so much of the probability together."""

Tensor = Any  # PyTorch is not there when types are checked


def require_torch() -> None:
    """Raise ConfigError where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("scoring with the weights needs PyTorch, which is not installed here", hint=HOW_TO_GET_TORCH)


class ForwardScorer:
    """A causal language model of `transformers`, in float32, that generates nothing.

    Args:
        name: where the weights were loaded from, for people.
        model: a `PreTrainedModel`, in evaluation mode.
        tokens_per_batch: padded tokens at a time; None derives it from the vocabulary.
    """

    def __init__(self, name: str, model: Any, tokenizer: Tokenizer, *, tokens_per_batch: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._weights, self._model = name, model
        self._device = model.device
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._budget = tokens_per_batch or max(1, LOGITS_BYTES // (4 * self.vocab_size))

    @classmethod
    def load(
        cls, name: str, tokenizer: Tokenizer, *, device: str | None = None, tokens_per_batch: int | None = None
    ) -> ForwardScorer:
        """The model at a directory or hub name, on `device` (None: a GPU where there is one).

        Raises:
            ConfigError: PyTorch is not installed, or the weights cannot be loaded there.
        """
        require_torch()
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("highest")
        # `dtype` from 4.56 on; it was `torch_dtype` before.
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        dtype = {"dtype" if version >= (4, 56) else "torch_dtype": torch.float32}
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, **dtype).eval().to(place)
        except Exception as error:  # transformers raises errors of many libraries; each means: cannot be loaded
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"the weights of {name!r} cannot be loaded here",
                details=[reason],
                hint="name them with --model: a directory, or a Hugging Face name",
            ) from error
        return cls(name, model, tokenizer, tokens_per_batch=tokens_per_batch)

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"a float32 forward pass of {self._weights} on {self._device.type}"

    def refusal(self, processing: Processing) -> str | None:  # noqa: ARG002 (the protocol's signature)
        """It can process as any server does whose order is known."""
        return None

    async def score(self, rows: Sequence[tuple[Row, Processing]], done: Callable[[int], None]) -> list[Score | str]:
        """For each row its score, batched with others of about its length.

        Raises:
            ConfigError: the device has too little memory.
        """
        scores: dict[int, Score] = {}
        for batch in self._batches([row for row, _ in rows]):
            with self._memory_faults_told():
                found = await asyncio.to_thread(self._score_batch, [rows[index] for index in batch])
            scores.update(zip(batch, found, strict=True))
            done(len(batch))
        return [scores[index] for index in range(len(rows))]

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Indices in groups whose padded size stays within the budget; a longer row is a group of its own."""
        batch: list[int] = []
        for index in sorted(range(len(rows)), key=lambda index: len(rows[index].tokens)):
            if batch and (len(batch) + 1) * len(rows[index].tokens) > self._budget:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @contextlib.contextmanager
    def _memory_faults_told(self) -> Iterator[None]:
        import torch

        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.name} does not fit into the memory of the device",
                hint=f"score fewer tokens at a time (--tokens-per-batch, now {self._budget}), or use --device cpu",
            ) from error

    def _score_batch(self, rows: Sequence[tuple[Row, Processing]]) -> list[Score]:
        import torch

        with torch.inference_mode():
            if len(rows) == 1:
                return [self._score_alone(*rows[0])]
            longest = max(len(row.tokens) for row, _ in rows)
            ids = torch.zeros((len(rows), longest), dtype=torch.long)
            attended = torch.zeros_like(ids)
            for index, (row, _) in enumerate(rows):
                ids[index, : len(row.tokens)] = torch.from_numpy(row.tokens.astype(np.int64))
                attended[index, : len(row.tokens)] = 1
            logits = self._model(
                input_ids=ids.to(self._device), attention_mask=attended.to(self._device), use_cache=False
            ).logits
            return [self._score_of([logits[index]], *row) for index, row in enumerate(rows)]

    def _score_alone(self, row: Row, processing: Processing) -> Score:
        return self._score_of(self._logits_in_pieces(row), row, processing)

    def _logits_in_pieces(self, row: Row) -> Iterator[Tensor]:
        """The logits of one row, [≤ budget][V] at a time."""
        import torch

        ids = torch.from_numpy(row.tokens.astype(np.int64)).to(self._device).unsqueeze(0)
        if len(row.tokens) <= self._budget:
            yield self._model(input_ids=ids, use_cache=False).logits[0]
            return
        cache = None
        for start in range(0, len(row.tokens), self._budget):
            out = self._model(input_ids=ids[:, start : start + self._budget], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            yield out.logits[0]

    def _score_of(self, pieces: Iterator[Tensor] | Sequence[Tensor], row: Row, processing: Processing) -> Score:
        """The score from logits that stand for the positions of the row, one piece after the other."""
        length = len(row.tokens)
        logprobs, on_edge = np.full(length, np.nan), np.zeros(length, dtype=bool)
        variant, other = _variant(row, processing)
        other_logprobs = np.full(length, np.nan)
        start = 0
        for piece in pieces:
            # The logits at position p - 1 are the distribution of the token at p.
            for first in range(0, min(len(piece), length - 1 - start), POSITIONS_AT_ONCE):
                begin = start + first + 1
                end = min(begin + POSITIONS_AT_ONCE, start + len(piece) + 1, length)
                logits = piece[first : first + end - begin].float()
                logprobs[begin:end], on_edge[begin:end] = _logprobs(logits, row, begin, end, processing)
                if variant is not None:
                    other_logprobs[begin:end], _ = _logprobs(logits, row, begin, end, other)
            start += len(piece)
        variants = {} if variant is None else {variant: other_logprobs}
        return Score(logprobs=logprobs, variants=variants, on_edge=on_edge if on_edge.any() else None)


def _variant(row: Row, processing: Processing) -> tuple[str | None, Processing]:
    """The other stage at which the logprobs of the row may have been taken, by the name of its diagnosis."""
    sampling = sampling_of(row.metadata)
    if processing != RAW:
        return "no_temperature", RAW
    if sampling is None or sampling.temperature in (0.0, 1.0):
        return None, RAW
    return "temperature", Processing(temperature=sampling.temperature)


def _logprobs(
    logits: Tensor, row: Row, begin: int, end: int, processing: Processing
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Of the tokens at positions `begin` … `end` - 1, [n], given their distributions [n][V]; and which are on edge."""
    import torch

    targets = torch.from_numpy(row.tokens[begin:end].astype(np.int64)).to(logits.device).unsqueeze(1)
    if processing.repetition_penalty != 1.0:
        seen = _seen_before(row, begin, end, logits)
        factor = processing.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if processing.temperature != 1.0:
        logits = logits / processing.temperature
    on_edge = torch.zeros(len(targets), dtype=torch.bool, device=logits.device)
    if processing.filters:
        logits, unsure = _filtered(logits, processing)
        mass = torch.where(unsure, logits.softmax(dim=-1), 0.0).sum(dim=-1)
        on_edge = unsure.gather(1, targets).squeeze(1) | (mass > EDGE_MASS)
    chosen = logits.gather(1, targets).squeeze(1) - logits.logsumexp(dim=-1)
    return chosen.double().cpu().numpy(), on_edge.cpu().numpy()


def _seen_before(row: Row, begin: int, end: int, logits: Tensor) -> Tensor:
    """[n][V]: whether an id stands anywhere before each position."""
    import torch

    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    seen[:, torch.from_numpy(row.tokens[:begin].astype(np.int64)).to(logits.device)] = True
    for position in range(begin, end - 1):
        seen[position - begin + 1 :, int(row.tokens[position])] = True
    return seen


def _filtered(logits: Tensor, processing: Processing) -> tuple[Tensor, Tensor]:
    """Logits with -inf for what min_p, top_k and top_p leave out, in vLLM's order, and who is on an edge: [n][V]."""
    import torch

    unsure = torch.zeros_like(logits, dtype=torch.bool)
    unfiltered, minus_inf = logits, -torch.inf
    if processing.min_p > 0.0:
        probabilities = logits.softmax(dim=-1)
        shares = probabilities / probabilities.amax(dim=-1, keepdim=True)
        unsure |= (shares - processing.min_p).abs() < RELATIVE_EDGE * processing.min_p
        logits = logits.masked_fill(shares < processing.min_p, minus_inf)
    if 0 < processing.top_k < logits.shape[-1]:
        best = logits.topk(processing.top_k + 1, dim=-1).values
        last, next_best = best[:, -2:-1], best[:, -1:]
        near = (last - next_best) < RELATIVE_EDGE
        unsure |= near & ((logits - last).abs() < RELATIVE_EDGE)
        logits = logits.masked_fill(logits < last, minus_inf)
    if processing.top_p < 1.0:
        values, order = logits.sort(dim=-1)
        sums = values.softmax(dim=-1).cumsum(dim=-1)
        dropped = sums <= 1 - processing.top_p
        dropped[:, -1] = False
        unsure |= torch.zeros_like(unsure).scatter(
            1, order, ((sums - (1 - processing.top_p)).abs() < CUMULATIVE_EDGE) & torch.isfinite(values)
        )
        logits = logits.scatter(1, order, values.masked_fill(dropped, minus_inf))
    # A token on an edge may be in or out: what it would weigh if it were in is what counts.
    return torch.where(unsure, unfiltered, logits), unsure
