"""What a run does about every fault of a server: one table, which tests hold true and the README shows.

`python -m tests.rollout.fault_table` prints the README's version.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from managed_cli.errors import ExitCode
from tests.servers.faulty import Setting

MOST_SENDS = 6
"""As many as a request is sent at most."""

REQUEST_TIMEOUT = ("--request-timeout", 1)
WAITING = ("--wait-for-server", 30)
CONTRACT = "ServerContractError"
REFUSED_BY_SERVER = "ServerRefused"
LOST = "ServerUnreachable"
TIMED_OUT = "RequestTimedOut"
LOST_CONNECTION = "connection reset or closed before the reply, in or after its headers, or in its body"
LOGPROBS = "a logprob of NaN, Infinity, 1e999, 0.5, null, -Infinity, -9999 or -3.4e38, text or `true` for one"
STRANGE_IDS = "an id that is negative, outside the vocabulary or of 70 bits"
ODD_IDS = "a float, text or null for an id"
ALL_WIRES = ("vllm", "sglang", "trl", "llamacpp")


class Outcome(enum.Enum):
    """What becomes of the samples that meet the fault, and of the run."""

    RECORDED = "recorded"
    FAILED = "sample failed"
    EITHER = "recorded, or sample failed"
    ENDED = "run ended, resumable"
    REFUSED = "refused before the first sample"


EXIT_CODES = {
    Outcome.RECORDED: ExitCode.OK,
    Outcome.FAILED: ExitCode.SOME_FAILED,
    Outcome.EITHER: ExitCode.SOME_FAILED,
    Outcome.ENDED: ExitCode.SERVER,
    Outcome.REFUSED: ExitCode.SERVER,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One fault and its outcome.

    Attributes:
        words: the fault as the README names it.
        setting: what the faulty server does, and to which requests.
        error: class of the failure, or of what ended the run as its message has it; None where nothing fails.
        sends: of one sample that meets the fault; None where that depends on when a connection is found closed.
        options: of the run, beside the usual ones.
        said: what the message of each failure holds, or stderr where the run ends.
        starts: "up", "down", or "late", which is up half a second after the run began.
    """

    name: str
    words: str
    setting: Setting
    outcome: Outcome
    error: str | None = None
    sends: int | None = 1
    options: tuple[object, ...] = ()
    said: str = ""
    starts: str = "up"
    wires: Sequence[str] = ("vllm",)

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.outcome]


def recorded(words: str, fault: str, *, sends: int | None = 1, name: str = "", **changes: object) -> Case:
    return _case(words, fault, name or fault, Outcome.RECORDED, sends=sends, **changes)


def failed(words: str, fault: str, error: str, *, sends: int = 1, name: str = "", **changes: object) -> Case:
    return _case(words, fault, name or fault, Outcome.FAILED, error=error, sends=sends, **changes)


def ended(words: str, fault: str, *, name: str = "", **changes: object) -> Case:
    return _case(words, fault, name or fault, Outcome.ENDED, **changes)


def refused(words: str, fault: str, scope: str, *, name: str = "", **changes: object) -> Case:
    return _case(words, fault, name or f"{fault}_{scope.strip('/')}", Outcome.REFUSED, scope=scope, **changes)


def _case(words: str, fault: str, name: str, outcome: Outcome, **changes: object) -> Case:
    setting = {key: changes.pop(key) for key in ("scope", "tries", "after") if key in changes}
    return Case(name, words, Setting(fault, **setting), outcome, **changes)  # type: ignore[arg-type]  # by field name


def once_and_always(words: str, fault: str, error: str, **changes: object) -> Iterator[Case]:
    """A fault that the request is sent again after: with the first try only, and with each."""
    yield recorded(words, fault, sends=2, name=f"{fault}_once", tries=1, **changes)
    yield failed(words, fault, error, sends=MOST_SENDS, name=f"{fault}_always", **changes)


