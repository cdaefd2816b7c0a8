"""What a checkup says of a tokenizer and its chat template, by templates made for it and by real ones."""

from __future__ import annotations

import pytest
import transformers

from managed_cli.doctor.findings import Finding, Level
from managed_cli.doctor.template import examine_tokenizer
from managed_cli.tokenizers import HuggingFaceTokenizer
from tests.servers.tokenizer import CHAT_TEMPLATE, shared_tokenizer_directory
from tests.tokenizers import catalog

Told = dict[str, Finding]
CONTENT = "message['content']"


def told(tokenizer: HuggingFaceTokenizer) -> Told:
    return {finding.check: finding for finding in examine_tokenizer(tokenizer)}


def with_template(template: str | None) -> HuggingFaceTokenizer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_tokenizer_directory())
    tokenizer.chat_template = template
    return HuggingFaceTokenizer("made for this test", tokenizer)


def levels(found: Told) -> dict[str, Level]:
    return {check: finding.level for check, finding in found.items()}


def test_a_template_that_writes_everything_as_it_was_is_right_throughout() -> None:
    assert levels(told(with_template(CHAT_TEMPLATE))) == dict.fromkeys(
        (
            "text and ids",
            "BOS",
            "generation prompt",
            "end of turn",
            "history: plain",
            "history: think",
            "history: spaces",
        ),
        Level.OK,
    )


def test_a_template_that_drops_think_blocks_is_shown_by_the_first_differing_token() -> None:
    template = CHAT_TEMPLATE.replace(CONTENT, f"{CONTENT}.split('</think>')[-1].lstrip('\\n')")
    found = told(with_template(template))
    assert found["history: plain"].level is Level.OK
    finding = found["history: think"]
    assert finding.level is Level.NOTE
    assert "'<think>' was sampled" in finding.said or "'<' was sampled" in finding.said
    assert "--history verbatim" in (finding.advice or "")


def test_a_template_that_trims_answers_is_shown_by_the_first_differing_token() -> None:
    found = told(with_template(CHAT_TEMPLATE.replace(CONTENT, f"{CONTENT} | trim")))
    assert levels(found)["history: plain"] is Level.OK
    assert found["history: spaces"].level is Level.NOTE
    assert "was sampled, and the second turn has" in found["history: spaces"].said


def test_a_template_that_opens_a_think_block_says_that_answers_begin_inside_of_one() -> None:
    found = told(with_template(CHAT_TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")))
    assert found["generation prompt"].level is Level.NOTE
    assert "it opens a think block" in found["generation prompt"].said
    assert found["history: plain"].level is Level.NOTE
    assert "history: think" not in found


def test_a_template_without_a_generation_prompt_is_told() -> None:
    found = told(with_template(CHAT_TEMPLATE.replace("add_generation_prompt", "false")))
    assert found["generation prompt"].level is Level.NOTE
    assert "adds nothing" in found["generation prompt"].said


def test_a_system_message_that_nobody_gave_is_shown() -> None:
    opening = "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}"
    found = told(with_template(opening + CHAT_TEMPLATE))
    assert found["system message"].level is Level.NOTE
    assert "You are helpful." in found["system message"].said


def test_an_answer_that_the_template_ends_with_no_end_token_is_told() -> None:
    found = told(with_template(CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>")))
    assert found["end of turn"].level is Level.NOTE
    assert "'<|endoftext|>' (id 0), which is none of the end tokens: '<|im_end|>'" in found["end of turn"].said


def test_a_bos_that_the_template_writes_twice_is_unsafe_and_once_is_right() -> None:
    def with_bos(text: str) -> Finding:
        tokenizer = transformers.AutoTokenizer.from_pretrained(shared_tokenizer_directory())
        tokenizer.chat_template = text + CHAT_TEMPLATE
        return told(HuggingFaceTokenizer("with BOS", tokenizer, bos_token_id=0))["BOS"]

    assert with_bos("<|endoftext|>").level is Level.OK
    assert with_bos("<|endoftext|><|endoftext|>").level is Level.UNSAFE
    absent = with_bos("")
    assert (absent.level, "the chat template does not write it" in absent.said) == (Level.NOTE, True)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('only tools here') }}"])
def test_a_template_that_is_not_there_or_refuses_leaves_the_rest_unknown(template: str | None) -> None:
    found = told(with_template(template))
    assert levels(found) == {"text and ids": Level.OK, "chat template": Level.UNKNOWN}


def test_a_tokenizer_that_does_not_give_text_back_is_told_with_the_text() -> None:
    class Lossy(HuggingFaceTokenizer):
        def decode(self, token_ids: object, *, skip_special_tokens: bool = False) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).replace("  ", " ")  # type: ignore[arg-type]

    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_tokenizer_directory())
    finding = told(Lossy("lossy", tokenizer))["text and ids"]
    assert finding.level is Level.NOTE
    assert "two leading spaces" in finding.said


@pytest.mark.parametrize(
    ("name", "rewritten"),
    [
        ("smollm2", set()),
        ("qwen3", {"history: think"}),
        ("llama3_1", {"history: spaces"}),
        ("gemma3", {"history: spaces"}),
        ("deepseek_v3", set()),
    ],
)
def test_real_templates_rewrite_what_they_are_known_to_rewrite(name: str, rewritten: set[str]) -> None:
    found = told(catalog.loaded(name))
    assert {check for check, finding in found.items() if "rewritten" in finding.said} == rewritten
    assert found["BOS"].level is Level.OK
    assert found["end of turn"].level is Level.OK
    assert not [finding for finding in found.values() if finding.level is Level.UNSAFE]


def test_qwen3_is_shown_to_drop_the_think_token_itself() -> None:
    said = told(catalog.loaded("qwen3"))["history: think"].said
    assert said == "rewritten: at token 15 '<think>' was sampled, and the second turn has 'Paris'"
