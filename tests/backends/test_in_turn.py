"""Replies are worked on so many in each round of the event loop, which sees to everything else in between."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from managed_cli.backends import in_turn
from managed_cli.backends._http import HttpClient
from managed_cli.backends.base import BackendConfig
from managed_cli.backends.in_turn import REPLY_BYTES, ROUND_BYTES
from managed_cli.backends.vllm import VLLMBackend
from managed_cli.errors import ServerRefused
from managed_cli.types import SamplingParams
from tests.servers.process import running_server

MEGABYTE = 2**20


class RoundCounter:
    """The number of the event loop's round, as a callback that is ready in every one of them knows it."""

    def __init__(self) -> None:
        self.number = 0
        self._ends = False

    def __enter__(self) -> RoundCounter:
        asyncio.get_running_loop().call_soon(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True

    def _count(self) -> None:
        self.number += 1
        if not self._ends:
            asyncio.get_running_loop().call_soon(self._count)


def test_tasks_that_wait_for_each_other_take_every_step_in_a_row() -> None:
    steps: list[tuple[str, int]] = []

    async def work(number: int) -> None:
        for step in ("record", "plan", "send"):
            await in_turn.after_others()
            steps.append((step, number))

    async def all_at_once() -> None:
        await asyncio.gather(*map(work, range(3)))

    asyncio.run(all_at_once())
    assert steps == [(step, number) for step in ("record", "plan", "send") for number in range(3)]


def rounds_of(sizes: list[int], *, cancelled: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Of replies that are ready at the same time: the number of each, and the round it had its turn in, in turn."""

    async def all_at_once() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def work(number: int, size: int) -> None:
            await in_turn.turn(size)
            seen.append((number, rounds.number))

        with RoundCounter() as rounds:
            tasks = [asyncio.create_task(work(number, size)) for number, size in enumerate(sizes)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for number in cancelled:
                tasks[number].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    return asyncio.run(all_at_once())


def steps_between(seen: list[tuple[int, int]]) -> list[int]:
    """Rounds from one turn to the next; the first was had without waiting, and those who wait begin a round later."""
    return [after - before for (_, before), (_, after) in itertools.pairwise(seen[1:])]


def test_large_replies_have_a_round_each_in_the_order_they_came() -> None:
    seen = rounds_of([MEGABYTE] * 20)
    assert [number for number, _ in seen] == list(range(20))
    assert steps_between(seen) == [1] * 18


def test_small_replies_share_rounds_up_to_their_sum() -> None:
    most = -(-ROUND_BYTES // (1000 + REPLY_BYTES))
    seen = rounds_of([1000] * (5 * most))
    assert [number for number, _ in seen] == list(range(5 * most))
    rounds = [number for _, number in seen]
    assert [rounds.count(number) for number in sorted(set(rounds))] == [most] * 5


def test_a_reply_that_comes_alone_does_not_wait() -> None:
    async def alone() -> list[int]:
        waited = []
        with RoundCounter() as rounds:
            for size in (0, MEGABYTE, 5):
                before = rounds.number
                await in_turn.turn(size)
                waited.append(rounds.number - before)
                await asyncio.sleep(0.001)
        return waited

    assert asyncio.run(alone()) == [0, 0, 0]


def test_who_is_cancelled_while_it_waits_takes_no_turn_and_holds_up_nobody() -> None:
    seen = rounds_of([MEGABYTE] * 6, cancelled=frozenset({2, 5}))
    assert [number for number, _ in seen] == [0, 1, 3, 4]
    assert steps_between(seen) == [1, 1]


def test_every_event_loop_has_rounds_of_its_own() -> None:
    assert rounds_of([MEGABYTE] * 3)[0] == rounds_of([MEGABYTE] * 3)[0]


def test_timers_are_seen_to_between_replies_that_came_together(monkeypatch: pytest.MonkeyPatch) -> None:
    replies, work_seconds = 40, 0.02
    monkeypatch.setattr(in_turn, "ROUND_BYTES", 1)  # as if each were large

    async def reply(backend: VLLMBackend) -> None:
        await backend.generate([1, 2, 3], SamplingParams(max_tokens=4))
        end = time.monotonic() + work_seconds
        while time.monotonic() < end:
            pass

    async def beat(times: list[float]) -> None:
        while True:
            times.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def seconds_apart() -> list[float]:
        times: list[float] = []
        with running_server("vllm", "--delay-ms", 300) as server:
            backend = VLLMBackend(BackendConfig(base_url=server.url))
            try:
                await backend.probe()
                waiting = [asyncio.create_task(reply(backend)) for _ in range(replies)]
                await asyncio.sleep(0.15)
                assert server.stats()["in_flight"] == replies
                time.sleep(0.5)  # noqa: ASYNC251 (all replies are to be there when the loop comes round)
                beating = asyncio.create_task(beat(times))
                await asyncio.gather(*waiting)
                beating.cancel()
            finally:
                await backend.aclose()
        return [after - before for before, after in itertools.pairwise(times)]

    apart = asyncio.run(seconds_apart())
    assert len(apart) > replies // 5, "a timer takes two or three rounds to be seen to"
    assert max(apart) < replies * work_seconds / 2


def test_a_refusal_does_not_overtake_replies_that_came_before_it() -> None:
    replies, body = 30, b'"' + b"x" * 20_000 + b'"'

    async def order() -> list[bool]:
        waiting: list[asyncio.StreamWriter] = []
        done: list[bool] = []

        async def answer_together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            waiting.append(writer)
            if len(waiting) < replies:
                return
            for number, each in enumerate(waiting, start=1):
                status = b"401 Unauthorized" if number == replies else b"200 OK"
                head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                each.write(head % (status, len(body)) + body)

        async def ask(client: HttpClient) -> None:
            try:
                await client.get("/v1/models")
            except ServerRefused:
                done.append(False)
            else:
                done.append(True)

        server = await asyncio.start_server(answer_together, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", label="the server")
        try:
            await asyncio.gather(*(ask(client) for _ in range(replies)))
        finally:
            await client.aclose()
            server.close()
            for writer in waiting:
                writer.close()
        return done

    assert asyncio.run(order()) == [True] * (replies - 1) + [False]