CONNECTIONS = (
    *once_and_always(LOST_CONNECTION, "reset_before_the_reply", LOST),
    *once_and_always(LOST_CONNECTION, "closed_before_the_reply", LOST),
    *once_and_always(LOST_CONNECTION, "closed_in_the_headers", LOST),
    *once_and_always(LOST_CONNECTION, "closed_after_the_headers", LOST),
    *once_and_always(LOST_CONNECTION, "reset_after_the_headers", LOST),
    *once_and_always(LOST_CONNECTION, "closed_after_half_the_body", LOST),
    *once_and_always(LOST_CONNECTION, "reset_after_half_the_body", LOST),
    *once_and_always("content-length too long, then closed", "length_too_long_closed", LOST),
    *once_and_always("chunks without an end", "chunks_unfinished", LOST),
    recorded("every connection closed after its reply", "closed_after_every_reply", sends=None, scope="samples"),
    failed("no answer (with `--request-timeout`)", "never_answers", TIMED_OUT, options=REQUEST_TIMEOUT),
    failed("a byte at a time (likewise)", "drips", TIMED_OUT, options=REQUEST_TIMEOUT),
    failed("headers, then silence (likewise)", "silent_after_the_headers", TIMED_OUT, options=REQUEST_TIMEOUT),
    failed("content-length too long (likewise)", "length_too_long_open", TIMED_OUT, options=REQUEST_TIMEOUT),
)

STATUSES = (
    *(
        case
        for status in (408, 425, 429, 502, 503, 504)
        for case in once_and_always(f"{status}", f"status_{status}", REFUSED_BY_SERVER, said=f"HTTP {status}")
    ),
    recorded("429 whatever its `Retry-After` holds", "status_429_alone", sends=2, tries=1),
    *(
        recorded("429 whatever its `Retry-After` holds", f"retry_after_{name}", sends=2, tries=1)
        for name in ("date", "huge", "negative", "fraction", "words", "superscript", "empty")
    ),
    *(
        failed(f"{status}", f"status_{status}", REFUSED_BY_SERVER, said=f"HTTP {status}")
        for status in (400, 405, 409, 413, 422, 500, 501, 507, 599, 999)
    ),
    *(
        failed("redirections", f"redirect_{status}", REFUSED_BY_SERVER, said=f"HTTP {status}")
        for status in (301, 302, 303, 307, 308)
    ),
    failed("an error nested without end", "nested_error", REFUSED_BY_SERVER, said="HTTP 400"),
    *(ended(f"{status}", f"status_{status}", said=f"HTTP {status}") for status in (401, 403, 404)),
)

BODIES = tuple(
    failed(words, name, CONTRACT)
    for name, words in {
        "html": "HTML",
        "empty_body": "an empty body",
        "status_204": "204",
        "cut_json": "truncated JSON",
        "json_null": "JSON null",
        "json_list": "a JSON list",
        "json_number": "a JSON number",
        "json_string": "JSON in a JSON string",
        "error_with_200": "an error with status 200",
        "byte_order_mark": "a byte order mark",
        "utf_16": "UTF-16",
        "invalid_utf_8": "invalid UTF-8",
        "lone_surrogate": "half a surrogate pair",
        "doubled_keys": "every key twice, once with null",
        "two_documents": "two documents in one body",
        "nested_deeply": "JSON nested without end",
        "gzip_that_is_none": "gzip that is none",
        "gzip_garbage": "damaged gzip",
        "gzip_cut": "gzip cut short",
        "gzip_unlabelled": "gzip without a label",
        "encoding_unknown": "an unknown encoding",
        "http_1_0_cut": "HTTP/1.0 cut short",
        "endless_body": "a body without end",
        "length_too_short": "content-length too short",
        "length_zero": "content-length 0",
        "length_no_number": "content-length that is no number",
        "length_negative": "content-length below 0",
        "chunk_size_no_number": "no number as a chunk's size",
        "chunk_too_short": "a chunk longer than its size",
        "header_of_1_mb": "a header of 1 MB",
        "thousands_of_headers": "5000 headers",
        "control_characters_in_a_header": "NUL in a header",
        "status_line_without_a_status": "a status line without a status",
        "status_line_of_another_protocol": "another protocol's status line",
        "json_without_a_head": "JSON without a head",
        "noise": "noise",
    }.items()
)

