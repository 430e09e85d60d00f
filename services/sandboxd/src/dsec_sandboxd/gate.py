"""The way into a sandbox: every request that needs it running passes here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import CpuClass, SandboxCreated, SandboxState
from dsec_sandboxd.events import ResumeAsked, VisitBegan, VisitEnded
from dsec_sandboxd.lifecycle import Sandboxes, local_of
from dsec_sandboxd.quick_wakes import QuickWakes
from dsec_sandboxd.records import SandboxRecord

#: So long an answer waits for why a sandbox ended; its first process is dead and its cgroups go.
_END_KNOWN_S: Final = 5.0

_Asked = TypeVar("_Asked", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)


Handler = Callable[[Request[Any]], Awaitable[Message]]
Guard = Callable[[Handler], Handler]
"""Puts a handler behind the gate: :meth:`Gate.guard`."""


class Gate:
    """Lets requests into running sandboxes; a paused one is made to run for them.

    What is inside counts as use: while it lasts, no idle time does.
    """

    def __init__(self, sandboxes: Sandboxes, wakes: QuickWakes) -> None:
        self._sandboxes = sandboxes
        self._wakes = wakes
        self._state = sandboxes.state
        self._clock = sandboxes.parts.clock
        #: Raises for a sandbox that no request may have run now.
        self.check_awake: Callable[[SandboxRecord], None] = lambda _record: None

    @asynccontextmanager
    async def visit(self, project: str, local: str) -> AsyncIterator[SandboxRecord]:
        """Have a sandbox run, and keep it in use while the context lasts.

        Its owner may pause it all the same: then what is inside stands still with it.

        Raises:
            DsecError: ``not_found``; ``expired`` with the cause when it is over; ``unavailable``
                when it is not ready yet or the node is stopping; ``timeout`` when it does not
                wake; ``denied`` when its agent's policy has it stand still; what
                :attr:`check_awake` raises besides.
        """
        record = self._state.running(project, local)
        self.check_awake(record)
        self._sandboxes.handle(VisitBegan(monotonic_s=self._clock.monotonic(), local=local))
        try:
            while record.state is not SandboxState.RUNNING:
                self.check_awake(record)
                if record.state is not SandboxState.RESUMING:
                    self._sandboxes.handle(ResumeAsked(local=local))
                await self._sandboxes.turn(local)
                record = self._state.running(project, local)
            if record.inheriting:
                await self._sandboxes.switched(local)
                record = self._state.running(project, local)
            yield record
        finally:
            self.ended(local)

    def place(self, request: Request[PlaceSandbox]) -> Awaitable[SandboxCreated]:
        """Have a sandbox made, as :meth:`Sandboxes.place`."""
        if request.message.request.limits.cpu_class is CpuClass.LATENCY_SENSITIVE:
            self._wakes.note()
        return self._sandboxes.place(request)

    async def end_known(self, record: SandboxRecord) -> None:
        """Return when it is known why a sandbox ended whose processes are gone; soon in any case.

        One that is put back to a snapshot has not ended.
        """
        with contextlib.suppress(TimeoutError, DsecError):
            async with asyncio.timeout(_END_KNOWN_S):
                while not self._sandboxes.is_remaking(record.local):
                    self._state.running(record.project, record.local)
                    await self._sandboxes.turn(record.local)

    def began(self, local: str) -> None:
        """Count a use that needs no waiting: something inside the sandbox asks for something."""
        self._sandboxes.handle(
            VisitBegan(monotonic_s=self._clock.monotonic(), local=local, wakes=False)
        )

    def ended(self, local: str) -> None:
        """Count the end of a use; to be called once for each beginning."""
        self._sandboxes.handle(VisitEnded(monotonic_s=self._clock.monotonic(), local=local))

    def guard(
        self, handler: Callable[[Request[_Asked]], Awaitable[_Answer]]
    ) -> Callable[[Request[_Asked]], Awaitable[_Answer]]:
        """Return ``handler`` behind the gate: it sees only requests to running sandboxes."""

        async def guarded(request: Request[_Asked]) -> _Answer:
            local = local_of(request)
            record = self._state.running(request.project, local)
            self.check_awake(record)
            if record.limits.cpu_class is CpuClass.LATENCY_SENSITIVE:
                self._wakes.note()
            if record.state is not SandboxState.RUNNING or record.inheriting:
                async with self.visit(request.project, local):
                    return await handler(request)
            self.began(local)
            try:
                return await handler(request)
            finally:
                self.ended(local)

        return guarded
