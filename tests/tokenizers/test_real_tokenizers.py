"""Our rules for tokens and text, on real tokenizers and their chat templates."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from managed_cli.errors import InputError, TokenizerError
from managed_cli.tokenizers import PROBE_TEXTS, HuggingFaceTokenizer, load_tokenizer
from tests.tokenizers import catalog

TEXTS = st.text(max_size=40) | st.sampled_from(
    ["", " ", "  two", " leading", "trailing ", "\n", "\n\n", "don't . stop", "漢字", "🦜🏴", "\ta\r\n", "42", "é"]
)

USER = {"role": "user", "content": "What is 6 times 7?"}
ANSWER = {"role": "assistant", "content": "42"}

quick = settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def over_all(test: Callable[[str], None]) -> Callable[[str], None]:
    """The test once for each tokenizer of the catalogue."""
    return pytest.mark.parametrize("name", catalog.NAMES)(test)


@functools.cache
def texts_that_survive(name: str) -> Callable[[str], bool]:
    """Whether a tokenizer can hold a text at all: its characters, one by one, and no special token's text in it."""
    tokenizer = catalog.loaded(name)
    specials = list(tokenizer._tokenizer.added_tokens_decoder.values())

    def survives(text: str) -> bool:
        if any(str(special) in text for special in specials):
            return False
        ids = tokenizer.encode_rendered(f"a{text}")
        return tokenizer.decode(ids) == f"a{text}"

    return survives


@over_all
def test_a_suffix_decodes_to_itself_behind_other_tokens(name: str) -> None:
    tokenizer, survives = catalog.loaded(name), texts_that_survive(name)
    end = catalog.end_ids(name)[0]

    @quick
    @given(before=st.sampled_from(["Hello", "The answer is", "x\n", "42"]), text=TEXTS)
    def holds(before: str, text: str) -> None:
        if not survives(text):
            return
        ids = tokenizer.encode_rendered(before)
        suffix = tokenizer.encode_suffix(text)
        assert tokenizer.decode([*ids, *suffix]) == tokenizer.decode(ids) + text
        assert tokenizer.decode([*ids, end, *suffix]) == tokenizer.decode([*ids, end]) + text

    holds()


@over_all
def test_ids_sampled_at_random_are_kept_by_decoding_in_front_of_a_suffix(name: str) -> None:
    tokenizer = catalog.loaded(name)
    suffix = tokenizer.encode_suffix(" and so on")

    @quick
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    def holds(ids: list[int]) -> None:
        start = tokenizer.encode_rendered("start")
        assert tokenizer.decode([*start, *ids, *suffix]) == tokenizer.decode([*start, *ids]) + " and so on"

    holds()


def test_sentencepiece_puts_no_space_before_a_suffix() -> None:
    tokenizer = catalog.loaded("llama2")
    assert tokenizer.encode_rendered("Paris") == tokenizer.encode_suffix(" Paris")  # what encoding alone does
    assert tokenizer.encode_suffix("Paris") != tokenizer.encode_suffix(" Paris")


@over_all
def test_bos_stands_once_before_a_text_prompt(name: str) -> None:
    tokenizer, bos = catalog.loaded(name), catalog.CATALOG[name].bos
    plain = tokenizer.encode_rendered("Once upon a time")
    if not bos:
        assert tokenizer.prompt_prefix == []
        assert tokenizer.encode_prompt("Once upon a time") == plain
        assert tokenizer.prompt_text("Once upon a time") == "Once upon a time"
        return
    (bos_id,) = tokenizer.encode_rendered(bos)
    assert tokenizer.encode_prompt("Once upon a time") == [bos_id, *plain]
    for text in ("Once upon a time", f"{bos}Once upon a time"):
        assert tokenizer.encode_prompt(text).count(bos_id) == 1
        assert tokenizer.prompt_text(text) == f"{bos}Once upon a time"


@over_all
def test_bos_stands_once_in_a_rendered_chat(name: str) -> None:
    tokenizer, bos = catalog.loaded(name), catalog.CATALOG[name].bos
    ids = tokenizer.encode_rendered(tokenizer.render_chat([USER, ANSWER, USER]))
    if bos:
        (bos_id,) = tokenizer.encode_rendered(bos)
        assert (ids[0], ids.count(bos_id)) == (bos_id, 1)
    assert (
        ids == tokenizer._tokenizer.apply_chat_template([USER, ANSWER, USER], add_generation_prompt=True)["input_ids"]
    )


