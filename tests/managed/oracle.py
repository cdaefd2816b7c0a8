"""What must be true of every node, computed from what was really sent and returned, and from nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from managed_cli.node import SequenceNode
from managed_cli.tokenizers import HuggingFaceTokenizer
from managed_cli.types import Generation
from tests.managed.scripted import Exchange
from tests.tokenizers.catalog import Entry

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of the conversation: what was asked for, and the exchange with the backend.

    Attributes:
        number: calls since the last reset, in the order of issue.
        rendered: the prompt's text, by the chat template or as given, BOS included.
        intended: the choice that this call goes on from.
    """

    number: int
    round_number: int
    rendered: str
    conversation: Messages | None
    intended: Known | None
    exchange: Exchange
    response: Any = None  # Any: a completion of either kind


@dataclasses.dataclass(eq=False)
class Known:
    """A recorded choice.

    Attributes:
        unwritten: positions of end-of-turn tokens that were sampled and that the prompts after them do not write.
    """

    node_id: str
    call: Call
    returned: Generation
    node: SequenceNode
    shown: str
    added: str
    end_text: str
    conversation: Messages | None
    unwritten: frozenset[int]

    @property
    def continued(self) -> str:
        """The prompt as it was rendered, and the completion."""
        return self.call.rendered + self.added

    def reaches_beyond(self, other: Known) -> bool:
        """Whether it holds more of a conversation than `other`."""
        if self.conversation is not None and other.conversation is not None:
            return len(self.conversation) > len(other.conversation)
        return len(self.call.rendered + self.shown) > len(other.call.rendered + other.shown)

    def left_out(self, *, continued: bool, ended: bool) -> set[int]:
        """Positions that its text, as rendered or in full, does not write; `ended`: its own last token is one."""
        return {*(self.unwritten if continued else ()), *([len(self.node.tokens) - 1] if ended else ())}


