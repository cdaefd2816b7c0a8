"""The user's own reward function: found by name, called with rows, and blamed by row where it fails.

A row is scored as a plain dict: every column by name, `metadata` as the object it is, and two short cuts into it:
`fields` (what the input line had beside the prompt) and `completion` (the last sampled turn, as a person reads it).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import statistics
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from managed_cli.errors import ConfigError
from managed_cli.export.rollouts import Rollout

AdvantageKind = Literal["mean", "std", "none"]

CALLS_AT_ONCE = 64
"""Calls of an async reward function under way at a time: as many as an ordinary judge endpoint takes."""

STD_FLOOR = 1e-6
"""Added to a group's standard deviation before dividing by it, as verl and slime do: equal rewards give advantage 0."""

RowDict = dict[str, Any]  # Any: the columns' values


class Reward:
    """A function `row → number`, sync or async; a context manager, which owns the event loop of async ones.

    Args:
        place: `module:function`; the module is looked for in the current directory too.

    Raises:
        ConfigError: there is no such function; or, while scoring, it failed. The message names the row.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._function = _imported(place)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def score(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """What the function gives each row, in their order; None where it says that there is no reward."""
        # What it prints is for people: stdout holds our own data.
        with contextlib.redirect_stdout(sys.stderr):
            if not inspect.iscoroutinefunction(self._function):
                return [self._scored(rollout) for rollout in rollouts]
            return self._runner.run(self._scored_at_once(rollouts))

    def _scored(self, rollout: Rollout) -> float | None:
        try:
            value = self._function(row_dict(rollout))
            if inspect.isawaitable(value):  # a callable object, or a function that returns another's coroutine
                value = self._runner.run(_awaited(value))
        except Exception as error:  # the user's code: whatever it raises is told with its row
            raise self._failure(rollout, error) from error
        return self._checked(rollout, value)

    async def _scored_at_once(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        free = asyncio.Semaphore(CALLS_AT_ONCE)

        async def scored(rollout: Rollout) -> float | None:
            async with free:
                try:
                    value = await self._function(row_dict(rollout))
                except Exception as error:  # as above
                    raise self._failure(rollout, error) from error
            return self._checked(rollout, value)

        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(scored(rollout)) for rollout in rollouts]
        except* ConfigError as group:
            raise group.exceptions[0] from None
        return [task.result() for task in tasks]

    def _checked(self, rollout: Rollout, value: object) -> float | None:
        if value is None:
            return None
        try:
            number = float(cast(Any, value))  # Any: numbers of numpy and torch are welcome
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, str) or not math.isfinite(number):
            raise ConfigError(
                f"{self._subject(rollout)} returned {value!r:.80}, expected a finite number or None",
                hint="None leaves the row out, and counts it as dropped",
            )
        return number

    def _failure(self, rollout: Rollout, error: Exception) -> ConfigError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return ConfigError(
            f"{self._subject(rollout)} failed: {type(error).__name__}: {' '.join(str(error).split())}",
            details=[f"{frame.filename}:{frame.lineno}: {frame.line}", "nothing was exported"],
            hint=f"`managed-cli inspect PATH --row {rollout.row}` shows the row",
        )

    def _subject(self, rollout: Rollout) -> str:
        place = f"row {rollout.row} (sample {rollout.sample_id}, choice {rollout.columns['choice_index']})"
        return f"--reward {self._place}: {place}"


def row_dict(rollout: Rollout) -> RowDict:
    """The row as a reward function is given it."""
    texts, fields = rollout.turn_texts, rollout.metadata.get("fields")
    return {
        **rollout.columns,
        "row": rollout.row,
        "tokens": rollout.tokens.tolist(),
        "masked_tokens": rollout.masked_tokens.tolist(),
        "logprobs": rollout.logprobs.tolist(),
        "metadata": dict(rollout.metadata),
        "fields": dict(fields) if isinstance(fields, dict) else {},
        "completion": texts[-1] if texts else "",
        "messages": rollout.conversation,
    }


def give_advantages(group: Sequence[Rollout], kind: AdvantageKind) -> None:
    """Set the advantage of every row of a sample from the rewards of all of them.

    `mean`: reward less the mean. `std`: that, over the sample standard deviation (n - 1) and `STD_FLOOR`; 0.0 for a
    single row. `none`: left at None.
    """
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    if kind == "none" or not rewards:
        return
    mean = statistics.fmean(rewards)
    scale = 1.0
    if kind == "std":
        scale = (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + STD_FLOOR
    for rollout, reward in zip(group, rewards, strict=True):
        rollout.advantage = (reward - mean) / scale


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _imported(place: str) -> Callable[[RowDict], Any]:  # Any: a number, None, or an awaitable of one
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--reward {place!r} is not module:function", hint="write it as --reward rewards:score")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except Exception as error:  # the user's code: whatever its import raises is told as such
        raise ConfigError(
            f"--reward {place}: the module cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}",
            hint="it is looked for in the current directory and on PYTHONPATH",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--reward {place}: {module_name} has no function {name!r}")
    return cast("Callable[[RowDict], Any]", function)
