"""What the broker tells this node of the leases that its sandboxes live on."""

from __future__ import annotations

import structlog

from dsec_common.bus_types import Request
from dsec_common.wire.elastic import LeaseResized, ResizeLease
from dsec_common.wire.lease import LeaseRevoked, RevokeLease
from dsec_common.wire.sandbox import EndCause
from dsec_sandboxd.actions.doors import Actions
from dsec_sandboxd.events import DeletionAsked, SlicesChanged
from dsec_sandboxd.lifecycle import Sandboxes

_log = structlog.get_logger(__name__)


class LeaseDoor:
    """Answers the verbs ``revoke`` and ``resize``."""

    def __init__(self, sandboxes: Sandboxes, actions: Actions | None = None) -> None:
        self._sandboxes = sandboxes
        self._actions = actions

    async def revoke(self, request: Request[RevokeLease]) -> LeaseRevoked:
        """End the sandbox or the action that lives on a lease: its slices may be another's.

        Its processes may hold a GPU open, which nothing but their end takes from them. Told again,
        or of a lease that nobody here lives on, it is the same answer.
        """
        asked = request.message
        if self._actions is not None and self._actions.lost(asked.lease_id, asked.reason):
            return LeaseRevoked(lease_id=asked.lease_id)
        local = self._sandboxes.state.leases.get(asked.lease_id)
        if local is not None:
            _log.warning("lease_lost", local=local, lease=asked.lease_id, reason=asked.reason)
            now = self._sandboxes.parts.clock.now()
            self._sandboxes.handle(
                DeletionAsked(now=now, local=local, cause=EndCause.LEASE_LOST, detail=asked.reason)
            )
        return LeaseRevoked(lease_id=asked.lease_id)

    async def resize(self, request: Request[ResizeLease]) -> LeaseResized:
        """Give a lease's sandbox or action another share, from the next command that starts on.

        Told again, or of a lease that nobody here lives on, it is the same answer.
        """
        asked = request.message
        if self._actions is not None and self._actions.resized(
            asked.lease_id, asked.slices, asked.resizes
        ):
            return LeaseResized(lease_id=asked.lease_id)
        local = self._sandboxes.state.leases.get(asked.lease_id)
        if local is not None:
            self._sandboxes.handle(
                SlicesChanged(
                    local=local, slices=asked.slices, resizes=asked.resizes, reason=asked.reason
                )
            )
        return LeaseResized(lease_id=asked.lease_id)