class Oracle:
    """The rules, for one tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, entry: Entry, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.inner = tokenizer._tokenizer
        self.entry = entry
        self.end_ids = list(end_ids)
        self.bos_id = self.inner.convert_tokens_to_ids(entry.bos) if entry.bos else None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def rendered(self, conversation: Messages) -> str:
        """The chat by transformers alone; a last answer is left open."""
        goes_on = conversation[-1]["role"] == "assistant"

        def write(messages: Messages) -> str:
            flat = [{**message, "content": plain(message["content"])} for message in messages]
            return str(self.inner.apply_chat_template(flat, tokenize=False, add_generation_prompt=not goes_on))

        whole = write(conversation)
        if not goes_on:
            return whole
        closing = write([*conversation[:-1], {"role": "assistant", "content": "@@"}]).rpartition("@@")[2]
        assert whole.endswith(closing)
        return whole[: len(whole) - len(closing)]

    def spells(self, known: Known, left_out: set[int], rest: str, text: str) -> bool:
        """Whether the node's ids and then `rest` are `text`, as far as this tokenizer can keep text."""
        ids = [token for at, token in enumerate(known.node.tokens) if at not in left_out]
        endings = [self.tokenizer.encode_suffix(rest)]
        if known.end_text and len(known.node.tokens) - 1 not in left_out:
            endings.append(self.encode(known.end_text + rest)[1:])
        readings = (text, self.decode(self.encode(text)))
        return any(self.decode([*ids, *ending]) in readings for ending in endings)

    def fit(self, known: Known, call: Call) -> tuple[int, bool] | None:
        """How `call` extends `known`: characters in common, and whether its end-of-turn token is written; or None."""
        if not self.looks_like(known, call):
            return None
        text = call.rendered
        texts = ((known.continued, True), (known.node.full_text, False))
        if known.shown or known.end_text:
            for written, continued in texts:
                left_out = known.left_out(continued=continued, ended=False)
                if text.startswith(written) and self.spells(known, left_out, text[len(written) :], text):
                    return len(written), True
        if known.end_text and known.shown and not self.written_further(known, call):
            for written, continued in texts:
                visible = written.removesuffix(known.end_text)
                rest = text[len(visible) :]
                ends_otherwise = any(rest.startswith(self.decode([end])) for end in self.end_ids)
                left_out = known.left_out(continued=continued, ended=True)
                fits = text.startswith(visible) and rest and not ends_otherwise
                if fits and self.spells(known, left_out, rest, text):
                    return len(visible), False
        return None

    def looks_like(self, known: Known, call: Call) -> bool:
        """Whether the known answer may be part of the call's prompt."""
        if not known.returned.token_ids:
            return False
        if known.conversation is None or call.conversation is None:
            return True
        length = len(known.conversation)
        if length > len(call.conversation) or call.conversation[length - 1]["role"] != "assistant":
            return False
        said, there = known.conversation[-1]["content"], plain(call.conversation[length - 1]["content"])
        return bool(there.startswith(said) if length == len(call.conversation) else there == said)

    def written_further(self, known: Known, call: Call) -> bool:
        """Whether the prompt ends inside the known answer."""
        if call.conversation is None or call.conversation[-1]["role"] != "assistant":
            return False
        return known.conversation is None or len(known.conversation) == len(call.conversation)

    def best_parent(self, before: Sequence[Known], call: Call) -> Known | None:
        """The node that the call must extend: longest, then end token written, then newest."""
        fits = [(fit, age, known) for age, known in enumerate(before) if (fit := self.fit(known, call)) is not None]
        return max(fits, key=lambda entry: entry[:2])[2] if fits else None

    def reason(self, known: Known, call: Call) -> str | None:
        """The reason code where `call` looks like a continuation of `known` and is none."""
        if not known.returned.token_ids:
            return None
        text = call.rendered
        texts = [known.continued, known.node.full_text]
        if known.shown or known.end_text:
            if any(text.startswith(written) for written in texts):
                return "text_mismatch"
            ended = known.end_text and known.shown and not self.written_further(known, call)
            visible = [written.removesuffix(known.end_text) for written in texts]
            if ended and any(text.startswith(start) and len(text) > len(start) for start in visible):
                return "text_mismatch"
        if known.shown and text.startswith(known.call.rendered + known.shown):
            cut = known.returned.stop_reason or (known.returned.finish_reason == "stop" and not known.end_text)
            return "stop_string_cut" if cut else "special_tokens_dropped"
        return "history_rewritten" if call.conversation is not None and known.conversation is not None else None

    def check_arrays(self, node: SequenceNode, call: Call, index: int, parent: SequenceNode | None) -> None:
        """Tokens are the ids sent and the ids returned; exactly what was returned in this ancestry is unmasked."""
        returned, sent = call.exchange.returned[index], call.exchange.sent
        start = len(sent)
        assert node.tokens == [*sent, *returned.token_ids]
        assert node.masked_tokens[start:] == list(returned.token_ids)
        assert node.logprobs[start:] == list(returned.logprobs)
        kept = len(parent.tokens) if parent else 0
        if parent is not None:
            assert sent[:kept] == parent.tokens
            assert node.masked_tokens[:kept] == parent.masked_tokens
            assert node.logprobs[:kept] == parent.logprobs
        assert node.masked_tokens[kept:start] == [-100] * (start - kept)
        assert node.logprobs[kept:start] == [1.0] * (start - kept)
        assert node.full_text == self.decode(node.tokens)

    def check_prompt(self, call: Call, parent: Known | None) -> frozenset[int]:
        """The ids sent spell the prompt, but for sampled end-of-turn tokens that it does not write: their positions.

        BOS stands once, and no sampled end-of-turn token is followed by another.
        """
        sent, text = call.exchange.sent, call.rendered
        inherited = parent.unwritten if parent else frozenset()
        ended = parent is not None and parent.end_text
        last = {len(parent.node.tokens) - 1} if parent is not None and ended else set()
        spelled = [
            unwritten
            for unwritten in (frozenset[int](), frozenset(last), inherited, inherited | last)
            if self.decode([token for at, token in enumerate(sent) if at not in unwritten])
            in (text, self.decode(self.encode(text)))
        ]
        assert spelled, "the ids sent do not spell the prompt"
        if ended and parent is not None and len(sent) > len(parent.node.tokens):
            assert sent[len(parent.node.tokens)] not in self.end_ids, "an end-of-turn token stands twice"
        if self.bos_id is not None and text.count(self.entry.bos) == 1:
            masked = [at for at, token in enumerate(sent) if token == self.bos_id and self._is_masked(at, parent)]
            assert masked == [0], f"BOS stands at {masked}"
        return spelled[0]

    def check_spliced(self, call: Call, parent: Known) -> frozenset[int]:
        """In verbatim mode the new messages stand behind the sampled tokens, as the template writes them."""
        sent, text = call.exchange.sent, call.rendered
        before, rest = self.decode(parent.node.tokens), self.decode(sent)
        assert rest.startswith(before)
        added = rest[len(before) :]
        assert text.endswith(added) or self.decode(self.encode(text)).endswith(added)
        if parent.end_text:
            assert not any(added.startswith(self.decode([end])) for end in self.end_ids), "two end-of-turn tokens"
        elif len(parent.conversation or ()) < len(call.conversation or ()):
            assert self.entry.end_of_turn in added, "a turn has no end"
        return frozenset()

    @staticmethod
    def _is_masked(position: int, parent: Known | None) -> bool:
        return parent is None or position >= len(parent.node.tokens) or parent.node.masked_tokens[position] == -100


def plain(content: Any) -> str:  # Any: a message's content
    """Content as text; parts are lines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def order_of(calls: Sequence[Call], claims: Mapping[str, Call], choices: Mapping[int, Sequence[str]]) -> list[str]:
    """Node ids in list order: each call where it was issued, or in the place of the node it took.

    Args:
        claims: node id → the call whose choices stand in its place.
        choices: call number → node ids of its choices; absent where it failed.
    """

    def standing(call: Call) -> list[str]:
        found = []
        for node_id in choices.get(call.number, ()):
            successor = claims.get(node_id)
            found += [node_id] if successor is None else standing(successor)
        return found

    takers = set(claims.values())
    return [node_id for call in calls if call not in takers for node_id in standing(call)]
