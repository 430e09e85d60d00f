"""What goes first at each scheduler, told to the others, so that turns hold over all of them.

Reports are events without memory: a scheduler that dies is forgotten a moment later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.clock import Clock
from dsec_common.compute.model import ServiceClass
from dsec_common.wire.base import new_id
from dsec_common.wire.waiting import WaitingHead, WaitingReport
from dsec_scheduler.asks import Ask
from dsec_scheduler.queues import WaitingRoom

#: What a report says holds this long: some rounds.
_HOLDS_S: Final = 1.5
#: Of the heads in one report: gangs are large, and NATS takes 1 MiB.
_HEADS_BYTES: Final = 512 * 1024


class Reports:
    """Tells and hears."""

    HEADS_MAX: ClassVar[int] = 32

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._name = new_id()
        #: Of others' asks: below those of this process's own.
        self._ids = itertools.count(-1, -1)
        self._heard: dict[str, tuple[float, tuple[Ask, ...]]] = {}

    async def listen(self) -> None:
        """Begin to hear of others."""
        await self._bus.subscribe(subjects.WAITING_REPORTS, WaitingReport, self._hear)

    async def tell(self, heads: Sequence[Ask], room: WaitingRoom) -> None:
        """Tell the others what goes first here.

        Raises:
            DsecError: as :meth:`Bus.publish`.
        """
        now = self._clock.monotonic()
        told = [
            WaitingHead(
                project=ask.project,
                demands=ask.demands,
                service_class=ask.service_class,
                priority=ask.priority,
                waited_s=max(now - ask.asked_at, 0.0),
                duration_s=ask.duration_s,
            )
            for ask in heads
        ]
        sizes = itertools.accumulate(len(msgspec.msgpack.encode(head)) for head in told)
        report = WaitingReport(
            scheduler=self._name,
            waiting=len(room),
            waiting_cu={str(it): room.waiting_cu(it) for it in ServiceClass},
            heads=tuple(
                head for head, size in zip(told, sizes, strict=True) if size <= _HEADS_BYTES
            ),
        )
        await self._bus.publish(subjects.WAITING_REPORTS, report)

    async def _hear(self, event: Request[WaitingReport]) -> None:
        report = event.message
        if report.scheduler == self._name:
            return
        now = self._clock.monotonic()
        heads = tuple(
            Ask(
                ask_id=next(self._ids),
                request_id="",
                project=head.project,
                demands=head.demands,
                asked_at=now - head.waited_s,
                service_class=head.service_class,
                priority=head.priority,
                duration_s=head.duration_s,
                foreign=True,
            )
            for head in report.heads
            if head.demands and 0 <= head.waited_s < math.inf
        )
        self._heard[report.scheduler] = (now, heads)

    def foreign(self) -> tuple[Ask, ...]:
        """Return what goes first elsewhere, as told in the last moments."""
        now = self._clock.monotonic()
        self._heard = {name: it for name, it in self._heard.items() if now - it[0] <= _HOLDS_S}
        return tuple(ask for _, heads in self._heard.values() for ask in heads)
