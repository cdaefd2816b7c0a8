"""The servers of a run: which one a sample goes to, which are out, and when they are let back in.

A sample goes to the server with the fewest samples under way and stays there to its end. A server whose connections
break is looked at once; when it does not answer it is out, and what it was working on goes to others, or waits until
one is back. A server is let back in when it answers and is what it was when the run began. A sample that only its own
connections are lost to is that sample's fault, and never ends a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Callable, Sequence

from managed_cli.backends._http import RETRIED_STATUSES, CountedSends
from managed_cli.backends.base import refusal_is_final
from managed_cli.backends.embedded import IN_PROCESS
from managed_cli.errors import (
    ManagedCliError,
    RequestTimedOut,
    ServerChanged,
    ServerContractError,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    TokenizerError,
)
from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.servers import Server, TokenizerShelf, differences, server_for

SHORT_OUTAGE_SECONDS = 15.0
"""A run without any server waits so long even where it is not told to: a restarted load balancer is back by then."""

LOOK_SECONDS = 1.0
"""Between looks at a server that is out."""

NOT_NEEDED = (ServerContractError, RequestTimedOut)
"""Faults of one reply, after which the server is not looked at."""

_looking: contextvars.ContextVar[bool] = contextvars.ContextVar("looking", default=False)
"""Set while a server is looked at, so that a connection lost to that is not a reason to look again."""


class StoppedWaiting(Exception):
    """There is no server at the moment, and the run is to end."""


@dataclasses.dataclass(slots=True, eq=False)
class Member:
    """One server of the pool. Times are seconds of `time.monotonic`.

    Attributes:
        outstanding: samples under way there.
        outages: how often it went out.
        fault: why it is out; None while it is in.
        is_gone: it will not be let back in.
        looked_at: when the last look at it began that found nothing wrong.
    """

    server: Server
    outstanding: int = 0
    outages: int = 0
    fault: ManagedCliError | None = None
    is_gone: bool = False
    out_since: float = 0.0
    looked_at: float = 0.0
    looking: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    went_out: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """How messages name it."""
        config = self.server.config
        if config.server_type == "local":
            return "the embedded engine"
        return f"{config.server_type} at {config.backend_config().base_url}"


class ServerPool:
    """One server or several of one model; made inside a running event loop.

    Args:
        tell: called with a line for people when a server goes out or comes back.
    """

    def __init__(self, configs: Sequence[APIServerConfig], *, tell: Callable[[str], None] = lambda _: None) -> None:
        shelf = TokenizerShelf()
        self.members = [Member(server_for(config)) for config in configs]
        for member in self.members:
            member.server.shelf = shelf
        self._wait_seconds = max(configs[0].wait_for_server, SHORT_OUTAGE_SECONDS)
        self._tell = tell
        self._someone_in = asyncio.Event()
        self._all_out_since = time.monotonic()
        self._may_wait = True
        self._reference = self.members[0].server

    @property
    def reference(self) -> Server:
        """The server that all others must be like: the first that was up when the run began."""
        return self._reference

    @property
    def waiting_seconds(self) -> float | None:
        """How long there has been no server; None while there is one."""
        return None if self._someone_in.is_set() else time.monotonic() - self._all_out_since

    async def prepare(self) -> None:
        """Connect to every server and compare them; one that does not answer is out, as long as another does.

        Raises:
            ServerError, TokenizerError, ConfigError: no server can be used, or one is not like the others.
        """
        first, *others = self.members
        if not others:
            await first.server.prepare()
        else:
            async with asyncio.TaskGroup() as tasks:
                trying = [tasks.create_task(_fault_of_preparing(member.server)) for member in self.members]
            faults = [task.result() for task in trying]
            final = [fault for fault in faults if fault is not None and not _may_pass(fault)]
            if final or None not in faults:
                raise next(fault for fault in (*final, *faults) if fault is not None)
            self._reference = self.members[faults.index(None)].server
            for member, fault in zip(self.members, faults, strict=True):
                if fault is None:
                    self._refuse_another_kind(member)
                else:
                    self._take_out(member, fault)
        for member in self.members:
            if member.fault is None:
                self._let_in(member)

    def _refuse_another_kind(self, member: Member) -> None:
        """Raise ServerChanged unless the server of `member` is like the first that was up."""
        reference = self.reference
        other = differences(reference.info, member.server.info)
        if other:
            raise ServerChanged(
                f"{member.name} does not serve what {reference.backend.base_url} does",
                details=other,
                hint="all servers of a run must serve the same model in the same way",
            )

    def _let_in(self, member: Member) -> None:
        member.fault = None
        member.went_out.clear()
        member.looked_at = time.monotonic()
        member.server.backend.watch_connections(lambda: self.is_lost(member))
        self._someone_in.set()

    def _take_out(self, member: Member, fault: ManagedCliError, *, for_good: bool = False) -> None:
        if member.fault is not None:
            return
        member.fault, member.is_gone = fault, for_good
        member.outages += 1
        member.out_since = time.monotonic()
        member.went_out.set()
        self._tell(f"warning: {member.name} is out: {_in_a_line(fault)}")
        if all(other.fault is not None for other in self.members):
            self._someone_in.clear()
            self._all_out_since = time.monotonic()

    def _wake_the_waiting(self) -> None:
        """Let whoever waits for a server see whether waiting still makes sense."""
        was_set = self._someone_in.is_set()
        self._someone_in.set()
        if not was_set:
            self._someone_in.clear()

    def stop_waiting(self) -> None:
        """From now on nobody waits for a server."""
        self._may_wait = False
        self._wake_the_waiting()

    async def free_member(self) -> Member:
        """The server with the fewest samples under way, waited for where there is none.

        Raises:
            ServerError: there is none, and there was none for as long as is waited.
            StoppedWaiting: there is none, and nobody is to wait for one.
        """
        while True:
            inside = [member for member in self.members if member.fault is None]
            if inside:
                return min(inside, key=lambda member: member.outstanding)
            if not self._may_wait:
                raise StoppedWaiting
            left = self._wait_seconds - (time.monotonic() - self._all_out_since)
            if left <= 0 or all(member.is_gone for member in self.members):
                raise self._no_server()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._someone_in.wait()

    def _no_server(self) -> ManagedCliError:
        """Why there is none, as the error that ends the run."""
        faults = [member.fault for member in self.members if member.fault is not None]
        if len(faults) == 1:
            return faults[0]
        return ServerUnreachable(
            f"none of the {len(faults)} servers can be used",
            details=[f"{member.name}: {_in_a_line(fault)}" for member, fault in zip(self.members, faults, strict=True)],
            hint="--wait-for-server SECONDS waits for servers that come back",
        )

    async def is_to_blame(self, member: Member, error: ManagedCliError, outages_before: int) -> bool:
        """Whether the server, not the sample, is why the sample has no rows, so that it is to be rolled out again.

        Args:
            outages_before: `member.outages` from before the sample was sent.

        Raises:
            ServerError: `error`, where no server is left that could come back.
        """
        if not isinstance(error, ServerError) or isinstance(error, NOT_NEEDED):
            return False
        if isinstance(error, ServerRefused) and error.status not in RETRIED_STATUSES:
            if not refusal_is_final(error):
                return False
            can_return = error.status >= 500  # an engine that has ended, and may be started anew
            self._take_out(member, error, for_good=not can_return)
        elif isinstance(error, (ServerUnreachable, ServerRefused)):
            if not await self.is_lost(member):
                return member.outages > outages_before
        else:
            return False
        if all(other.is_gone for other in self.members):
            raise error
        return True

    async def is_lost(self, member: Member) -> bool:
        """Whether the server is out, found by a look at it that begins after this call."""
        if _looking.get():
            return True
        asked = time.monotonic()
        async with member.looking:
            if member.fault is None and member.looked_at < asked:
                began = time.monotonic()
                try:
                    await _look(member.server, sample=False)
                except ManagedCliError as fault:
                    if not _is_generating(member.server, fault):
                        self._take_out(member, fault, for_good=isinstance(fault, ServerChanged))
                member.looked_at = began
        return member.fault is not None

    async def watch(self, member: Member) -> None:
        """Let `member` back in whenever it is out and can be; for as long as the run lasts."""
        while True:
            await member.went_out.wait()
            await asyncio.sleep(LOOK_SECONDS)
            if member.is_gone:
                return
            try:
                if member.server.is_prepared:
                    await _look(member.server, sample=True)
                else:
                    await member.server.prepare()
                    self._refuse_another_kind(member)
            except (ServerChanged, TokenizerError) as fault:
                member.fault, member.is_gone = fault, True
                self._tell(f"warning: {member.name} is not let back in: {_in_a_line(fault)}")
                self._wake_the_waiting()
            except ManagedCliError as fault:
                member.fault = fault
            else:
                self._tell(f"{member.name} is back after {time.monotonic() - member.out_since:.0f} s")
                self._let_in(member)

    def outages(self) -> dict[str, int]:
        """How often each server went out, by the name that rows have for it."""
        return {recorded_name(member.server): member.outages for member in self.members if member.server.is_prepared}

    async def aclose(self) -> None:
        """Close every connection, and end an embedded engine."""
        for member in self.members:
            await member.server.aclose()


def recorded_name(server: Server) -> str:
    """What rows say of the server that sampled them: its address, or that it was in this process."""
    return IN_PROCESS if server.config.server_type == "local" else server.backend.base_url


async def _look(server: Server, *, sample: bool) -> None:
    token = _looking.set(True)
    try:
        with CountedSends():  # what is sent for a look is none of a sample's attempts
            await server.look_again(sample=sample)
    finally:
        _looking.reset(token)


def _is_generating(server: Server, fault: ManagedCliError) -> bool:
    """Whether a look that ended with `fault` met a server that says nothing until it has generated."""
    is_silent = isinstance(fault, ServerUnreachable) and fault.is_silent
    return is_silent and not server.backend.answers_while_generating


async def _fault_of_preparing(server: Server) -> ManagedCliError | None:
    """None once the server is prepared, or why it cannot be; returned, since a task group would wrap it."""
    try:
        await server.prepare()
    except ManagedCliError as fault:
        return fault
    return None


def _may_pass(fault: ManagedCliError) -> bool:
    """Whether a server with this fault may be up later."""
    return isinstance(fault, ServerUnreachable) or (isinstance(fault, ServerRefused) and fault.status >= 500)


def _in_a_line(fault: ManagedCliError) -> str:
    return "; ".join((fault.message, *fault.details[:1]))
