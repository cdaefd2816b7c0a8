"""Where nodes stand, whatever the order in which calls are planned, answered, fail or are reset."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from managed_cli.errors import ContextClosed
from managed_cli.tracking.masking import Span, TrackedNode
from managed_cli.tracking.row_part import RowPart
from managed_cli.tracking.trackers import NodeTracker, Ticket


def tracked(node_id: str) -> TrackedNode:
    row = RowPart(None, [1], [-1.0])
    return TrackedNode(node_id, row, node_id, {"id": node_id}, (Span(0, 1, "x", "stop"),), "", node_id, "")


class Tracking(RuleBasedStateMachine):
    """The list tracker against a model: a forest in which a claimed node's place is its successor's."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.tracker = NodeTracker()
        self.forget()

    def forget(self) -> None:
        self.issued: list[Ticket] = []
        self.nodes: dict[int, list[TrackedNode]] = {}
        self.claims: dict[str, Ticket] = {}

    @rule(target=tickets)
    def issue(self) -> Ticket:
        ticket = self.tracker.issue()
        assert ticket.number == len(self.issued)
        self.issued.append(ticket)
        return ticket

    @rule(ticket=consumes(tickets), parent_number=st.integers(0, 99), choices=st.booleans())
    def answer(self, ticket: Ticket, parent_number: int, choices: bool) -> None:
        if ticket not in self.issued:
            with pytest.raises(ContextClosed):
                self.tracker.claim(ticket, None)
            with pytest.raises(ContextClosed):
                self.tracker.record(ticket, [tracked("late")])
            return
        known = self.tracker.known_nodes()
        parent = known[parent_number % len(known)] if known and parent_number % 3 else None
        self.tracker.claim(ticket, parent)
        if parent is not None:
            self.claims.setdefault(parent.node_id, ticket)
        nodes = [tracked(f"{ticket.number}.{index}") for index in range(3 if choices else 1)]
        self.tracker.record(ticket, nodes)
        self.nodes[ticket.number] = nodes

    @rule(ticket=consumes(tickets), parent_number=st.integers(0, 99))
    def fail(self, ticket: Ticket, parent_number: int) -> None:
        known = self.tracker.known_nodes()
        if ticket in self.issued:
            self.tracker.claim(ticket, known[parent_number % len(known)] if known else None)
        self.tracker.release(ticket)

    @rule()
    def reset(self) -> None:
        self.tracker.reset()
        self.forget()

    @invariant()
    def nodes_stand_where_their_calls_were_issued(self) -> None:
        takers = [ticket for ticket in self.claims.values() if ticket.number in self.nodes]

        def standing(ticket: Ticket) -> list[str]:
            found = []
            for node in self.nodes.get(ticket.number, []):
                successor = self.claims.get(node.node_id)
                found += [node.node_id] if successor is None else standing(successor)
            return found

        expected = [node_id for ticket in self.issued if ticket not in takers for node_id in standing(ticket)]
        assert [node.node_id for node in self.tracker.nodes()] == expected


TestTracking = Tracking.TestCase
TestTracking.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, database=None)


def test_a_tree_keeps_every_node_where_its_call_was_issued() -> None:
    tracker = NodeTracker(keep_every_node=True)
    first, second = tracker.issue(), tracker.issue()
    a, b = tracked("0.0"), tracked("1.0")
    tracker.record(second, [b])
    tracker.record(first, [a])
    third = tracker.issue()
    tracker.claim(third, a)
    tracker.record(third, [tracked("2.0")])
    assert [node.node_id for node in tracker.nodes()] == ["0.0", "1.0", "2.0"]


def test_a_claim_that_is_given_back_can_be_taken_by_the_next_call() -> None:
    tracker = NodeTracker()
    root = tracker.issue()
    tracker.record(root, [tracked("0.0")])
    (parent,) = tracker.known_nodes()
    failing, second = tracker.issue(), tracker.issue()
    tracker.claim(failing, parent)
    tracker.claim(second, parent)
    tracker.release(failing)
    third = tracker.issue()
    tracker.claim(third, parent)
    tracker.record(third, [tracked("3.0")])
    tracker.record(second, [tracked("2.0")])
    assert [node.node_id for node in tracker.nodes()] == ["3.0", "2.0"]


def test_a_late_release_leaves_the_new_state_alone() -> None:
    tracker = NodeTracker()
    old = tracker.issue()
    tracker.record(old, [tracked("0.0")])
    late = tracker.issue()
    tracker.claim(late, tracker.known_nodes()[0])
    tracker.reset()
    tracker.release(late)
    fresh = tracker.issue()
    tracker.record(fresh, [tracked("0.0")])
    assert [node.node_id for node in tracker.nodes()] == ["0.0"]


def test_a_snapshot_is_equal_and_shares_nothing() -> None:
    tracker = NodeTracker()
    tracker.record(tracker.issue(), [tracked("0.0")])
    (copied,), (own,) = tracker.snapshot(), tracker.nodes()
    assert copied == own.node
    for field in ("tokens", "masked_tokens", "logprobs", "metadata"):
        assert getattr(copied, field) is not getattr(own.node, field)
