"""Events on their way to JetStream, off the path of any reply."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import structlog

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message

_log: Final = structlog.get_logger(__name__)

_BATCH: Final = 256
_RETRY_S: Final = 0.5
_WAITING_MAX: Final = 200_000
_PERMANENT: Final = frozenset({ErrorCode.INVALID, ErrorCode.DENIED})


class StreamBus(Protocol):
    """The part of the bus that appends to streams."""

    async def js_publish(self, subject: str, message: Message, *, message_id: str = "") -> int:
        """Append a message; its id is recognised when repeated."""
        ...


class EventPublisher:
    """Publishes events in order, at least once for as long as this process lives.

    :meth:`publish` never waits. While JetStream does not answer, events stay here and are sent
    again, each with its own message id, so that the stream drops repetitions. Up to 256 are on
    their way at once; one that fails is repeated before any later batch.
    """

    def __init__(self, bus: StreamBus) -> None:
        self._bus = bus
        self._waiting: deque[tuple[str, Message]] = deque()
        self._on_way: list[tuple[str, Message]] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failing = False
        self._last_error = ""
        self.dropped = 0

    def publish(self, subject: str, event: Message) -> None:
        """Take an event over. Beyond 200,000 that wait, the oldest is dropped and counted."""
        if len(self._waiting) >= _WAITING_MAX:
            self._waiting.popleft()
            self.dropped += 1
            if self.dropped == 1 or not self.dropped % 10_000:
                _log.error("events_dropped", count=self.dropped)
        self._waiting.append((subject, event))
        self._idle.clear()
        self._wake.set()

    @property
    def waiting(self) -> int:
        """How many events JetStream has not acknowledged."""
        return len(self._waiting) + len(self._on_way)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting or self._on_way:
                while self._waiting and len(self._on_way) < _BATCH:
                    self._on_way.append(self._waiting.popleft())
                done = await asyncio.gather(*(self._send(*event) for event in self._on_way))
                self._on_way = [
                    event for event, sent in zip(self._on_way, done, strict=True) if not sent
                ]
                if self._on_way:
                    self._say_failing()
                    await asyncio.sleep(_RETRY_S)
                elif self._failing:
                    self._failing = False
                    _log.info("events_flow_again")
            self._idle.set()

    async def _send(self, subject: str, event: Message) -> bool:
        """Return whether nothing is left to do about the event."""
        try:
            await self._bus.js_publish(subject, event, message_id=event.message_id)
        except DsecError as error:
            if error.code in _PERMANENT:
                _log.error("event_refused", subject=subject, error=str(error))
                return True
            self._last_error = str(error)
            return False
        return True

    def _say_failing(self) -> None:
        if not self._failing:
            self._failing = True
            _log.warning("events_wait", count=self.waiting, error=self._last_error)

    async def flushed(self, timeout_s: float) -> bool:
        """Return true when every event is acknowledged, false when ``timeout_s`` is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("events_left_unpublished", count=self.waiting)
            return False
        return True
