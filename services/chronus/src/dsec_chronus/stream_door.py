"""A shard's door for answers that are told while they come about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.bus_headers import handed_on
from dsec_common.subjects import ScopedId
from dsec_common.wire.rollout_stream import HandFeedback, StreamFeedback

if TYPE_CHECKING:
    from dsec_chronus.shard import Shard


class StreamDoor:
    """Hands pieces of an answer to the node of the sandbox that waits for it; the node answers.

    Nothing is kept: an owner that dies, or was replaced, loses and spoils nothing by it.
    """

    def __init__(self, shard: Shard, bus: Bus) -> None:
        self._shard = shard
        self._bus = bus

    async def serve(self) -> None:
        """Hand on from now on until the shard ends."""
        pieces = subjects.any_project_rollout(self._shard.name, "stream")
        await self._shard.serve(pieces, StreamFeedback, self._hand_on, at_once=False)

    async def _hand_on(self, request: Request[StreamFeedback]) -> None:
        piece = request.message
        project = subjects.project_of(request.subject)
        rollout_id = subjects.scoped_id_of(request.subject)
        reporter = self._shard.core.reporter(project, rollout_id.local, piece.seq)
        sandbox_id = ScopedId.parse(reporter)
        message = HandFeedback(
            project=project, local=sandbox_id.local, rollout_id=str(rollout_id), piece=piece
        )
        node = subjects.node_request(sandbox_id.owner, "stream")
        await self._bus.publish(node, message, headers=handed_on(request.caller))
