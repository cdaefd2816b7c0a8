"""A checkup: one probe after the other, until one finds that the rest cannot be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from managed_cli.backends.base import Backend
from managed_cli.backends.openai import NO_TOKEN_IDS
from managed_cli.doctor import probes
from managed_cli.doctor.findings import Checkup, Finding, Level, ok, unsafe
from managed_cli.doctor.template import examine_tokenizer
from managed_cli.errors import ManagedCliError, ServerUnreachable
from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.dummy import OPT_IN_VARIABLE
from managed_cli.managed.servers import ANSWERS_SECONDS, Server, expecting_answers, server_for
from managed_cli.tokenizers import LlamaCppTokenizer, load_tokenizer
from managed_cli.types import Message, ServerInfo, Tokenizer

Probe = Callable[[], Awaitable[Finding | list[Finding]]]

SAMPLING_SECONDS = 600.0
"""After which a server that has sampled one token, and then no more, has hung: no probe asks for more tokens than
one a second, so that a slow server is not taken for one."""


async def examine_server(config: APIServerConfig) -> Checkup:
    """Everything that can be found out about a server and its tokenizer by asking; it samples some hundred tokens.

    Raises:
        ConfigError: the server cannot be addressed, or the embedded engine cannot be started, as configured.
        ServerUnreachable: the embedded engine cannot load its weights.
    """
    server = server_for(config)
    backend = await server.connected()
    findings: list[Finding] = []
    try:
        await _examine(server, backend, findings)
    finally:
        await backend.aclose()
    address = "in this process" if config.server_type == "local" else f"at {backend.base_url}"
    return Checkup(subject=f"{config.server_type} {address}", findings=findings)


def examine_tokenizer_alone(name: str) -> Checkup:
    """What the tokenizer and its chat template do, without a server.

    Raises:
        TokenizerError: it does not load here.
    """
    tokenizer = load_tokenizer(name)
    loaded = ok("tokenizer", f"{tokenizer.vocab_size:,} ids")
    return Checkup(subject=f"tokenizer {name}", findings=[loaded, *examine_tokenizer(tokenizer)])


async def _examine(server: Server, backend: Backend, findings: list[Finding]) -> None:
    """All findings, in order; they end where the server cannot be spoken to."""
    try:
        await backend.wait_until_ready(server.config.wait_for_server)
        async with expecting_answers(backend):
            info = await backend.probe()
    except ManagedCliError as error:
        findings.append(probes.fault_of("reachable", error))
        return
    findings += [ok("reachable", "it answers"), *probes.about_server(backend)]
    if server.config.server_type == "openai":
        advice = f"{OPT_IN_VARIABLE}=1 records marked placeholders, to try out code with; they are never training data"
        findings.append(unsafe("token ids", NO_TOKEN_IDS, advice))
        return
    findings.append(probes.about_logprobs(backend))
    tokenizer = await _examined_tokenizer(server, backend, info, findings)
    if tokenizer is None:
        return
    try:
        await _sample(backend, tokenizer, findings)
        findings += await asyncio.to_thread(lambda: list(examine_tokenizer(tokenizer)))
    except ServerUnreachable as error:
        findings.append(unsafe("reachable", f"it went away: {error.message}", "see the server's own log"))
    finally:
        if isinstance(tokenizer, LlamaCppTokenizer):
            tokenizer.close()


async def _examined_tokenizer(
    server: Server, backend: Backend, info: ServerInfo, findings: list[Finding]
) -> Tokenizer | None:
    """The tokenizer, where its ids are the server's; ids of another one would only show what they do to a model."""
    try:
        tokenizer = await asyncio.to_thread(server.loaded_tokenizer, backend, info)
        backend.limit_vocabulary(tokenizer.vocab_size)
        backend.know_end_tokens(tokenizer.eos_token_ids)
        async with expecting_answers(backend):
            findings.append(await probes.ids_of_texts(backend, tokenizer))
    except ManagedCliError as error:
        findings.append(probes.fault_of("tokenizer", error))
    return None if findings[-1].level is Level.UNSAFE else tokenizer


async def _sample(backend: Backend, tokenizer: Tokenizer, findings: list[Finding]) -> None:
    """What is found by sampling.

    Raises:
        ServerUnreachable: the server went away.
    """
    texts, chat = await asyncio.to_thread(_prompts, tokenizer)
    text = texts[0]
    asked: tuple[tuple[str, Probe], ...] = (
        ("prompt ids", lambda: probes.prompt_ids_are_kept(backend, tokenizer)),
        ("choices", lambda: probes.choices_are_whole(backend, text)),
        ("seeds", lambda: probes.seeds_are_honoured(backend, text)),
        ("alignment", lambda: probes.logprobs_belong_to_their_ids(backend, texts)),
        ("prompt logprobs", lambda: probes.largest_top_k(backend, text)),
        ("end token", lambda: probes.end_of_turn_is_recorded(backend, tokenizer, chat)),
        ("stop strings", lambda: probes.stop_strings(backend, tokenizer, texts)),
    )
    for check, probe in asked:
        # The first asks for one token, which a server that is up gives as soon as it answers anything else.
        seconds = ANSWERS_SECONDS if probe is asked[0][1] else SAMPLING_SECONDS
        try:
            async with expecting_answers(backend, seconds):
                found = await probe()
        except ServerUnreachable:
            raise
        except (ManagedCliError, NotImplementedError) as error:
            found = probes.fault_of(check, error)
        findings += found if isinstance(found, list) else [found]


def _prompts(tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """Text prompts, and a chat, for which a model without a chat template gets the first of them."""
    texts = [tokenizer.encode_prompt(text) for text in probes.PROMPTS]
    messages: list[Message] = [{"role": "user", "content": probes.QUESTION}]
    try:
        return texts, tokenizer.encode_rendered(tokenizer.render_chat(messages))
    except ServerUnreachable:
        raise
    except ManagedCliError:
        return texts, texts[0]
