"""Runs one planned conversation through a `ManagedServer`, and holds every node against the oracle."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from managed_cli.errors import ContextClosed, ServerContractError
from managed_cli.managed.server import ManagedServer
from managed_cli.node import SequenceNode
from managed_cli.tracking.extension import FORK_REASONS
from tests.managed.oracle import Call, Known, Oracle, order_of
from tests.managed.plans import STOP, CallPlan, Plan, Sampler, as_content, user_words
from tests.managed.scripted import CURRENT, Exchange, ScriptedBackend

CHECKED: Counter[str] = Counter()
"""Conversations and nodes that held, for the line at the end of the run."""


class Conversation:
    """One context and everything that is known of it."""

    def __init__(self, plan: Plan, oracle: Oracle, sampler: Sampler) -> None:
        self.plan = plan
        self.oracle = oracle
        self.sampler = sampler
        self.backend = ScriptedBackend(oracle.tokenizer.vocab_size)
        self.managed = ManagedServer(self.backend, oracle.tokenizer, track_tree=plan.tree, history=plan.history)
        self.calls: list[Call] = []
        self.arguments: list[tuple[dict[str, Any], str, Any, Known | None]] = []
        self.known: list[Known] = []
        self.claims: dict[str, Call] = {}
        self.choices: dict[int, list[str]] = {}
        self.snapshots: list[tuple[list[SequenceNode], tuple[str, ...]]] = []
        self.issued = 0

    async def run(self) -> int:
        """Run it whole; how many nodes were checked."""
        for round_number, plans in enumerate(self.plan.rounds):
            await self._round(round_number, plans)
        await self._end()
        return len(self.known)

    async def _round(self, round_number: int, plans: Sequence[CallPlan]) -> None:
        before = list(self.known)
        calls = [self._prepared(round_number, plan) for plan in plans]
        failed: set[int] = set()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for call, (arguments, *_) in zip(calls, self.arguments[-len(calls) :], strict=True):
                tasks.append(group.create_task(self._called(call, arguments, failed)))
            for call in calls:
                await call.exchange.arrived.wait()
            order = list(range(len(calls)))
            random.Random(self.plan.finish_seed + round_number).shuffle(order)
            for index in order:
                calls[index].exchange.gate.set()
                await asyncio.wait([tasks[index]])
        self._check_round(calls, before, failed)

    async def _called(self, call: Call, arguments: dict[str, Any], failed: set[int]) -> None:
        CURRENT.set(call.exchange)
        speak = self.managed.completion if call.conversation is None else self.managed.chat_completion
        try:
            call.response = await speak(**arguments, stop=[STOP])
        except ServerContractError:
            assert call.exchange.fails
            failed.add(call.number)
        finally:
            call.exchange.arrived.set()

    def _prepared(self, round_number: int, plan: CallPlan) -> Call:
        number = len(self.calls)
        arguments, rendered, conversation, intended = self._asked(number, plan)
        self.arguments.append((arguments, rendered, conversation, intended))
        arguments = {**arguments, "n": len(plan.choices)}
        self.arguments[-1] = (arguments, rendered, conversation, intended)
        base = number * 10
        exchange = Exchange(
            lambda _sent: [self.sampler.choice(choice, base + i) for i, choice in enumerate(plan.choices)], plan.fails
        )
        call = Call(self.issued, round_number, rendered, conversation, intended, exchange)
        self.issued += 1
        self.calls.append(call)
        return call

    def _asked(self, number: int, plan: CallPlan) -> tuple[dict[str, Any], str, Any, Known | None]:
        """(arguments, rendered prompt, messages, the choice it goes on from)."""
        if plan.source == "again" and self.calls:
            return self.arguments[plan.pick % len(self.arguments)]
        pool = [known for known in self.known if not plan.chat or known.conversation is not None]
        known = pool[-1 - plan.pick % len(pool)] if pool and plan.source != "fresh" else None
        words = user_words(number, plan.words, self.oracle.entry.end_of_turn)
        if plan.chat:
            return self._asked_in_chat(plan, known, words)
        if known is None:
            prompt = words
        else:
            spoken = known.node.full_text if plan.parts else known.call.rendered + known.shown
            prompt = spoken if plan.source == "further" else f"{spoken} then {words}"
        rendered = prompt if prompt.startswith(self.oracle.entry.bos) else self.oracle.entry.bos + prompt
        return {"prompt": prompt}, rendered, None, known

    def _asked_in_chat(
        self, plan: CallPlan, known: Known | None, words: str
    ) -> tuple[dict[str, Any], str, Any, Known | None]:
        messages: list[Any]
        if known is None:
            messages = [{"role": "system", "content": "Be brief."}] if plan.system else []
            messages.append({"role": "user", "content": as_content(words, parts=plan.parts)})
        elif plan.source == "further":
            *earlier, last = known.conversation or ()
            messages = [*earlier, {**last, "content": last["content"] + (" and" if plan.parts else "")}]
        else:
            messages = [*(known.conversation or ()), {"role": "user", "content": as_content(words, parts=plan.parts)}]
        return {"messages": messages}, self.oracle.rendered(messages), messages, known

    def _check_round(self, calls: Sequence[Call], before: Sequence[Known], failed: set[int]) -> None:
        nodes = self.managed.nodes()
        by_id = {node.metadata["node_id"]: node for node in nodes}
        assert len(by_id) == len(nodes), "a node id stands twice"
        taken = dict(self.claims)
        for call in calls:
            parent = self._parent(call, before, by_id, failed)
            if parent is not None and not self.plan.tree and parent.node_id not in taken:
                taken[parent.node_id] = call
                if call.number not in failed:
                    self.claims[parent.node_id] = call
            if call.number not in failed:
                self._check_call(call, parent, before, by_id)
        self._check_order(nodes)

    def _parent(
        self, call: Call, before: Sequence[Known], by_id: dict[str, SequenceNode], failed: set[int]
    ) -> Known | None:
        """The node that the call extended; where it failed, the one that it must have extended."""
        if call.number in failed:
            return self._expected_parent(call, before)
        parent_id = by_id[f"{call.number}.0"].metadata["parent_id"]
        return next((known for known in before if known.node_id == parent_id), None)

    def _expected_parent(self, call: Call, before: Sequence[Known]) -> Known | None:
        return self._spliced_parent(call, before) or self.oracle.best_parent(before, call)

    def _spliced_parent(self, call: Call, before: Sequence[Known]) -> Known | None:
        """In verbatim mode: the newest of the longest conversations that this one goes on from."""
        if self.plan.history == "template" or call.conversation is None:
            return None
        fitting = [
            (len(known.conversation), age, known)
            for age, known in enumerate(before)
            if known.conversation is not None
            and known.returned.token_ids
            and list(call.conversation[: len(known.conversation)]) == list(known.conversation)
            and not (known.end_text and len(known.conversation) == len(call.conversation))
        ]
        return max(fitting, key=lambda entry: entry[:2])[2] if fitting else None

    def _check_call(
        self, call: Call, parent: Known | None, before: Sequence[Known], by_id: dict[str, SequenceNode]
    ) -> None:
        oracle = self.oracle
        spliced = self._spliced_parent(call, before)
        expected = spliced or oracle.best_parent(before, call)
        assert parent is expected, f"extends {parent and parent.node_id}, not {expected and expected.node_id}"
        unwritten = oracle.check_spliced(call, spliced) if spliced is not None else oracle.check_prompt(call, parent)
        self.choices[call.number] = []
        for index, choice in enumerate(call.response.choices):
            node_id = f"{call.number}.{index}"
            assert (choice.index, choice.node_id) == (index, node_id)
            node = by_id[node_id]
            oracle.check_arrays(node, call, index, parent.node if parent else None)
            if spliced is None:
                self._check_fork(node, call, parent, before)
            else:
                assert "fork_reason" not in node.metadata
                call.rendered = oracle.decode(call.exchange.sent)  # what later prompts are compared with
            self._remember(call, index, node, choice, unwritten)
        usage = call.response.usage
        assert usage.prompt_tokens == len(call.exchange.sent)
        assert usage.completion_tokens == sum(len(choice.token_ids) for choice in call.exchange.returned)

    def _check_fork(self, node: SequenceNode, call: Call, parent: Known | None, before: Sequence[Known]) -> None:
        """A continuation that keeps less than it should says why; a new conversation says nothing."""
        named, reason = node.metadata.get("fork_of"), node.metadata.get("fork_reason")
        intended = call.intended
        if intended is None:
            assert reason is None
        if reason is None:
            lost = intended is not None and intended.returned.token_ids and self._is_lost(intended, parent)
            assert not lost or self.oracle.reason(intended, call) is None, "a fork without a reason"
            return
        assert reason in FORK_REASONS
        lost_node = next(known for known in before if known.node_id == named)
        assert self._is_lost(lost_node, parent)
        assert intended is not None
        longer = lost_node is intended or not intended.reaches_beyond(lost_node)
        assert longer or self.oracle.reason(intended, call) is None
        assert reason == self.oracle.reason(lost_node, call)

    @staticmethod
    def _is_lost(known: Known, parent: Known | None) -> bool:
        return parent is None or known.reaches_beyond(parent)

    def _remember(self, call: Call, index: int, node: SequenceNode, choice: Any, unwritten: frozenset[int]) -> None:
        returned = call.exchange.returned[index]
        shown = choice.text if call.conversation is None else choice.message.content
        assert shown == self.sampler.expected_text(returned.token_ids, returned.end_token_id)
        assert node.metadata["finish_reason"] == returned.finish_reason == choice.finish_reason
        conversation = None
        if call.conversation is not None:
            *earlier, last = call.conversation
            conversation = (
                [*earlier, {**last, "content": last["content"] + shown}]
                if last["role"] == "assistant"
                else [*call.conversation, {"role": "assistant", "content": shown}]
            )
        sent = self.oracle.decode(call.exchange.sent)
        whole = node.full_text
        added = whole[len(sent) :] if whole.startswith(sent) else self._alone(returned.token_ids)
        end_text = "" if returned.end_token_id is None else self.oracle.decode([returned.end_token_id])
        known = Known(node.metadata["node_id"], call, returned, node, shown, added, end_text, conversation, unwritten)
        self.known.append(known)
        self.choices[call.number].append(known.node_id)

    def _alone(self, ids: Sequence[int]) -> str:
        anchor = self.oracle.encode("a")
        return self.oracle.decode([*anchor, *ids])[len(self.oracle.decode(anchor)) :]

    def _check_order(self, nodes: list[SequenceNode]) -> None:
        found = [node.metadata["node_id"] for node in nodes]
        if self.plan.tree:
            assert found == [node_id for number in sorted(self.choices) for node_id in self.choices[number]]
            state = self.managed.get_state()
            assert state["tree"] is state["sequences"]
            assert {text: node.metadata["node_id"] for text, node in state["sequences"].items()} == {
                node.full_text: node.metadata["node_id"] for node in nodes
            }
        else:
            assert found == order_of(self.calls, self.claims, self.choices)
            assert self.managed.get_state() == {"nodes": nodes}
        for earlier, written_down in self.snapshots:
            assert frozen(earlier) == written_down, "a snapshot changed"
        self.snapshots.append((nodes, frozen(nodes)))

    async def _end(self) -> None:
        """Leave or reset the context while a call is in flight: nothing of it is written."""
        if self.plan.ending == "none":
            return
        call = self._prepared(len(self.plan.rounds), self.plan.rounds[0][0])
        call.exchange.fails = False
        arguments = self.arguments[-1][0]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._expect_closed(call, arguments))
            await call.exchange.arrived.wait()
            if self.plan.ending == "reset":
                self.managed.reset()
            else:
                self.managed.close()
            call.exchange.gate.set()
            await asyncio.wait([task])
        if self.plan.ending == "reset":
            assert self.managed.nodes() == []

    async def _expect_closed(self, call: Call, arguments: dict[str, Any]) -> None:
        CURRENT.set(call.exchange)
        speak = self.managed.completion if call.conversation is None else self.managed.chat_completion
        try:
            await speak(**arguments)
        except ContextClosed:
            return
        raise AssertionError("a reply was recorded after the context had ended")


def frozen(nodes: Sequence[SequenceNode]) -> tuple[str, ...]:
    """Everything that the nodes say, in a form that cannot change."""
    return tuple(node.model_dump_json() for node in nodes)
