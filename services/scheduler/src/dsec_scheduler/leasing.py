"""Leases on Compute Units: taken from the broker all together or not at all, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeaseReleased, ReleaseLease
from dsec_scheduler.units import Granted

_log: Final = structlog.get_logger(__name__)

_BROKER_TIMEOUT_S: Final = 2.0


class Leasing:
    """Talks with the broker."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._releases: set[asyncio.Task[None]] = set()

    async def take(self, wanted: Sequence[GrantLease]) -> tuple[Granted, ...]:
        """Take all, in this order; when one is refused those that were granted are given back.

        Raises:
            DsecError: the first refusal.
        """
        answers = await asyncio.gather(*map(self._take, wanted), return_exceptions=True)
        granted = [answer for answer in answers if isinstance(answer, Granted)]
        if len(granted) == len(wanted):
            return tuple(granted)
        self.release_later(*(it.lease_id for it in granted))
        raise next(answer for answer in answers if isinstance(answer, BaseException))

    async def _take(self, wanted: GrantLease) -> Granted:
        try:
            lease = await self._ask(wanted)
        except DsecError as error:
            if error.code is not ErrorCode.TIMEOUT:
                raise
            # Of a broker that died in between it is the same lease.
            lease = await self._ask(wanted)
        return Granted(lease.node, lease.lease_id, lease.slices)

    async def _ask(self, wanted: GrantLease) -> LeaseGranted:
        return await self._bus.request(
            subjects.lease("grant"), wanted, LeaseGranted, timeout_s=_BROKER_TIMEOUT_S
        )

    def release_later(self, *lease_ids: str) -> None:
        """Give leases back without having anybody wait for it."""
        for lease_id in lease_ids:
            task = asyncio.create_task(self._release(lease_id), name=f"release {lease_id}")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, lease_id: str) -> None:
        try:
            await self._bus.request(
                subjects.lease("release"),
                ReleaseLease(lease_id=lease_id),
                LeaseReleased,
                timeout_s=_BROKER_TIMEOUT_S,
            )
        except DsecError as error:
            _log.warning("a lease is left to run out", lease=lease_id, error=str(error))

    async def finish(self) -> None:
        """Return when every lease that is to be given back has been."""
        while self._releases:
            await asyncio.wait(set(self._releases))
