"""A node whose place was taken is, to the last field, what it was, however the conversation went on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from managed_cli.tracking.masking import Span, TrackedNode
from managed_cli.tracking.replaced import ReplacedNode
from managed_cli.tracking.row_part import RowPart
from managed_cli.tracking.trackers import NodeTracker

FIELDS = ("node_id", "spans", "prompt_text", "continued_text", "full_text", "end_token_text", "unwritten", "shown_text")
LENGTHS = ("shown_length", "reach")
END = "<end>"
END_ID = 9


def extension_of(
    parent: TrackedNode | None, number: int, text: str, *, written: bool, handed_back: bool
) -> TrackedNode:
    """A node that adds a question and an answer to its parent; `text` is both.

    Args:
        written: the prompt's text has the parent's end token.
        handed_back: the prompt's text is the parent's full text, and not the prompt that it was given.
    """
    before, spelled, spans = "", "", ()
    if parent is not None:
        before = parent.full_text if handed_back else parent.continued_text
        before = before if written else before.removesuffix(END)
        spelled, spans = parent.full_text, parent.spans
    prompt_text = before + text
    row = RowPart(RowPart(None if parent is None else parent.row, [1]), [2, END_ID], [-0.5, -0.25])
    full_text = spelled + text + text + END
    span = Span(len(row) - 2, len(row), text, "stop")
    facts = {"number": number}
    return TrackedNode(f"{number}.0", row, full_text, facts, (*spans, span), prompt_text, prompt_text + text + END, END)


def facts_of(node: TrackedNode) -> tuple[object, ...]:
    return (*(getattr(node, name) for name in (*FIELDS, *LENGTHS)), node.node.model_dump())


@given(st.lists(st.tuples(st.sampled_from(["a", "bb", "é"]), st.booleans(), st.booleans()), min_size=2, max_size=6))
def test_replaced_nodes_are_what_they_were(steps: list[tuple[str, bool, bool]]) -> None:
    tracker, parent, expected = NodeTracker(), None, []
    for number, (text, written, handed_back) in enumerate(steps):
        ticket = tracker.issue()
        tracker.claim(ticket, parent)
        parent = extension_of(parent, number, text, written=written, handed_back=handed_back)
        expected.append(facts_of(parent))
        tracker.record(ticket, [parent])
        assert [facts_of(node) for node in tracker.known_nodes()] == expected
    *replaced, last = tracker.known_nodes()
    assert all(isinstance(node, ReplacedNode) and node.by is last for node in replaced)


def test_a_node_that_is_no_beginning_of_the_one_in_its_place_stays_as_it_is() -> None:
    parent = extension_of(None, 0, "a", written=True, handed_back=False)
    other = extension_of(
        extension_of(None, 1, "b", written=True, handed_back=False), 2, "c", written=True, handed_back=False
    )
    assert ReplacedNode.of(parent, other) is None
