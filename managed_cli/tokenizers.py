"""Tokenizers and chat templates: Hugging Face's, and llama.cpp's own behind its endpoints.

Rules that hold for both:
- BOS stands once: a text prompt gets the one its tokenizer adds, unless the text already begins with it; a rendered
  chat holds what its template wrote and gets nothing more.
- A suffix is encoded alone: no BOS, and no dummy space that SentencePiece would put before it.
- Text comes from ids with special tokens kept, unless a person is to read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from managed_cli.backends._http import SyncHttpClient
from managed_cli.errors import InputError, TokenizerError
from managed_cli.quick_encoder import Encode, quick_encoder
from managed_cli.quick_template import WriteChat, quick_template
from managed_cli.token_table import TokenTable, token_table
from managed_cli.tokenizer_files import asks_for_bos, generation_end_tokens, raw_tokenizer
from managed_cli.tracking.extension import ANSWER_PLACEHOLDER
from managed_cli.tracking.messages import flat_message
from managed_cli.types import Message, Tokenizer

SUFFIX_ANCHORS = ("\n", "¶", "x")
"""Put before a suffix that alone would get a space: the first whose ids stand unchanged in front is cut off again."""

TEMPLATE_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a chat template can raise: its own refusals, and the faults of an expression that meets unexpected messages."""

PROBE_TEXTS = (
    "Hello world",
    "  two leading spaces, then\ttab\nnewline\n\nand don't.",
    "naïve café — 12345.67 ½ ≠ 漢字 🦜🏴",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|>\n",
)
"""Texts on which two tokenizers that are the same agree, and broken ones differ (spaces, digits, accents, specials)."""


