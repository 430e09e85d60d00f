"""Giving up queued requests: one word for each that all schedulers go by, whoever takes it.

A request is begun, and a node asked for it, only by a write that no cancellation is before; it is
cancelled only by a write that no beginning is before. So either nothing is ever made of it, or who
cancels is told which sandbox is being made.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import structlog

from dsec_common.bus import KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_scheduler.errors import already_begun, cancelled
from dsec_scheduler.idempotency import bucket_key
from dsec_scheduler.swapping import NOTHING, swap

_log: Final = structlog.get_logger(__name__)

_PAUSE_S: Final = 0.01


class QueuedState(StrEnum):
    """Where a queued request is, as far as the bucket tells."""

    WAITING = "waiting"
    BEGUN = "begun"
    CANCELLED = "cancelled"


class QueuedRecord(Message, frozen=True, kw_only=True):
    """A queued request that has been begun once, or given up; nothing is kept of others.

    Attributes:
        sandbox_id: that which a node was asked for.
    """

    state: QueuedState
    sandbox_id: str = ""


class Cancellations:
    """What is kept of queued requests: as long as idempotency keys are, in the same bucket."""

    def __init__(self, records: KeyValue[QueuedRecord], clock: Clock) -> None:
        self._records = records
        self._clock = clock

    async def cancel(self, project: str, request_id: str, *, queued: bool) -> bool:
        """Have a request never be begun, if it may be ``queued``; return whether it never is.

        Raises:
            DsecError: ``conflict`` when it has been begun.
        """
        given_up = QueuedRecord(state=QueuedState.CANCELLED)
        nothing = QueuedRecord(state=QueuedState.WAITING, message_id=NOTHING)

        def change(kept: QueuedRecord | None) -> QueuedRecord:
            if kept is not None and kept.state is QueuedState.BEGUN:
                raise already_begun(request_id, kept.sandbox_id)
            if kept is not None and kept.state is QueuedState.CANCELLED:
                return kept
            return given_up if queued else nothing

        return await self.swap(project, request_id, change) is not nothing

    async def note(self, project: str, request_id: str) -> None:
        """Keep that a request was given up where it waited, so that nobody was at work on it."""
        given_up = QueuedRecord(state=QueuedState.CANCELLED)
        await self._records.put(_key(project, request_id), given_up)

    async def swap(
        self,
        project: str,
        request_id: str,
        change: Callable[[QueuedRecord | None], QueuedRecord],
    ) -> QueuedRecord:
        """Write what ``change`` makes of a request's record, and return it."""
        return await swap(self._records, _key(project, request_id), change, self._pause)

    async def _pause(self, attempt: int) -> None:
        await self._clock.sleep(_PAUSE_S * attempt)


def _key(project: str, request_id: str) -> str:
    return bucket_key(project, "queued", request_id)


class Gate:
    """What one queued request passes on its way to a node."""

    def __init__(self, cancellations: Cancellations, project: str, request_id: str) -> None:
        self._cancellations = cancellations
        self._project = project
        self._request_id = request_id
        self._begun = False

    async def look(self) -> None:
        """Return while the request has not been given up.

        Raises:
            DsecError: ``conflict`` when it has.
        """
        await self._write(
            lambda kept: kept or QueuedRecord(message_id=NOTHING, state=QueuedState.WAITING)
        )

    async def begin(self, sandbox_id: str) -> None:
        """Note that a node is about to be asked for this sandbox; only then may it be.

        Raises:
            DsecError: ``conflict`` when the request was given up.
        """
        await self._write(lambda _: QueuedRecord(state=QueuedState.BEGUN, sandbox_id=sandbox_id))
        self._begun = True

    async def leave(self) -> None:
        """Note that nothing was made of it: until the next try it may be given up."""
        if not self._begun:
            return
        try:
            await self._write(lambda _: QueuedRecord(state=QueuedState.WAITING))
        except DsecError as error:
            # Who cancels is told of a sandbox that is not there, until the next try.
            _log.info("a request still counts as begun", request=self._request_id, error=str(error))

    async def _write(self, make: Callable[[QueuedRecord | None], QueuedRecord]) -> None:
        def change(kept: QueuedRecord | None) -> QueuedRecord:
            if kept is not None and kept.state is QueuedState.CANCELLED:
                raise cancelled(self._request_id)
            return make(kept)

        await self._cancellations.swap(self._project, self._request_id, change)
