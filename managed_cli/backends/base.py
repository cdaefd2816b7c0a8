"""What every server type offers, and the checks that hold for all of them.

Rules, each for one sampled choice of C tokens:
- it has exactly C ids and C logprobs;
- a logprob is finite and at most 0 (tolerance 1e-6); -inf in any spelling fails the choice, unless it is to be kept;
- an id is inside the vocabulary.
And for the reply: as many choices as asked for, and the prompt it echoes is the prompt that was sent.
What breaks a rule is never repaired: the reply is refused whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import msgspec

from managed_cli.backends._http import DEFAULT_ATTEMPTS, HttpClient
from managed_cli.backends.numbers import MINUS_INF_FLOOR, all_within, ids_within, logprob_or_minus_inf
from managed_cli.errors import (
    ConfigError,
    PromptRejected,
    ServerContractError,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from managed_cli.sent_prompt import AS_SENT, NO_ECHO, SentPrompt
from managed_cli.types import (
    LOGPROB_TOLERANCE,
    Generation,
    GenerationReply,
    LogprobsMode,
    PromptLogprobs,
    SamplingParams,
    ServerInfo,
)

WAITING_HINT = "a server that is still loading can be waited for: --wait-for-server SECONDS"

ENGINE_HAS_ENDED = "EngineCore encountered an issue"
"""How a vLLM answers, with HTTP 500, from the moment its engine has died until it is started anew."""

HEALTH_POLL_SECONDS = 1.0
"""How often a server that is still loading is asked again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """How to speak to one server.

    Attributes:
        model: name to send; None takes the one the server has.
        timeout: seconds that one reply may take; None waits for ever.
        keep_nonfinite: record -inf on a sampled position instead of failing the sample.
        max_connections: requests in flight at most.
        context_length: most prompt + completion tokens; the server's own limit holds where it is lower.
        probe_logprobs_mode: sample a token or two in `probe` to learn the mode; a dry run samples nothing.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    timeout: float | None = None
    attempts: int = DEFAULT_ATTEMPTS
    keep_nonfinite: bool = False
    max_connections: int = 1024
    context_length: int | None = None
    probe_logprobs_mode: bool = True


class Backend(Protocol):
    """One inference server: token ids in, token ids and logprobs out."""

    @property
    def server_type(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def info(self) -> ServerInfo: ...
    @property
    def answers_while_generating(self) -> bool: ...

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the server is up; raise ServerUnreachable when it is not within `seconds`."""
        ...

    async def probe(self) -> ServerInfo:
        """What the server says of itself; kept as `info`."""
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The server's own ids of `text`; None where it has no way to tell."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        """`sampling.n` choices for one prompt."""
        ...

    async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
        """Top-k alternatives at every position of the prompt."""
        ...

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The raw logprob of every id after those before it: [P - 1], of the positions 1 … P - 1."""
        ...

    async def look_again(self, *, sample: bool) -> ServerInfo:
        """What the server says of itself now; `sample`: also its logprobs mode. `info` stays as it is."""
        ...

    def watch_connections(self, is_lost: Callable[[], Awaitable[bool]]) -> None:
        """Ask `is_lost` after every lost connection whether the request is still to be sent again."""
        ...

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids at or above `vocab_size` from now on, where the server did not name a limit itself."""
        ...

    def know_end_tokens(self, token_ids: Iterable[int]) -> None:
        """The ids that end a turn, for servers that give no finish reason."""
        ...

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for settings that this type of server cannot take."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class HttpBackend:
    """What the HTTP backends share: the client, the readiness wait, and the contract checks."""

    server_type: ClassVar[str]
    health_path: str = "/health"
    answers_while_generating: bool = True

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.http = HttpClient(
            config.base_url,
            label=f"{self.server_type} at {config.base_url.rstrip('/')}",
            api_key=config.api_key,
            timeout=config.timeout,
            attempts=config.attempts,
            max_connections=config.max_connections,
        )
        self.end_token_ids: frozenset[int] = frozenset()
        self._info: ServerInfo | None = None

    @property
    def base_url(self) -> str:
        """The server's address, without a trailing slash."""
        return self.http.base_url

    @property
    def label(self) -> str:
        """How messages name this server."""
        return self.http.label

    @property
    def info(self) -> ServerInfo:
        """What `probe` found."""
        assert self._info is not None, "probe() comes before the first request"
        return self._info

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the health endpoint answers 2xx.

        Raises:
            ServerUnreachable: it does not within `seconds` (0: one look).
            ServerRefused: it answers with an error that waiting will not change.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.http.get(self.health_path, attempts=1)
                return
            except ServerUnreachable:
                if time.monotonic() >= deadline:
                    raise
            except ServerRefused as error:
                if error.status < 500 or time.monotonic() >= deadline:
                    if error.status >= 500:
                        error.hint = WAITING_HINT
                    raise
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    async def look_again(self, *, sample: bool) -> ServerInfo:
        """What the server says of itself now, which is of interest when it may have been started anew.

        Args:
            sample: learn the logprobs mode too, which takes a token or two; else it is given as it was.
        """
        second = type(self)(dataclasses.replace(self.config, probe_logprobs_mode=sample))
        second.http = self.http
        info = await second.probe()
        if sample:
            return info
        known = self.info
        return dataclasses.replace(
            info, logprobs_mode=known.logprobs_mode, logprobs_mode_source=known.logprobs_mode_source
        )

    async def probe(self) -> ServerInfo:
        """What the server says of itself; kept as `info`."""
        raise NotImplementedError

    def watch_connections(self, is_lost: Callable[[], Awaitable[bool]]) -> None:
        """Ask `is_lost` after every lost connection whether the request is still to be sent again."""
        self.http.is_lost = is_lost

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids at or above `vocab_size` from now on, where the server did not name a limit itself."""
        if self.info.vocab_size is None:
            self._info = dataclasses.replace(self.info, vocab_size=vocab_size)

    def know_end_tokens(self, token_ids: Iterable[int]) -> None:
        """The ids that end a turn; only servers that give no finish reason make use of them."""
        self.end_token_ids = frozenset(token_ids)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for settings that this type of server cannot take; most take all."""

    @property
    def context_length(self) -> int | None:
        """Most prompt + completion tokens: the server's limit or the configured one, whichever is lower."""
        told, configured = self.info.context_length, self.config.context_length
        if told is None or configured is None:
            return configured if told is None else told
        return min(told, configured)

    def require_vocabulary(self) -> None:
        """Raise ConfigError while the vocabulary is not known, for servers that an unknown id brings down."""
        if self.info.vocab_size is None:
            raise ConfigError(
                f"{self.label} stops working on an id outside its vocabulary, and its vocabulary is not known",
                hint="name its tokenizer with --tokenizer",
            )

    def admitted(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
        """`sampling` with `max_tokens` cut to what fits behind the prompt.

        Raises:
            PromptRejected: the prompt is empty, fills the context, or holds an id the model does not have.
                Such prompts hang or kill some servers, so they are not sent to any.
        """
        self.check_prompt_ids(prompt_ids)
        context_length = self.context_length
        if context_length is None:
            return sampling
        room = context_length - len(prompt_ids)
        if room < 1:
            raise PromptRejected(
                f"the prompt has {len(prompt_ids)} tokens, but {self.label} has a context of {context_length}"
            )
        return sampling if sampling.max_tokens <= room else msgspec.structs.replace(sampling, max_tokens=room)

    def check_prompt_ids(self, prompt_ids: Sequence[int]) -> None:
        """Raise PromptRejected for an empty prompt or an id outside the vocabulary."""
        if not prompt_ids:
            raise PromptRejected("the prompt has no tokens")
        if ids_within(prompt_ids, self._highest_id()):
            return
        lowest, highest = min(prompt_ids), max(prompt_ids)
        if lowest < 0:
            raise PromptRejected(f"the prompt holds the negative id {lowest}")
        if highest > self._highest_id():
            vocab_size = self.info.vocab_size
            raise PromptRejected(f"the prompt holds id {highest}, but {self.label} has a vocabulary of {vocab_size}")

    def _highest_id(self) -> float:
        return math.inf if self.info.vocab_size is None else self.info.vocab_size - 1

    def reply_of(
        self,
        sampling: SamplingParams,
        choices: Sequence[Generation],
        attempts: int,
        *,
        logprobs_mode: LogprobsMode | None = None,
    ) -> GenerationReply:
        """The reply, once every choice has passed the checks of this module; a null among its logprobs is -inf.

        Raises:
            ServerContractError: a rule is broken; it names server and choice.
        """
        if len(choices) != sampling.n:
            raise ServerContractError(f"{self.label} sent {len(choices)} choices for n={sampling.n}")
        if not self._all_pass(choices):
            choices = [self._checked(index, choice) for index, choice in enumerate(choices)]
        return GenerationReply(
            choices=tuple(choices),
            sampling=sampling,
            server=self.base_url,
            attempts=attempts,
            logprobs_mode=logprobs_mode or self.info.logprobs_mode,
            checked=True,  # their types are those that replies are decoded to
        )

    def check_echo(self, sent: SentPrompt, echoed: msgspec.Raw, *, choice: int | None = None) -> None:
        """Raise ServerContractError unless the server worked on exactly the ids that were sent."""
        if echoed in (sent.raw, AS_SENT):
            return
        if echoed == NO_ECHO:
            raise ServerContractError(f"{self.label} did not say which prompt ids it used")
        ids, expected = self.http.decode(bytes(echoed), list[int], what="an echo of the prompt"), list(sent.ids)
        if ids != expected:
            place = "" if choice is None else f" in choice {choice}"
            differing = (i for i, (a, b) in enumerate(zip(expected, ids, strict=False)) if a != b)
            raise ServerContractError(
                f"{self.label} echoed another prompt than the one sent{place}: {len(ids)} ids for {len(expected)}, "
                f"first difference at position {next(differing, min(len(expected), len(ids)))}"
            )

    def _all_pass(self, choices: Sequence[Generation]) -> bool:
        """Whether nothing is wrong with any choice; what is wrong with which, `_checked` tells."""
        for choice in choices:
            if len(choice.token_ids) != len(choice.logprobs):
                return False
        ids, logprobs = [choice.token_ids for choice in choices], [choice.logprobs for choice in choices]
        return all_within(ids, "i", above=-1, highest=self._highest_id()) and all_within(
            logprobs, "d", above=MINUS_INF_FLOOR, highest=LOGPROB_TOLERANCE
        )

    def _checked(self, index: int, choice: Generation) -> Generation:
        ids, logprobs = choice.token_ids, choice.logprobs
        if len(ids) != len(logprobs):
            raise ServerContractError(
                f"{self.label} sent {len(logprobs)} logprobs for {len(ids)} tokens in choice {index}"
            )
        highest = self._highest_id()
        if not all(0 <= token <= highest for token in ids):
            raise ServerContractError(f"{self.label} sent an id outside its vocabulary in choice {index}")
        values = map(logprob_or_minus_inf, logprobs)
        checked = [self._checked_logprob(index, position, value) for position, value in enumerate(values)]
        return msgspec.structs.replace(choice, logprobs=checked)

    def _checked_logprob(self, index: int, position: int, logprob: float) -> float:
        place = f"at token {position} of choice {index}"
        if math.isnan(logprob) or logprob > LOGPROB_TOLERANCE:
            raise ServerContractError(f"{self.label} sent the logprob {logprob} {place}; it must be 0 or less")
        if logprob > MINUS_INF_FLOOR:
            return logprob
        if not self.config.keep_nonfinite:
            raise ServerContractError(
                f"{self.label} sent a logprob of -inf {place}, a token it says it could not have sampled",
                hint="`--nonfinite keep` records such tokens with -inf and counts them",
            )
        return -math.inf

    def prompt_logprobs_of(
        self, prompt_ids: Sequence[int], top_k: int, rows: Sequence[Sequence[tuple[int, float]]]
    ) -> PromptLogprobs:
        """`rows`, [P][k] of (id, logprob), best first and `[]` at position 0, as the value that is handed on.

        Raises:
            ServerContractError: a position or an alternative is missing, or a logprob is not one.
        """
        if len(rows) != len(prompt_ids):
            raise ServerContractError(f"{self.label} sent {len(rows)} prompt logprobs for {len(prompt_ids)} tokens")
        for position, row in enumerate(rows):
            expected = top_k if position else 0
            if len(row) != expected:
                raise ServerContractError(
                    f"{self.label} sent {len(row)} alternatives at prompt position {position}, not {expected}"
                )
            for _, logprob in row:
                if math.isnan(logprob) or logprob > LOGPROB_TOLERANCE:
                    raise ServerContractError(
                        f"{self.label} sent the logprob {logprob} at prompt position {position}; it must be 0 or less"
                    )
        return PromptLogprobs(
            prompt_tokens=list(prompt_ids),
            topk_token_ids=[[token for token, _ in row] for row in rows],
            topk_logprobs=[[-math.inf if value <= MINUS_INF_FLOOR else value for _, value in row] for row in rows],
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self.http.aclose()


NOT_PROBED = (LogprobsMode.UNKNOWN, "not probed")
"""What is known of the logprobs mode where nothing may be sampled."""


def refusal_is_final(error: ServerError) -> bool:
    """Whether `error` would meet every further request too, so that going on is pointless."""
    if isinstance(error, ServerUnreachable):
        return True
    if not isinstance(error, ServerRefused):
        return False
    return error.status in (401, 403, 404) or any(ENGINE_HAS_ENDED in line for line in error.details)
