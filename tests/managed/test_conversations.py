"""Random conversations over real tokenizers: every node is what was sent and returned, and nothing else.

MANAGED_CLI_CONVERSATIONS sets how many there are, over all tokenizers together.
"""

from __future__ import annotations

import asyncio
import functools
import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.managed.conversation import CHECKED, Conversation
from tests.managed.oracle import Oracle
from tests.managed.plans import Plan, Sampler, plans
from tests.tokenizers import catalog

CONVERSATIONS = int(os.environ.get("MANAGED_CLI_CONVERSATIONS", "10500"))


@functools.cache
def rules_of(name: str) -> tuple[Oracle, Sampler]:
    tokenizer, end_ids = catalog.loaded(name), catalog.end_ids(name)
    return Oracle(tokenizer, catalog.CATALOG[name], end_ids), Sampler(tokenizer, end_ids)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_every_node_is_what_was_sent_and_returned(name: str) -> None:
    oracle, sampler = rules_of(name)

    @settings(
        max_examples=max(1, CONVERSATIONS // len(catalog.NAMES)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        print_blob=True,
    )
    @given(plan=plans())
    def holds(plan: Plan) -> None:
        CHECKED["nodes"] += runner.run(Conversation(plan, oracle, sampler).run())
        CHECKED["conversations"] += 1

    with asyncio.Runner() as runner:
        holds()