@over_all
def test_a_rendered_chat_is_spelled_by_its_ids(name: str) -> None:
    tokenizer = catalog.loaded(name)
    text = tokenizer.render_chat([{"role": "user", "content": "  two spaces\nand 🦜 don't ."}, ANSWER, USER])
    ids = tokenizer.encode_rendered(text)
    assert tokenizer.encode_rendered(tokenizer.decode(ids)) == ids or name == "llama2"
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    if name != "llama2":
        assert tokenizer.decode(ids) == text


@over_all
def test_the_vocabulary_covers_every_id(name: str) -> None:
    tokenizer = catalog.loaded(name)
    inner = tokenizer._tokenizer
    assert tokenizer.vocab_size == max(inner.get_vocab().values()) + 1
    assert max(inner.added_tokens_decoder) < tokenizer.vocab_size
    assert tokenizer.vocab_size >= len(inner)
    assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.eos_token_ids)
    assert tokenizer.decode([tokenizer.vocab_size - 1])


@over_all
def test_content_given_as_text_parts_is_the_joined_text(name: str) -> None:
    tokenizer = catalog.loaded(name)
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    whole = [{"role": "user", "content": "first\nsecond"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(whole)


@over_all
@pytest.mark.parametrize("said", ["The answer", "e", "", "im_end", "assistant", "a\nb", "  spaced  "])
def test_a_last_answer_is_left_open_behind_its_own_words(name: str, said: str) -> None:
    """Whatever the words are: the prompt is the chat of a finished answer without what follows the words."""
    tokenizer = catalog.loaded(name)
    messages = [USER, {"role": "assistant", "content": said}]
    prompt = tokenizer.render_chat(messages, continue_final_message=True)
    finished = tokenizer.render_chat(messages, add_generation_prompt=False)
    end = catalog.CATALOG[name].end_of_turn
    assert finished.startswith(prompt)
    assert finished[len(prompt) :].strip() == end
    assert prompt.endswith(said) or prompt.endswith(said.strip())


def test_a_conversation_that_a_template_refuses_is_an_input_error() -> None:
    """Gemma's template wants user and assistant in turn."""
    with pytest.raises(InputError, match="roles must alternate"):
        catalog.loaded("gemma3").render_chat([USER, USER])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ messages[9].content }}", "{{ 1 / 0 }}", "{%"]
)
def test_a_template_that_breaks_is_an_input_error(template: str) -> None:
    inner = copy.copy(catalog.loaded("smollm2")._tokenizer)
    inner.chat_template = template
    with pytest.raises(InputError, match="refuses this conversation"):
        HuggingFaceTokenizer("broken", inner).render_chat([USER])


def test_a_tokenizer_without_a_template_says_so() -> None:
    inner = copy.copy(catalog.loaded("smollm2")._tokenizer)
    inner.chat_template = None
    tokenizer = HuggingFaceTokenizer("plain", inner)
    assert tokenizer.chat_template_hash() is None
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.render_chat([USER])


@over_all
def test_loading_follows_tokenizer_json_whatever_class_the_config_names(name: str) -> None:
    raw = transformers.PreTrainedTokenizerFast.from_pretrained(catalog.directory(name)).backend_tokenizer
    ours = catalog.loaded(name)
    for text in PROBE_TEXTS:
        assert ours.encode_rendered(text) == raw.encode(text, add_special_tokens=False).ids


def test_a_byte_level_tokenizer_read_as_a_llama_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.19 reads DeepSeek V3: every space is lost, and nothing says so."""
    directory = catalog.directory("deepseek_v3")
    faithful = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    broken = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    broken.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert " " not in broken.decode(broken.encode("all spaces lost", add_special_tokens=False)).strip()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _name: broken)

    loaded = load_tokenizer(str(directory))

    assert loaded.note == "AutoTokenizer does not follow this tokenizer.json, so the file itself is used"
    for text in PROBE_TEXTS:
        assert loaded.encode_rendered(text) == faithful.encode(text, add_special_tokens=False)
        assert loaded.decode(loaded.encode_rendered(text)) == text


def test_a_tokenizer_that_is_read_as_it_is_written_has_no_note() -> None:
    assert catalog.loaded("smollm2").note is None


def test_one_that_is_not_there_is_a_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match="cannot be loaded here") as error:
        load_tokenizer("/no/such/tokenizer")
    assert error.value.hint is not None


def test_threads_can_share_a_tokenizer() -> None:
    """Long prompts are encoded in threads, many at a time."""
    tokenizer = catalog.loaded("smollm2")
    text = "The answer is 42. " * 400
    expected = tokenizer.encode_rendered(text)
    found: list[Any] = []

    def work() -> None:
        for _ in range(20):
            ids = tokenizer.encode_suffix(text)
            found.append(ids == expected and tokenizer.decode(ids) == text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 160
