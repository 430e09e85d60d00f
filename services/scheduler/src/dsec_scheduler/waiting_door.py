"""Why something waits for Compute Units, and giving up what waits, whichever scheduler has it."""

from __future__ import annotations

from typing import Final

from dsec_common import streams, subjects
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
from dsec_scheduler.cancelling import Cancellations
from dsec_scheduler.errors import not_waiting
from dsec_scheduler.unit_desk import UnitDesk

#: A scheduler that has what is looked for answers at once; the others say nothing.
_FIND_TIMEOUT_S: Final = 1.0


class WaitingDoor:
    """Answers projects, and other schedulers."""

    def __init__(self, bus: Bus, desk: UnitDesk, cancellations: Cancellations) -> None:
        self._bus = bus
        self._desk = desk
        self._cancellations = cancellations

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
        """Have nothing be made of a request, whether it waits somewhere or is still in the queue.

        What is kept of it comes first: who takes it from the queue meanwhile looks there.

        Raises:
            DsecError: ``conflict`` when a node has been asked for it; ``not_found`` when it waits
                nowhere and the project has nothing in the queue.
        """
        project, request_id = asked.project, asked.message.request_id
        queue = subjects.queue_sandbox_create(project)
        queued = await self._bus.stored(streams.QUEUE.name, queue) > 0
        begun: DsecError | None = None
        given_up = False
        try:
            given_up = await self._cancellations.cancel(project, request_id, queued=queued)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            begun = error
        wanted = FindWaiting(project=project, request_id=request_id, cancel=True)
        try:
            return await self._here(wanted) or await self._elsewhere(wanted, WaitingCancelled)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            if begun is not None:
                raise begun from None
            if not given_up:
                raise
        return WaitingCancelled(request_id=request_id)

    async def _find(self, asked: Request[FindWaiting]) -> Message | None:
        return await self._here(asked.message)

    async def _here(self, wanted: FindWaiting) -> Message | None:
        project, request_id = wanted.project, wanted.request_id
        if wanted.cancel:
            if not self._desk.cancel(project, request_id):
                return None
            # It may have been begun before it came to wait again; and this process may die now.
            await self._cancellations.note(project, request_id)
            return WaitingCancelled(request_id=request_id)
        ask = self._desk.find(project, request_id)
        return None if ask is None else await self._desk.explain(ask)

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
