"""A vLLM on a CPU is recognised, and no more seeded prompt tokens are in flight there than one step reads."""

import asyncio
from pathlib import Path

import pytest

from managed_cli.backends.base import refusal_is_final
from managed_cli.backends.vllm_on_cpu import OTHERS_TOKENS, STEP_TOKENS, StepBudget, runs_on_cpu
from managed_cli.errors import ServerRefused

CPU = (
    'vllm:cache_config_info{block_size="128",engine="0",kv_cache_memory_bytes="1073741824",num_gpu_blocks="182",'
    'user_specified_block_size="False"} 1.0\n'
)


def test_a_cpu_is_known_by_its_cache() -> None:
    assert runs_on_cpu(f"# HELP something\n{CPU}")
    assert runs_on_cpu('vllm:cache_config_info{block_size="128",cpu_kvcache_space_bytes="1073741824"} 1.0')


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        "<html>not metrics</html>",
        CPU.replace('"128"', '"16"'),
        CPU.replace('"1073741824"', '"None"'),
        CPU.replace('user_specified_block_size="False"', 'user_specified_block_size="True"'),
        'vllm:cache_config_info{block_size="16",cpu_kvcache_space_bytes="None"} 1.0',
    ],
)
def test_other_servers_are_not_taken_for_one(metrics: str) -> None:
    assert not runs_on_cpu(metrics)


def test_holders_never_exceed_the_budget_and_are_served_in_order() -> None:
    budget, held, most, order = StepBudget(10), 0, 0, []

    async def hold(number: int, tokens: int) -> None:
        nonlocal held, most
        async with budget.taken(tokens):
            held += min(tokens, budget.tokens)
            most = max(most, held)
            order.append(number)
            await asyncio.sleep(0)
            held -= min(tokens, budget.tokens)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, tokens in enumerate((4, 4, 4, 25, 1, 10, 3)):
                tasks.create_task(hold(number, tokens))

    asyncio.run(all_of_them())
    assert most <= 10
    assert order == list(range(7))


def test_a_cancelled_request_gives_back_what_it_held_or_waited_for() -> None:
    async def scenario() -> None:
        budget = StepBudget(10)
        started = asyncio.Event()

        async def hold(tokens: int) -> None:
            async with budget.taken(tokens):
                started.set()
                await asyncio.Event().wait()

        holder = asyncio.ensure_future(hold(8))
        await started.wait()
        waiter = asyncio.ensure_future(hold(5))
        await asyncio.sleep(0)
        for task in (waiter, holder):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(1), budget.taken(10):
            pass

    asyncio.run(scenario())


def test_the_recorded_metrics_of_a_cpu_server_are_recognised() -> None:
    assert runs_on_cpu(Path(__file__).with_name("vllm_cpu_metrics.txt").read_text(encoding="utf-8"))


def test_a_small_second_run_fits_beside_a_full_one() -> None:
    assert StepBudget().tokens == STEP_TOKENS - OTHERS_TOKENS < STEP_TOKENS


def test_an_engine_that_has_ended_ends_the_run_and_another_error_does_not() -> None:
    ended = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    assert refusal_is_final(ServerRefused("vllm answered HTTP 500", status=500, details=[ended]))
    assert not refusal_is_final(ServerRefused("vllm answered HTTP 500", status=500, details=["out of luck"]))