ODD_BUT_SOUND = (
    recorded("a body of 100 MB", "huge_ignored_field", tries=1),
    recorded("gzip of a thousandfold size", "gzip_bomb"),
    recorded("sound gzip", "gzip_sound"),
    recorded("sound chunks, with extensions and trailers", "chunks_sound"),
    recorded("HTTP/1.0", "http_1_0"),
    recorded("a key twice (the last counts)", "doubled_key"),
    recorded("100 Continue first", "continue_first"),
    recorded("100 Continue a hundred times", "continue_a_hundred_times"),
    recorded("103 Early Hints first", "early_hints_first"),
    recorded("a second reply that nobody asked for, at once", "two_replies_at_once", wires=ALL_WIRES),
    _case(
        "a second reply that nobody asked for, later: what is under way on the connection by then fails",
        "second_reply_later",
        "second_reply_later",
        Outcome.EITHER,
        error=CONTRACT,
        sends=None,
        wires=ALL_WIRES,
    ),
)

BREACHES = (
    *(
        failed(words, name, CONTRACT, wires=wires)
        for name, words, wires in (
            ("logprob_nan", LOGPROBS, ALL_WIRES),
            ("logprob_infinity", LOGPROBS, ALL_WIRES),
            ("logprob_too_large", LOGPROBS, ALL_WIRES),
            ("logprob_positive", LOGPROBS, ALL_WIRES),
            ("logprob_null", LOGPROBS, ALL_WIRES),
            ("logprob_minus_infinity", LOGPROBS, ALL_WIRES),
            ("logprob_minus_9999", LOGPROBS, ALL_WIRES),
            ("logprob_float32_lowest", LOGPROBS, ALL_WIRES),
            ("logprob_text", LOGPROBS, ALL_WIRES),
            ("logprob_true", LOGPROBS, ALL_WIRES),
            ("logprobs_one_too_few", "a logprob too few", ("vllm", "sglang", "trl")),
            ("logprobs_one_too_many", "a logprob too many", ALL_WIRES),
            ("logprobs_none", "no logprobs", ("vllm", "sglang", "trl")),
            ("ids_one_too_few", "an id too few", ALL_WIRES),
            ("ids_one_too_many", "an id too many", ("vllm", "sglang", "trl")),
            ("id_outside_the_vocabulary", STRANGE_IDS, ALL_WIRES),
            ("id_of_70_bits", STRANGE_IDS, ALL_WIRES),
            ("id_negative", STRANGE_IDS, ALL_WIRES),
            ("id_float", ODD_IDS, ALL_WIRES),
            ("id_text", ODD_IDS, ALL_WIRES),
            ("id_null", ODD_IDS, ALL_WIRES),
            ("choices_too_few", "a choice too few", ALL_WIRES),
            ("choices_too_many", "a choice too many", ALL_WIRES),
            ("choices_none", "no choices", ALL_WIRES),
            ("choices_of_one_index", "two choices of one index", ("vllm", "llamacpp")),
            ("echo_cut", "a prompt that was cut", ALL_WIRES),
            ("echo_changed", "another prompt", ("vllm", "sglang", "trl")),
            ("finish_reason_missing", "no finish reason", ("vllm", "sglang", "llamacpp")),
            ("finish_reason_null", "null as finish reason", ("vllm", "sglang", "llamacpp")),
            ("finish_reason_unknown", "an unknown finish reason", ("sglang", "llamacpp")),
            ("finish_reason_abort", "an aborted choice", ("sglang", "llamacpp")),
            ("model_of_another_name", "another model's name", ("vllm",)),
        )
    ),
    recorded("choices out of order", "choices_out_of_order", wires=("vllm", "llamacpp")),
)

