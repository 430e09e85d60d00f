"""The project's events, over one subscription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from dsec.channel import Channel
from dsec_common import subjects
from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.layer import LayerImportProgress
from dsec_common.wire.sandbox import SandboxEnded, SandboxRefused, SandboxRunning

Event = SandboxRunning | SandboxEnded | SandboxRefused | LayerImportProgress

Listener = Callable[[Message], None]

#: Events that may wait for a slow reader; one that falls further behind is told so.
_WAITING_MAX: Final = 10_000


class EventHub:
    """Hands the project's events to listeners. The subscription is made at the first need."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._listeners: dict[str, set[Listener]] = {}
        self._opening = asyncio.Lock()
        self._open = False

    async def _ensure_open(self) -> None:
        async with self._opening:
            if self._open:
                return
            union: Any = Event
            await self._channel.bus.subscribe(
                subjects.project_events(self._channel.project), union, self._receive
            )
            # Nothing published from here on may be missed by the listener that asked.
            await self._channel.bus.flush()
            self._open = True

    async def _receive(self, request: Request[Any]) -> None:
        for key in (request.subject, ""):
            for listener in tuple(self._listeners.get(key, ())):
                listener(request.message)

    @asynccontextmanager
    async def listening(self, subject: str, listener: Listener) -> AsyncIterator[None]:
        """Call ``listener`` with each event on ``subject`` (all, when empty) within the context."""
        self._listeners.setdefault(subject, set()).add(listener)
        try:
            await self._ensure_open()
            yield
        finally:
            listeners = self._listeners[subject]
            listeners.discard(listener)
            if not listeners:
                del self._listeners[subject]

    async def all(self) -> AsyncIterator[Event]:
        """Yield the project's events from now on.

        Raises:
            DsecError: ``exhausted`` when the reader fell so far behind that events were lost.
        """
        queue: asyncio.Queue[Any] = asyncio.Queue()
        lost = False

        def put(message: Message) -> None:
            nonlocal lost
            if queue.qsize() < _WAITING_MAX:
                queue.put_nowait(message)
            else:
                lost = True

        async with self.listening("", put):
            while True:
                if lost:
                    raise DsecError(
                        ErrorCode.EXHAUSTED,
                        f"more than {_WAITING_MAX} events waited to be read and some were lost; "
                        "read faster, or read the behaviour log, which keeps all",
                        retryable=False,
                    )
                yield await queue.get()
