from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from managed_cli.node import SequenceNode
from managed_cli.storage.shards import open_output
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB
from tests.cli.command import ESCAPE, on_a_terminal, shown
from tests.storage.rows import RUN_FACTS, make_node


def conversation(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> SequenceNode:
    """A row of prompts and sampled answers, as a run records it."""
    tokens: list[int] = []
    sampled: list[bool] = []
    spans = []
    for prompt, answer in turns:
        prompt_ids, answer_ids = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
        begin = len(tokens) + len(prompt_ids)
        spans.append({"start": begin, "end": begin + len(answer_ids), "finish_reason": "stop", "text": answer})
        tokens += prompt_ids + answer_ids
        sampled += [False] * len(prompt_ids) + [True] * len(answer_ids)
    return SequenceNode(
        full_text=tokenizer.decode(tokens, skip_special_tokens=False),
        tokens=tokens,
        masked_tokens=[token if kept else IGNORED_TOKEN_ID for token, kept in zip(tokens, sampled, strict=True)],
        logprobs=[-0.25 if kept else MASKED_LOGPROB for kept in sampled],
        metadata={**make_node().metadata, "turns": spans},
    )


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """A tokenizer of single bytes in a directory of its own, as a local model has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model", tokenizer


class TestRowText:
    def record(self, path: Path, node: SequenceNode, **facts: object) -> Path:
        with open_output(str(path), run_facts={**RUN_FACTS, **facts}, rows_per_shard=1, overwrite=False) as output:
            output.add([node])
            return output.finish()

    def test_sampled_parts_stand_between_marks_token_by_token(
        self, tmp_path: Path, byte_tokenizer: tuple[Path, Tokenizer]
    ) -> None:
        directory, tokenizer = byte_tokenizer
        node = conversation(tokenizer, [("4+3?", "4"), (" sure? 4?", "é4")])
        text = shown(self.record(tmp_path / "out.parquet", node, tokenizer=str(directory)), "--row", 0)
        assert "\n4+3?⟦4⟧ sure? 4?⟦é4⟧\n" in text
        assert "(part of the next)\n" in text
        assert '"é"\n' in text

    def test_a_tokenizer_that_does_not_give_the_text_back_is_not_used(
        self, tmp_path: Path, byte_tokenizer: tuple[Path, Tokenizer]
    ) -> None:
        directory, tokenizer = byte_tokenizer
        node = conversation(tokenizer, [("hello", "there")]).model_copy(update={"full_text": "another text"})
        text = shown(self.record(tmp_path / "out.parquet", node, tokenizer=str(directory)), "--row", 0)
        assert "⟦" not in text
        assert "cannot be told without the tokenizer" in text

    def test_without_a_tokenizer_the_turns_texts_are_marked_where_there_is_one_place_for_them(
        self, tmp_path: Path, byte_tokenizer: tuple[Path, Tokenizer]
    ) -> None:
        _, tokenizer = byte_tokenizer
        sure = conversation(tokenizer, [("six times seven? ", "42 it is."), (" sure about 42? ", "yes, 42")])
        text = shown(self.record(tmp_path / "sure.parquet", sure), "--row", 0)
        assert "\nsix times seven? ⟦42 it is.⟧ sure about 42? ⟦yes, 42⟧\n" in text

        ambiguous = conversation(tokenizer, [("4+0? ", "4"), (" sure? ", "yes")])
        text = shown(self.record(tmp_path / "ambiguous.parquet", ambiguous), "--row", 0)
        assert "\n4+0? 4 sure? yes\n" in text

    def test_a_damaged_tokenizer_file_is_passed_over(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "tokenizer.json").write_text("{")
        finished = self.record(tmp_path / "out.parquet", make_node(), tokenizer={"name": str(tmp_path / "model")})
        assert "sampled between" in shown(finished, "--row", 0)

    def test_colour_follows_the_probability(self, tmp_path: Path, byte_tokenizer: tuple[Path, Tokenizer]) -> None:
        directory, tokenizer = byte_tokenizer
        node = conversation(tokenizer, [("q", "abcd")])
        node = node.model_copy(update={"logprobs": [1.0, -0.01, -0.5, -2.0, -9.0]})
        finished = self.record(tmp_path / "out.parquet", node, tokenizer=str(directory))
        text = on_a_terminal(finished, "--row", 0)
        assert f"{ESCAPE}[2mq" in text
        for letter, colour in (("a", "32"), ("b", "33"), ("c", "35"), ("d", "1;31")):
            assert f"{ESCAPE}[{colour}m{letter}" in text