class _PromptsWithBos:
    """BOS once in front of a text prompt, for both kinds of tokenizers."""

    @property
    def prompt_prefix(self) -> list[int]:
        """The ids that belong before a text: BOS, or nothing."""
        raise NotImplementedError

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a chat template wrote; nothing is added."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; a split UTF-8 character shows as U+FFFD."""
        raise NotImplementedError

    @cached_property
    def _prefix_text(self) -> str:
        return self.decode(self.prompt_prefix)

    def prompt_text(self, text: str) -> str:
        """A text prompt as the model sees it: with the text of BOS in front, once."""
        prefix = self._prefix_text
        return text if text.startswith(prefix) else prefix + text

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text prompt, with BOS in front, once, where the model has one."""
        prefix, ids = self.prompt_prefix, self.encode_rendered(text)
        return ids if ids[: len(prefix)] == prefix else prefix + ids


class HuggingFaceTokenizer(_PromptsWithBos):
    """A tokenizer of the `transformers` library.

    Args:
        name: where it was loaded from, for people.
        tokenizer: a `PreTrainedTokenizerBase`.
        end_token_ids: further ids that end a turn, beside its own `eos_token_id`.
        bos_token_id: put before a text prompt although the tokenizer does not do so by itself; None: nothing is.
        note: what was unusual about loading it, or None.
    """

    over_network = False

    def __init__(
        self,
        name: str,
        tokenizer: Any,  # Any: transformers publishes no complete types
        *,
        end_token_ids: frozenset[int] = frozenset(),
        bos_token_id: int | None = None,
        note: str | None = None,
    ) -> None:
        self.name = name
        self.note = note
        self._tokenizer = tokenizer
        self._bos_token_id = bos_token_id
        own = tokenizer.eos_token_id
        self.eos_token_ids = end_token_ids | ({own} if isinstance(own, int) else frozenset())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return int(max(len(self._tokenizer), max(self._tokenizer.get_vocab().values()) + 1))

    @cached_property
    def prompt_prefix(self) -> list[int]:
        """The ids that belong before a text: BOS, or nothing."""
        with_specials = self._encode("a", add_special_tokens=True)
        without = self._encode("a", add_special_tokens=False)
        for start in range(len(with_specials) - len(without) + 1):
            if start and with_specials[start : start + len(without)] == without:
                return with_specials[:start]
        return [] if self._bos_token_id is None else [self._bos_token_id]

    @cached_property
    def _table(self) -> TokenTable | None:
        return token_table(self._tokenizer)

    def get_ready(self) -> None:
        """Find out now what is found out on first use, which would hold up the event loop."""
        _ = self._table, self._encode, self.prompt_text(""), self._adds_dummy_space, self.vocab_size

    @property
    def decodes_bytes(self) -> bool:
        """Whether text is that of the ids' bytes, one after the other."""
        return self._table is not None

    @cached_property
    def _adds_dummy_space(self) -> bool:
        ids = self._encode("a", add_special_tokens=False)
        return ids != self._encode("\na", add_special_tokens=False)[-len(ids) :] or self.decode(ids) != "a"

    @cached_property
    def _encode(self) -> Encode:
        return quick_encoder(self._tokenizer, PROBE_TEXTS)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a chat template wrote; nothing is added."""
        return self._encode(text, add_special_tokens=False)

    def encode_suffix(self, text: str) -> list[int]:
        """Ids of text that follows other tokens.

        Raises:
            TokenizerError: the tokenizer always adds a space, and no anchor takes it away.
        """
        if not text:
            return []
        if not self._adds_dummy_space:
            return self._encode(text, add_special_tokens=False)
        for anchor in SUFFIX_ANCHORS:
            before = self._encode(anchor, add_special_tokens=False)
            joined = self._encode(anchor + text, add_special_tokens=False)
            if joined[: len(before)] == before:
                return joined[len(before) :]
        raise TokenizerError(f"the tokenizer {self.name} cannot encode a text without putting a space before it")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; a split UTF-8 character shows as U+FFFD."""
        if self._table is not None:
            return self._table.text(token_ids, skip_special_tokens=skip_special_tokens)
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @cached_property
    def _write_chat(self) -> WriteChat:
        return quick_template(self._tokenizer, TEMPLATE_REFUSALS)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as the chat template writes it.

        Raises:
            TokenizerError: there is no chat template.
            InputError: the template refuses the conversation; its own words are given.
        """
        if not self._tokenizer.chat_template:
            raise TokenizerError(
                f"the tokenizer {self.name} has no chat template",
                hint="use text prompts (`prompt`), or another tokenizer with --tokenizer",
            )

        def written(conversation: Sequence[Message], opening: bool) -> str:
            return self._write_chat(conversation, opening, tools)

        try:
            return _rendered(written, messages, add_generation_prompt, continue_final_message)
        except TEMPLATE_REFUSALS as error:
            raise InputError(f"the chat template of {self.name} refuses this conversation: {error}") from error

    def chat_template_hash(self) -> str | None:
        """SHA-256 of the chat template, hex; None without one."""
        template = self._tokenizer.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class LlamaCppTokenizer(_PromptsWithBos):
    """The tokenizer and chat template inside a llama.cpp server, over its endpoints.

    Args:
        label: how messages name the server.
        name: the tokenizer's, the same wherever the model is served.
    """

    over_network = True
    decodes_bytes = False

    def __init__(
        self,
        base_url: str,
        *,
        label: str,
        name: str | None = None,
        api_key: str | None,
        vocab_size: int,
        chat_template: str,
        bos_token: str,
        eos_token: str,
    ) -> None:
        self.name = name or label
        self.note: str | None = None
        self.vocab_size = vocab_size
        self._http = SyncHttpClient(base_url, label=label, api_key=api_key)
        self._template = chat_template
        self.eos_token_ids = frozenset(self._special_id(eos_token))
        self._skipped = self.eos_token_ids | frozenset(self._special_id(bos_token))

    def _special_id(self, text: str) -> list[int]:
        ids = self._encode(text, add_special=False) if text else []
        return ids if len(ids) == 1 else []

    def _encode(self, text: str, *, add_special: bool) -> list[int]:
        reply = self._http.post("/tokenize", {"content": text, "add_special": add_special, "parse_special": True})
        return [int(token) for token in reply["tokens"]]

    @cached_property
    def prompt_prefix(self) -> list[int]:
        """The ids the model puts before a text by itself: BOS, or nothing."""
        with_specials = self._encode("a", add_special=True)
        without = self._encode("a", add_special=False)
        return with_specials[: len(with_specials) - len(without)] if with_specials != without else []

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what the chat template wrote; nothing is added."""
        return self._encode(text, add_special=False)

    def encode_suffix(self, text: str) -> list[int]:
        """Ids of text that follows other tokens.

        Raises:
            TokenizerError: the model's tokenizer puts a space before it that cannot be taken away.
        """
        if not text:
            return []
        alone = self._encode(text, add_special=False)
        if self.decode(alone) == text:
            return alone
        for anchor in SUFFIX_ANCHORS:
            before, joined = self._encode(anchor, add_special=False), self._encode(anchor + text, add_special=False)
            if joined[: len(before)] == before:
                return joined[len(before) :]
        raise TokenizerError(f"{self.name} cannot encode a text without putting a space before it")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; a split UTF-8 character shows as U+FFFD."""
        ids = [token for token in token_ids if token not in self._skipped] if skip_special_tokens else list(token_ids)
        return str(self._http.post("/detokenize", {"tokens": ids})["content"]) if ids else ""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON schemas
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as the model's own chat template writes it.

        Raises:
            ServerRefused: llama.cpp cannot render it.
        """

        def written(conversation: Sequence[Message], opening: bool) -> str:
            payload: dict[str, object] = {
                "messages": [dict(message) for message in conversation],
                "add_generation_prompt": opening,
            }
            if tools:
                payload["tools"] = list(tools)
            return str(self._http.post("/apply-template", payload)["prompt"])

        if continue_final_message and messages and not messages[-1].get("content"):
            # llama.cpp leaves an empty last answer out, header included; one that is still empty has not begun.
            messages, add_generation_prompt, continue_final_message = messages[:-1], True, False
        return _rendered(written, messages, add_generation_prompt, continue_final_message)

    def chat_template_hash(self) -> str | None:
        """SHA-256 of the chat template, hex; None without one."""
        return hashlib.sha256(self._template.encode()).hexdigest() if self._template else None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def as_tokenizer(tokenizer: Any) -> Tokenizer:  # Any: one of ours, or a transformers tokenizer
    """`tokenizer` with the methods that tracking needs; a transformers tokenizer is wrapped."""
    if hasattr(tokenizer, "encode_suffix"):
        known: Tokenizer = tokenizer
        return known
    return HuggingFaceTokenizer(str(getattr(tokenizer, "name_or_path", "tokenizer")), tokenizer)


