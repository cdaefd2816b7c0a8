"""The nodes of one context, in the order in which their calls were issued.

A call takes a ticket when it is issued, and its nodes stand where the ticket says, whatever finishes first. In a list,
the choices of an extension take the place of the node they extend; when two calls extend the same node, the one issued
first takes the place and the other gets one of its own. In a tree every node stays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from managed_cli.errors import ContextClosed
from managed_cli.node import SequenceNode
from managed_cli.tracking.masking import TrackedNode
from managed_cli.tracking.replaced import ReplacedNode


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """A position in the order of nodes; `claimed_by` is the ticket whose choices will stand here instead."""

    nodes: list[TrackedNode] = dataclasses.field(default_factory=list)
    claimed: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One issued call: its number within the context, its place, and the node it replaces there."""

    number: int
    epoch: int
    place: Place
    replaces: TrackedNode | None = None


class NodeTracker:
    """Nodes of one context.

    Args:
        keep_every_node: True is tree mode; False lets extensions take the place of what they extend.
    """

    def __init__(self, *, keep_every_node: bool = False) -> None:
        self.keep_every_node = keep_every_node
        self._epoch = 0
        self._start()

    def _start(self) -> None:
        self._issued = 0
        self._places: list[Place] = []
        self._known: dict[int, list[TrackedNode]] = {}

    def reset(self) -> None:
        """Forget every node; a call still under way will not write into the new state."""
        self._epoch += 1
        self._start()

    def issue(self) -> Ticket:
        """A ticket for a call that begins now."""
        place = Place()
        self._places.append(place)
        ticket = Ticket(self._issued, self._epoch, place)
        self._issued += 1
        return ticket

    def _check(self, ticket: Ticket) -> None:
        if ticket.epoch != self._epoch:
            raise ContextClosed("the context was reset while a call was under way; nothing of it is recorded")

    def known_nodes(self) -> list[TrackedNode]:
        """Every node recorded since the last reset, replaced ones included, oldest call first."""
        return [node for number in sorted(self._known) for node in self._known[number]]

    def claim(self, ticket: Ticket, parent: TrackedNode | None) -> None:
        """Let the ticket's nodes stand in the place of `parent`, where that is still free.

        Raises:
            ContextClosed: the context was reset after the call was issued; what it would sample is not wanted.
        """
        self._check(ticket)
        if self.keep_every_node or parent is None:
            return
        for place in self._places:
            if parent in place.nodes and parent.node_id not in place.claimed:
                place.claimed.add(parent.node_id)
                self._places.remove(ticket.place)
                ticket.place, ticket.replaces = place, parent
                return

    def record(self, ticket: Ticket, nodes: Sequence[TrackedNode]) -> None:
        """The call's nodes, in choice order, in its place.

        Raises:
            ContextClosed: the context was reset after the call was issued.
        """
        self._check(ticket)
        self._known[ticket.number] = list(nodes)
        if ticket.replaces is None:
            ticket.place.nodes.extend(nodes)
            return
        at = ticket.place.nodes.index(ticket.replaces)
        ticket.place.nodes[at : at + 1] = nodes
        if nodes:
            self._read_off(ticket.replaces, nodes[0])

    def _read_off(self, parent: TrackedNode, extension: TrackedNode) -> None:
        """Keep `parent`, and what was kept as a beginning of it, as beginnings of `extension` alone."""
        replaced = ReplacedNode.of(parent, extension)
        if replaced is None:
            return
        for known in self._known.values():
            for index, node in enumerate(known):
                if node is parent:
                    known[index] = replaced
                elif isinstance(node, ReplacedNode) and node.by is parent:
                    node.move_to(extension, spelled_alike=replaced.is_spelled_alike)

    def release(self, ticket: Ticket) -> None:
        """Give back the claim of a call that failed; the node it would have replaced stays."""
        if ticket.replaces is not None and ticket.epoch == self._epoch:
            ticket.place.claimed.discard(ticket.replaces.node_id)

    def nodes(self) -> list[TrackedNode]:
        """The nodes that stand now, in order."""
        return [node for place in self._places for node in place.nodes]

    def snapshot(self) -> list[SequenceNode]:
        """Copies of the nodes that stand now, in order; later calls do not change them."""
        nodes = [tracked.node for tracked in self.nodes()]
        for node in nodes:
            node.metadata = copy.deepcopy(node.metadata)
        return nodes