SERVERS = (
    refused("nobody listens", "html", "everything", name="down", starts="down", said="/health: Cannot connect to host"),
    recorded(
        "nobody listens at first (`--wait-for-server`)", "html", name="up_late", tries=0, starts="late", options=WAITING
    ),
    refused("every connection closed at once", "closed_before_the_reply", "everything"),
    refused("every connection reset at once", "reset_before_the_reply", "everything"),
    refused("no answer", "never_answers", "everything", said="no answer in time"),
    refused("another protocol", "noise", "everything", said="does not speak HTTP"),
    refused(
        "TLS behind `http://`", "speaks_tls", "everything", name="tls_behind_http", said="/health: Server disconnected"
    ),
    refused(
        "plain HTTP behind `https://`", "html", "everything", name="http_behind_https", said="http:// or https://?"
    ),
    refused(
        "a certificate that nobody vouches for",
        "speaks_tls",
        "everything",
        name="unknown_certificate",
        said="SSL_CERT_FILE",
    ),
    refused("HTML on every route", "html", "everything"),
    refused("every route redirected", "redirect_308", "everything"),
    refused("every route redirected to itself", "redirect_to_itself", "everything", said="it points to /health"),
    refused("401 on every route", "status_401", "everything"),
    refused("loading (503)", "status_503", "everything", said="--wait-for-server"),
    recorded(
        "loading at first (`--wait-for-server`)",
        "status_503",
        name="loading_at_first",
        scope="/health",
        tries=3,
        options=WAITING,
    ),
    refused("health answers 500", "status_500", "/health"),
    refused("a model list that is none", "json_list", "/v1/models"),
    refused("tokens that are none", "html", "/tokenize"),
    recorded(
        "404 for version, metrics and tokenizer", "status_404", name="few_routes", scope="/version /metrics /tokenize"
    ),
    recorded(
        "health fails in mid-run, generation works",
        "status_500",
        name="health_fails_later",
        sends=None,
        scope="/health /v1/models",
        after=1,
    ),
    failed(
        "health works, every generation is answered 503",
        "status_503",
        REFUSED_BY_SERVER,
        sends=MOST_SENDS,
        name="all_503",
        scope="samples",
    ),
    ended("dies", "dies", said="cannot be reached"),
    ended("resets every connection from then on", "resets_from_now_on", said="cannot be reached"),
    recorded("dies twice, and is started again", "dies_and_is_started_again", sends=None, tries=1),
    ended("vLLM's engine ends: 500 for ever", "engine_ends", said="EngineCore"),
    recorded("vLLM's engine ends, and is started again", "engine_ends_and_is_started_again", sends=None, tries=1),
)

CASES: tuple[Case, ...] = (*CONNECTIONS, *STATUSES, *BODIES, *ODD_BUT_SOUND, *BREACHES, *SERVERS)
"""The whole table."""


def readme_table() -> str:
    """The table as Markdown: faults of one outcome share a line."""
    groups: dict[tuple[Outcome, str, str], list[str]] = {}
    for case in sorted(CASES, key=lambda case: (list(Outcome).index(case.outcome), case.sends or MOST_SENDS + 1)):
        sends = "" if case.outcome in (Outcome.ENDED, Outcome.REFUSED) else str(case.sends or "1 or more")
        groups.setdefault((case.outcome, case.error or "", sends), []).append(case.words)
    lines = ["| outcome | attempts | exit code | what the server does |", "| --- | --- | --- | --- |"]
    for (outcome, error, sends), words in groups.items():
        named = outcome.value + (f", `{error}`" if error else "")
        when = {"2": "once: ", str(MOST_SENDS): "every time: "}.get(sends, "")
        code = "0 or 3" if outcome is Outcome.EITHER else str(int(EXIT_CODES[outcome]))
        lines.append(f"| {named} | {sends} | {code} | {when}{_in_words(words)} |")
    return "\n".join(lines)


def _in_words(words: Sequence[str]) -> str:
    """Each once, the statuses among them together."""
    statuses = ", ".join(word for word in words if word.isdigit())
    rest = list(dict.fromkeys(word for word in words if not word.isdigit()))
    return "; ".join([f"HTTP {statuses}", *rest] if statuses else rest)


if __name__ == "__main__":
    print(readme_table())
