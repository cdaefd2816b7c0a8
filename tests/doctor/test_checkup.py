"""A checkup of servers that are right, and of servers that are each wrong in one way: fakes as real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from managed_cli.backends.base import Backend, BackendConfig
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.doctor import probes
from managed_cli.doctor.checkup import SAMPLING_SECONDS, examine_server
from managed_cli.doctor.findings import Checkup, Finding, Level
from managed_cli.managed.config import APIServerConfig
from managed_cli.tokenizers import load_tokenizer
from managed_cli.types import GenerationReply, PromptLogprobs, SamplingParams
from tests.servers.mutate import NAMES
from tests.servers.process import RunningServer, running_server
from tests.servers.tokenizer import shared_tokenizer_directory

SAMPLED = ("prompt ids", "choices", "seeds", "alignment", "end token", "stop strings")


def checkup(server: RunningServer, **settings: object) -> Checkup:
    config = APIServerConfig(server_type=server.kind, base_url=server.url, **settings)
    return asyncio.run(examine_server(config))


def by_check(result: Checkup) -> dict[str, Finding]:
    return {finding.check: finding for finding in result.findings}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("vllm", {}),
        ("sglang", {}),
        ("llamacpp", {}),
        ("trl", {"tokenizer_name": str(shared_tokenizer_directory()), "context_length": 2048}),
    ],
)
def test_a_server_that_keeps_its_contract_is_safe(kind: str, settings: dict[str, object]) -> None:
    with running_server(kind, record=False) as server:
        result = checkup(server, **settings)
    assert result.is_safe, result.findings
    found = by_check(result)
    assert found["model"].level is (Level.NOTE if kind == "trl" else Level.OK), "TRL's own server names none"
    for check in (*SAMPLED, "reachable", "context", "distinct choices", "text and ids", "history: plain"):
        assert found[check].level in (Level.OK, Level.UNKNOWN), found[check]
    assert found["end token"].level is Level.OK
    assert "'<|im_end|>' (id 2) stands in the ids" in found["end token"].said
    assert found["stop strings"].level is Level.OK
    assert found["alignment"].level is (Level.UNKNOWN if kind == "llamacpp" else Level.OK)


@pytest.mark.parametrize("most", [1, 7, 20])
def test_the_largest_top_k_of_prompt_logprobs_is_found_exactly(most: int) -> None:
    with running_server("vllm", "--max-logprobs", most, record=False) as server:
        assert by_check(checkup(server))["prompt logprobs"].said == f"up to top-k {most}"


def test_where_no_top_k_is_refused_the_search_ends_at_the_vocabulary() -> None:
    with running_server("sglang", record=False) as server:
        assert by_check(checkup(server))["prompt logprobs"].said == "up to top-k 640 at least"


@pytest.mark.parametrize(
    ("mode", "words"), [("raw", "raw: before temperature"), ("processed", "processed: after temperature and filters")]
)
def test_the_stage_of_logprobs_is_found_by_probing(mode: str, words: str) -> None:
    with running_server("vllm", "--logprobs-mode", mode, record=False) as server:
        result = checkup(server)
    assert (
        by_check(result)["logprobs"].said
        == f"{words}{' and filters' if mode == 'raw' else ''} (probed at two temperatures)"
    )
    assert result.is_safe


BREACHES = [name for name in NAMES if name not in ("wrong_tokenizer", "abort_finish", "truncated_json")]


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_contract_is_unsafe_and_is_told_with_the_server(breach: str) -> None:
    with running_server("vllm", "--mutate", breach, record=False) as server:
        result = checkup(server)
        assert not result.is_safe
        wrong = [finding for finding in result.findings if finding.level is Level.UNSAFE]
        assert {finding.check for finding in wrong} <= {*SAMPLED, "prompt logprobs", "reachable"}
        assert all(f"vllm at {server.url}" in finding.said for finding in wrong)
        assert all(finding.advice for finding in wrong)


def test_no_probe_asks_for_more_tokens_than_a_slow_server_samples_in_its_time() -> None:
    class Counting(VLLMBackend):
        tokens = 0

        async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
            self.tokens += sampling.n * sampling.max_tokens
            return await super().generate(prompt_ids, sampling)

    async def asked(server: RunningServer) -> dict[str, int]:
        backend, tokenizer = Counting(BackendConfig(base_url=server.url)), load_tokenizer(str(server.tokenizer_dir))
        texts = [tokenizer.encode_prompt(text) for text in probes.PROMPTS]
        try:
            await backend.probe()
            backend.limit_vocabulary(tokenizer.vocab_size)
            found = {}
            for name, probe in (
                ("prompt ids", lambda: probes.prompt_ids_are_kept(backend, tokenizer)),
                ("choices", lambda: probes.choices_are_whole(backend, texts[0])),
                ("seeds", lambda: probes.seeds_are_honoured(backend, texts[0])),
                ("alignment", lambda: probes.logprobs_belong_to_their_ids(backend, texts)),
                ("end token", lambda: probes.end_of_turn_is_recorded(backend, tokenizer, texts[0])),
                ("stop strings", lambda: probes.stop_strings(backend, tokenizer, texts)),
            ):
                backend.tokens = 0
                await probe()
                found[name] = backend.tokens
            return found
        finally:
            await backend.aclose()

    # Replies that never end, so that every probe asks as often as it ever does.
    with running_server("vllm", "--tokens-per-reply", 4000, record=False) as server:
        tokens = asyncio.run(asked(server))
    assert tokens["prompt ids"] == 1
    assert tokens["end token"] == sum(n * most for n, most in probes.ENDINGS)
    assert max(tokens.values()) <= SAMPLING_SECONDS, tokens


def test_a_server_whose_replies_are_no_json_is_unsafe_at_once() -> None:
    with running_server("vllm", "--mutate", "truncated_json", record=False) as server:
        result = checkup(server)
    assert [finding.check for finding in result.findings] == ["reachable"]
    assert not result.is_safe


def test_choices_that_the_server_aborts_are_told() -> None:
    with running_server("vllm", "--mutate", "abort_finish", record=False) as server:
        found = by_check(checkup(server))
    assert found["finish reason"].level is Level.NOTE
    assert "ended as 'abort'" in found["finish reason"].said


def test_ids_of_another_tokenizer_are_unsafe_and_nothing_is_sampled_with_them(tmp_path: Path) -> None:
    with running_server("vllm", "--mutate", "wrong_tokenizer") as server:
        result = checkup(server)
        prompts = [entry["body"]["prompt"] for entry in server.records()]
    assert by_check(result)["tokenizer"].level is Level.UNSAFE
    assert "name the model's own tokenizer with --tokenizer" in (by_check(result)["tokenizer"].advice or "")
    assert result.findings[-1].check == "tokenizer"
    assert all(isinstance(prompt, str) for prompt in prompts), "only the text prompts of the logprobs probe"


def test_a_tokenizer_that_does_not_load_is_unsafe(tmp_path: Path) -> None:
    with running_server("vllm", record=False) as server:
        result = checkup(server, tokenizer_name=str(tmp_path))
    assert result.findings[-1].level is Level.UNSAFE
    assert "cannot be loaded here" in result.findings[-1].said


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trl", "llamacpp"])
def test_a_server_that_is_not_there_is_one_finding(kind: str) -> None:
    config = APIServerConfig(server_type=kind, base_url="http://127.0.0.1:9")
    result = asyncio.run(examine_server(config))
    assert [(finding.check, finding.level) for finding in result.findings] == [("reachable", Level.UNSAFE)]
    assert "cannot be reached" in result.findings[0].said


def test_a_server_of_another_kind_is_one_finding() -> None:
    with running_server("llamacpp", record=False) as server:
        config = APIServerConfig(server_type="sglang", base_url=server.url)
        result = asyncio.run(examine_server(config))
    assert [finding.level for finding in result.findings] == [Level.UNSAFE]
    assert "--server-type" in (result.findings[0].advice or "")


def test_a_server_that_goes_away_during_the_checkup_ends_it_and_what_was_found_stays() -> None:
    with running_server("vllm", "--die-after", 6, record=False) as server:
        result = checkup(server)
    assert not result.is_safe
    assert "it went away" in result.findings[-1].said
    assert by_check(result)["tokenizer"].level is Level.OK


def test_an_openai_endpoint_explains_why_nothing_of_it_is_data() -> None:
    with running_server("openai", record=False) as server:
        result = checkup(server, model_name="m")
        assert server.stats()["generations"] == 0
    finding = result.findings[-1]
    assert (finding.check, finding.level) == ("token ids", Level.UNSAFE)
    assert "no token ids" in finding.said
    assert "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1" in (finding.advice or "")


class Altered(VLLMBackend):
    """A vLLM whose replies are changed behind the contract checks, as a proxy between would."""

    change: Callable[[GenerationReply, SamplingParams], GenerationReply]

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
        return type(self).change(await super().generate(prompt_ids, sampling), sampling)


def without_end_tokens(reply: GenerationReply, _: SamplingParams) -> GenerationReply:
    cut = [
        msgspec.structs.replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1])
        if c.end_token_id is not None
        else c
        for c in reply.choices
    ]
    return msgspec.structs.replace(reply, choices=tuple(cut))


def all_the_same(reply: GenerationReply, _: SamplingParams) -> GenerationReply:
    return msgspec.structs.replace(reply, choices=tuple(reply.choices[0] for _ in reply.choices))


def logprobs_one_too_late(reply: GenerationReply, _: SamplingParams) -> GenerationReply:
    moved = [msgspec.structs.replace(c, logprobs=[-9.0, *c.logprobs[:-1]]) for c in reply.choices]
    return msgspec.structs.replace(reply, choices=tuple(moved))


def probed(
    change: Callable[[GenerationReply, SamplingParams], GenerationReply],
    probe: Callable[[Backend, list[list[int]]], object],
) -> object:
    """What a probe finds on a server whose replies are changed."""

    async def run(server: RunningServer) -> object:
        kind = type("Changed", (Altered,), {"change": staticmethod(change)})
        backend = kind(BackendConfig(base_url=server.url))
        try:
            await backend.probe()
            tokenizer = load_tokenizer(str(server.tokenizer_dir))
            backend.limit_vocabulary(tokenizer.vocab_size)
            return await probe(backend, [tokenizer.encode_prompt(text) for text in probes.PROMPTS])  # type: ignore[misc]
        finally:
            await backend.aclose()

    with running_server("vllm", record=False) as server:
        return asyncio.run(run(server))


def test_end_tokens_that_were_left_out_of_the_ids_are_unsafe() -> None:
    tokenizer = load_tokenizer(str(shared_tokenizer_directory()))
    found = probed(without_end_tokens, lambda b, p: probes.end_of_turn_is_recorded(b, tokenizer, p[0]))
    assert isinstance(found, Finding)
    assert found.level is Level.UNSAFE
    assert "the end token was left out" in found.said


def test_choices_that_are_all_the_same_are_unsafe() -> None:
    found = probed(all_the_same, lambda b, p: probes.choices_are_whole(b, p[0]))
    assert isinstance(found, list)
    assert [finding.level for finding in found] == [Level.OK, Level.UNSAFE]


def test_logprobs_that_are_moved_by_one_position_are_unsafe() -> None:
    found = probed(logprobs_one_too_late, lambda b, p: probes.logprobs_belong_to_their_ids(b, p))
    assert isinstance(found, Finding)
    assert found.level is Level.UNSAFE


@pytest.mark.parametrize(("honour", "level"), [("never", Level.NOTE), ("always_one", Level.UNSAFE)])
def test_seeds_that_are_not_honoured_are_told_and_one_seed_for_all_is_unsafe(honour: str, level: Level) -> None:
    class Seeds(VLLMBackend):
        sent = 0

        async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
            self.sent += 1
            seed = self.sent if honour == "never" else 1
            return await super().generate(prompt_ids, msgspec.structs.replace(sampling, seed=seed))

    async def run(server: RunningServer) -> Finding:
        backend = Seeds(BackendConfig(base_url=server.url))
        try:
            await backend.probe()
            return await probes.seeds_are_honoured(backend, [5, 6, 7])
        finally:
            await backend.aclose()

    with running_server("vllm", record=False) as server:
        assert asyncio.run(run(server)).level is level


def test_a_server_that_does_not_stop_at_stop_strings_is_told() -> None:
    class Deaf(VLLMBackend):
        async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> GenerationReply:
            return await super().generate(prompt_ids, msgspec.structs.replace(sampling, stop=()))

    async def run(server: RunningServer) -> Finding:
        backend, tokenizer = Deaf(BackendConfig(base_url=server.url)), load_tokenizer(str(server.tokenizer_dir))
        try:
            await backend.probe()
            return await probes.stop_strings(backend, tokenizer, [tokenizer.encode_prompt(t) for t in probes.PROMPTS])
        finally:
            await backend.aclose()

    with running_server("vllm", record=False) as server:
        found = asyncio.run(run(server))
    assert found.level is Level.NOTE
    assert "did not end the reply" in found.said


def test_a_server_that_scores_no_prompts_leaves_the_alignment_unknown() -> None:
    class Mute(VLLMBackend):
        async def prompt_logprobs(self, prompt_ids: Sequence[int], top_k: int) -> PromptLogprobs:
            raise NotImplementedError("no prompt logprobs here")

    async def run(server: RunningServer) -> list[Finding]:
        backend = Mute(BackendConfig(base_url=server.url))
        try:
            await backend.probe()
            return [
                await probes.logprobs_belong_to_their_ids(backend, [[5, 6, 7]]),
                await probes.largest_top_k(backend, [5, 6, 7]),
            ]
        finally:
            await backend.aclose()

    with running_server("vllm", record=False) as server:
        assert [finding.level for finding in asyncio.run(run(server))] == [Level.UNKNOWN, Level.NOTE]
