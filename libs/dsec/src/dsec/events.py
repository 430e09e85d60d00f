"""The project's events, over one subscription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Self

from dsec.channel import Channel
from dsec.handle import Closing
from dsec_common import subjects
from dsec_common.bus_serving import EventSubscription
from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.checkpoint import RolloutPutBack
from dsec_common.wire.elastic import SandboxResized
from dsec_common.wire.layer import LayerImportProgress
from dsec_common.wire.life import SandboxPaused, SandboxResumed
from dsec_common.wire.sandbox import SandboxEnded, SandboxRefused, SandboxRunning

Event = (
    SandboxRunning
    | SandboxPaused
    | SandboxResumed
    | SandboxResized
    | SandboxEnded
    | SandboxRefused
    | LayerImportProgress
    | RolloutPutBack
)

Listener = Callable[[Message], None]

#: Events that may wait for a slow reader; one that falls further behind is told so.
_WAITING_MAX: Final = 10_000
#: How long the subscription outlives its last listener: who listens again soon finds it there.
_LINGER_S: Final = 1.0


class EventHub:
    """Hands the project's events to listeners, over one subscription while there are any.

    It ends a second after the last listener has gone: a client that does not listen must not be
    sent, and decode, every event of its project.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._listeners: dict[str, set[Listener]] = {}
        self._changing = asyncio.Lock()
        self._subscription: EventSubscription[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def subscribed(self) -> bool:
        """Whether the project's events are sent to this client."""
        return self._subscription is not None

    async def _ensure_open(self) -> None:
        async with self._changing:
            if self._subscription is not None:
                return
            union: Any = Event
            bus = self._channel.bus
            subscription = await bus.subscribe(
                subjects.project_events(self._channel.project), union, self._receive
            )
            try:
                # Nothing published from here on may be missed by the listener that asked.
                await bus.flush()
            except BaseException:
                await bus.unsubscribe(subscription)
                raise
            self._subscription = subscription

    def _begin_closing(self) -> None:
        self._closing = asyncio.create_task(self._close_unless_wanted(), name="end of the events")

    async def _close_unless_wanted(self) -> None:
        async with self._changing:
            if self._listeners or self._subscription is None:
                return
            subscription, self._subscription = self._subscription, None
            await self._channel.bus.unsubscribe(subscription)

    async def aclose(self) -> None:
        """Leave the subscription to the end of the connection. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closing is not None:
            await self._closing

    async def _receive(self, request: Request[Any]) -> None:
        for key in (request.subject, ""):
            for listener in tuple(self._listeners.get(key, ())):
                listener(request.message)

    @asynccontextmanager
    async def listening(self, subject: str, listener: Listener) -> AsyncIterator[None]:
        """Call ``listener`` with each event on ``subject`` (all, when empty) within the context."""
        self._listeners.setdefault(subject, set()).add(listener)
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._ensure_open()
            yield
        finally:
            listeners = self._listeners[subject]
            listeners.discard(listener)
            if not listeners:
                del self._listeners[subject]
            if not self._listeners:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_LINGER_S, self._begin_closing)


class EventStream(Closing):
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

    async def _leave(self) -> None:
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