def _rendered(
    written: Callable[[Sequence[Message], bool], str],
    messages: Sequence[Message],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The chat by `written`; where its last message is to be continued, without what stands after that message."""
    conversation = [flat_message(message) for message in messages]
    if not continue_final_message or not conversation:
        return written(conversation, add_generation_prompt)
    whole = written(conversation, False)
    known = written([*conversation[:-1], {**conversation[-1], "content": ANSWER_PLACEHOLDER}], False)
    _, found, after = known.rpartition(ANSWER_PLACEHOLDER)
    if not found or not whole.endswith(after):
        raise InputError("the last message cannot be continued: the chat template does not end with its content")
    return whole[: len(whole) - len(after)]


def load_tokenizer(name: str) -> HuggingFaceTokenizer:
    """The Hugging Face tokenizer at a directory or hub name, checked against its own `tokenizer.json`.

    `AutoTokenizer` reads some files unfaithfully (a byte-level `tokenizer.json` under a Llama class loses its spaces);
    where it does, the file is loaded as it is written and `note` says so.

    Raises:
        TokenizerError: it cannot be loaded.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises errors of many libraries; each means: cannot be loaded
        raise _cannot_load(name, error) from error
    note = None
    raw = raw_tokenizer(name)
    if raw is not None and any(
        list(tokenizer.encode(text, add_special_tokens=False)) != raw.encode(text, add_special_tokens=False).ids
        for text in PROBE_TEXTS
    ):
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(name)
        note = "AutoTokenizer does not follow this tokenizer.json, so the file itself is used"
    loaded = HuggingFaceTokenizer(
        name,
        tokenizer,
        end_token_ids=generation_end_tokens(name),
        bos_token_id=tokenizer.bos_token_id if asks_for_bos(name) else None,
        note=note,
    )
    loaded.get_ready()
    return loaded


def _cannot_load(name: str, error: Exception) -> TokenizerError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return TokenizerError(
        f"the tokenizer {name!r} cannot be loaded here",
        details=[reason],
        hint="name one that this machine can load with --tokenizer: a directory, or a Hugging Face name",
    )
