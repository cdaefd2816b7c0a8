"""The scheduler: every task is settled once, and what is finished reaches the disk however the run ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from managed_cli.backends import _http
from managed_cli.errors import ExitCode, InputError, Interrupted, OutputError
from managed_cli.managed.config import APIServerConfig
from managed_cli.rollout import runner
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.events import Progress
from managed_cli.rollout.pool import ServerPool
from managed_cli.rollout.runner import READ_AHEAD, Runner, _to_the_end, read_ahead
from managed_cli.rollout.sample_run import roll_out
from managed_cli.rollout.samples import InputOptions, Task
from managed_cli.rollout.stop import Stop, listening_to_signals
from managed_cli.storage.shards import ShardedOutput, open_output
from managed_cli.types import SamplingParams
from tests.servers.process import RunningServer, running_server

CONCURRENCY = 16


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("llamacpp") as running:
        yield running


def make_task(index: int, **changes: object) -> Task:
    settings: dict[str, object] = {
        "sample_id": f"s{index:03d}",
        "prompt": f"Say {index}.",
        "source": f"in.jsonl:{index + 1}",
        "line": index + 1,
        **changes,
    }
    return Task(**settings)  # type: ignore[arg-type]  # tests change fields by name


def make_tasks(count: int) -> list[Task]:
    return [make_task(index) for index in range(count)]


def run(server: RunningServer, output: ShardedOutput, tasks: list[Task], *, n: int = 1) -> Progress:
    """The counts of a run over `tasks` in this process."""
    config = RolloutConfig(
        out=str(output.growing_path),
        servers=(APIServerConfig(server_type="llamacpp", base_url=server.url),),
        sampling=SamplingParams(n=n, max_tokens=2, seed=1),
        input=InputOptions(),
        concurrency=CONCURRENCY,
    )
    progress = Progress(total=len(tasks))

    async def running() -> None:
        pool = ServerPool(config.servers)
        try:
            await pool.prepare()
            await Runner(config, iter(tasks), pool, output, progress, Stop(), do=roll_out).run()
        finally:
            await pool.aclose()

    asyncio.run(running())
    return progress


def output_at(directory: Path, rows_per_shard: int = 1000) -> ShardedOutput:
    return open_output(f"{directory}/rows/", run_facts={}, rows_per_shard=rows_per_shard, overwrite=False)


def test_every_task_is_settled_once_and_on_disk(tmp_path: Path, server: RunningServer) -> None:
    with output_at(tmp_path) as output:
        progress = run(server, output, make_tasks(50), n=2)
    assert (progress.recorded, progress.failed, progress.rows, progress.in_flight) == (50, 0, 100, {})
    recorded = pq.read_table(tmp_path / "rows").column("sample_id").to_pylist()
    assert sorted(recorded) == sorted(2 * [task.sample_id for task in make_tasks(50)])


@pytest.mark.parametrize(("seconds", "at_once"), [(60.0, READ_AHEAD), (-1.0, 1)])
def test_tasks_are_read_ahead_in_order_and_not_for_long(
    seconds: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "READ_AHEAD_SECONDS", seconds)
    numbers = iter(range(100))
    ahead = read_ahead(numbers)
    assert next(ahead) == 0
    assert next(numbers) == at_once
    assert list(ahead) == [number for number in range(1, 100) if number != at_once]


@pytest.mark.parametrize("before", [0, 3, READ_AHEAD, READ_AHEAD + 5])
def test_a_line_that_cannot_be_read_waits_for_the_tasks_before_it(before: int) -> None:
    def tasks() -> Iterator[int]:
        yield from range(before)
        raise InputError("broken")

    ahead = read_ahead(tasks())
    assert list(itertools.islice(ahead, before)) == list(range(before))
    with pytest.raises(InputError, match="broken"):
        next(ahead)


def test_no_shard_but_the_last_is_smaller_than_asked_for(tmp_path: Path, server: RunningServer) -> None:
    with output_at(tmp_path, rows_per_shard=10) as output:
        run(server, output, make_tasks(95), n=1)
    sizes = [pq.read_metadata(shard).num_rows for shard in sorted((tmp_path / "rows").glob("*.parquet"))]
    assert sum(sizes) == 95
    assert min(sizes[:-1]) >= 10


def test_a_row_that_cannot_be_stored_fails_its_sample_alone(tmp_path: Path, server: RunningServer) -> None:
    tasks = [*make_tasks(3), make_task(3, fields={"odd": object()})]
    with output_at(tmp_path) as output:
        progress = run(server, output, tasks)
        failure = json.loads(output.failures_path.read_text("utf-8"))
    assert (progress.recorded, progress.failed, progress.failure_classes) == (3, 1, {"OutputError": 1})
    assert (failure["sample_id"], failure["line"], failure["error"]) == ("s003", 4, "OutputError")


def test_a_prompt_whose_connections_are_lost_fails_alone_while_the_server_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "FIRST_BACKOFF_SECONDS", 0.0)
    with running_server("llamacpp", "--drop-every", 1) as server, output_at(tmp_path) as output:
        progress = run(server, output, make_tasks(2))
        failures = [json.loads(line) for line in output.failures_path.read_text("utf-8").splitlines()]
    assert (progress.recorded, progress.failure_classes) == (0, {"ServerUnreachable": 2})
    assert [failure["attempts"] for failure in failures] == [_http.DEFAULT_ATTEMPTS] * 2


def test_a_disk_that_takes_no_more_ends_the_run(tmp_path: Path, server: RunningServer) -> None:
    with output_at(tmp_path, rows_per_shard=10) as output:
        shutil.rmtree(tmp_path / "rows")
        with pytest.raises(OutputError):
            run(server, output, make_tasks(30))


def test_writing_goes_on_to_its_end_when_it_is_cancelled() -> None:
    may_end, ended = threading.Event(), []

    def write() -> None:
        assert may_end.wait(60)
        ended.append(True)

    async def cancelled_twice() -> None:
        writing = asyncio.ensure_future(_to_the_end(write))
        for _ in range(2):
            await asyncio.sleep(0)
            writing.cancel()
        await asyncio.sleep(0)
        assert not writing.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(cancelled_twice())
    assert ended == [True]


def test_an_error_of_the_writing_is_told_although_it_was_cancelled() -> None:
    def write() -> None:
        raise OutputError("the disk is full")

    async def cancelled() -> None:
        writing = asyncio.ensure_future(_to_the_end(write))
        await asyncio.sleep(0)
        writing.cancel()
        await writing

    with pytest.raises(OutputError, match="the disk is full"):
        asyncio.run(cancelled())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, ExitCode.SIGINT), (signal.SIGTERM, ExitCode.SIGTERM)])
def test_a_signal_interrupts_what_does_not_end(number: signal.Signals, code: ExitCode) -> None:
    async def waiting() -> None:
        stop = Stop()
        with listening_to_signals(stop):
            asyncio.get_running_loop().call_soon(signal.raise_signal, number)
            await stop.unless_asked(asyncio.Event().wait())

    with pytest.raises(Interrupted) as caught:
        asyncio.run(waiting())
    assert caught.value.exit_code is code


def test_without_a_signal_work_gives_its_result_and_its_own_errors() -> None:
    async def failing() -> None:
        raise TimeoutError("its own")

    async def working() -> int:
        stop = Stop()
        with pytest.raises(TimeoutError, match="its own"):
            await stop.unless_asked(failing())
        return await stop.unless_asked(asyncio.sleep(0, 7))

    assert asyncio.run(working()) == 7
