"""The project's events, over one subscription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

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


class EventStream:
    """The project's events: ``async with client.events() as events: async for event in events``.

    None that is published within the context is missed, but while the connection is lost.
    """

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._lost = False
        self._listening = AsyncExitStack()

    def _put(self, message: Message) -> None:
        if self._queue.qsize() < _WAITING_MAX:
            self._queue.put_nowait(message)
        else:
            self._lost = True

    async def __aenter__(self) -> Self:
        await self._listening.enter_async_context(self._hub.listening("", self._put))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        await self._listening.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event; wait for it.

        Raises:
            DsecError: ``exhausted`` when the reader fell so far behind that events were lost.
        """
        if self._lost:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"more than {_WAITING_MAX} events waited to be read and some were lost; read "
                "faster, or read the behaviour log, which keeps all",
                retryable=False,
            )
        event: Event = await self._queue.get()
        return event
