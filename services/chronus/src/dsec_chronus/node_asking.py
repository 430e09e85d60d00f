"""Asking nodes, and the scheduler, for what may be asked for twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsec_chronus.errors import node_silent, shard_moving
from dsec_common.bus import Bus
from dsec_common.bus_types import ReplyT
from dsec_common.clock import Clock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message

PATIENCE_S: Final = 20.0
"""A node's daemon that was killed is back before that; beyond it the node counts as gone."""

ATTEMPT_S: Final = 10.0

_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0


class NodeAsking:
    """Asks for one shard, and for nothing once the shard may be another's.

    Args:
        shard: its name.
        bus: a connected bus.
        clock: for pauses and deadlines.
        is_owner: whether the shard's lease still runs.
    """

    def __init__(self, shard: str, bus: Bus, clock: Clock, is_owner: Callable[[], bool]) -> None:
        self._shard = shard
        self._bus = bus
        self._clock = clock
        self._is_owner = is_owner

    async def once(
        self,
        subject: str,
        message: Message,
        reply: type[ReplyT],
        *,
        timeout_s: float | None = None,
    ) -> ReplyT:
        """Ask once; for :data:`ATTEMPT_S` by default.

        Raises:
            DsecError: what was answered, or why nothing was; ``unavailable`` when the shard may be
                another's by now: its owner does what is to be done.
        """
        if not self._is_owner():
            raise shard_moving(self._shard)
        return await self._bus.request(subject, message, reply, timeout_s=timeout_s or ATTEMPT_S)

    async def until_answered(
        self,
        subject: str,
        message: Message,
        reply: type[ReplyT],
        *,
        attempt_s: float | None = None,
    ) -> ReplyT:
        """Ask until it is answered or there is no hope.

        Raises:
            DsecError: the last one; it ``may_have_happened`` when that is so of any attempt.
        """
        tries = self.tries()
        doubtful = False
        while True:
            try:
                return await self.once(subject, message, reply, timeout_s=attempt_s)
            except DsecError as error:
                doubtful = doubtful or in_doubt(error)
                if doubtful and error.retryable:
                    error.details[MAY_HAVE_HAPPENED] = True
                await tries.need_another(error)

    def tries(self, sandbox_id: ScopedId | None = None) -> Tries:
        """Return what paces attempts from now on; the sandbox's node is named when it is silent."""
        return Tries(self._clock, sandbox_id)


class Tries:
    """Attempts at one thing, with pauses in between."""

    def __init__(self, clock: Clock, sandbox_id: ScopedId | None) -> None:
        self._clock = clock
        self._sandbox_id = sandbox_id
        self._until = clock.monotonic() + PATIENCE_S
        self._pause_s = _FIRST_PAUSE_S

    async def need_another(self, error: DsecError) -> None:
        """Return when it is time to try again.

        Raises:
            DsecError: trying again does not help, or there is no time for it.
        """
        if not error.retryable:
            raise error
        if self._clock.monotonic() + self._pause_s > self._until:
            if self._sandbox_id is None or error.code is ErrorCode.EXHAUSTED:
                raise error
            raise node_silent(self._sandbox_id.owner, error.message)
        await self.pause()

    async def pause(self) -> None:
        """Return when it is time to try again, however long that has gone on."""
        await self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def in_doubt(error: DsecError) -> bool:
    """Return whether what was asked for may have been done, or may still be."""
    happened = error.details.get(MAY_HAVE_HAPPENED)
    return bool(happened) or (error.code is ErrorCode.TIMEOUT and happened is None)


def is_sure(error: DsecError) -> bool:
    """Return whether whoever answered knows that nothing was done, by no attempt."""
    return error.details.get(MAY_HAVE_HAPPENED) is False
