"""Why something waits for Compute Units, and giving it up, whichever scheduler has it."""

from __future__ import annotations

from typing import Final

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.waiting import (
    CancelWaiting,
    ExplainWaiting,
    FindWaiting,
    WaitingCancelled,
    WaitingExplained,
)
from dsec_scheduler.errors import not_waiting
from dsec_scheduler.unit_desk import UnitDesk

#: A scheduler that has what is looked for answers at once; the others say nothing.
_FIND_TIMEOUT_S: Final = 1.0


class WaitingDoor:
    """Answers projects, and other schedulers."""

    def __init__(self, bus: Bus, desk: UnitDesk) -> None:
        self._bus = bus
        self._desk = desk

    async def serve(self, queue: str) -> None:
        """Open the doors."""
        explain, cancel = (subjects.any_project(f"sandbox.{it}") for it in ("explain", "cancel"))
        await self._bus.serve(explain, ExplainWaiting, self._explain, queue=queue)
        await self._bus.serve(cancel, CancelWaiting, self._cancel, queue=queue)
        await self._bus.serve(subjects.FIND_WAITING, FindWaiting, self._find)

    async def _explain(self, asked: Request[ExplainWaiting]) -> Message:
        wanted = FindWaiting(project=asked.project, request_id=asked.message.request_id)
        return await self._here(wanted) or await self._elsewhere(wanted, WaitingExplained)

    async def _cancel(self, asked: Request[CancelWaiting]) -> Message:
        wanted = FindWaiting(
            project=asked.project, request_id=asked.message.request_id, cancel=True
        )
        return await self._here(wanted) or await self._elsewhere(wanted, WaitingCancelled)

    async def _find(self, asked: Request[FindWaiting]) -> Message | None:
        return await self._here(asked.message)

    async def _here(self, wanted: FindWaiting) -> Message | None:
        ask = self._desk.find(wanted.project, wanted.request_id)
        if ask is None:
            return None
        if not wanted.cancel:
            return await self._desk.explain(ask)
        self._desk.cancel(wanted.project, wanted.request_id)
        return WaitingCancelled(request_id=wanted.request_id)

    async def _elsewhere(self, wanted: FindWaiting, reply_type: type[Message]) -> Message:
        """Ask all schedulers; this one, too, hears it and says nothing.

        Raises:
            DsecError: ``not_found`` when nobody has it.
        """
        try:
            return await self._bus.request(
                subjects.FIND_WAITING, wanted, reply_type, timeout_s=_FIND_TIMEOUT_S
            )
        except DsecError as error:
            if error.code is not ErrorCode.TIMEOUT:
                raise
            raise not_waiting(wanted.request_id) from None
