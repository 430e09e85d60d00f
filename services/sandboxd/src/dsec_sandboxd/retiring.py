"""A node that is not needed takes no more work, so that it can be ended without harm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dsec_common.bus_types import Request
from dsec_common.wire.elastic import NodeRetired, RetireNode
from dsec_sandboxd.errors import node_busy
from dsec_sandboxd.events import DrainBegan
from dsec_sandboxd.lifecycle import Sandboxes


class Retiring:
    """Answers the verb ``retire``. The node has the last word: only here it is certain to be idle.

    Args:
        sandboxes: of the node.
        tell: sends a heartbeat, so that nobody sends work here any more.
    """

    def __init__(self, sandboxes: Sandboxes, tell: Callable[[], Awaitable[None]]) -> None:
        self._sandboxes = sandboxes
        self._tell = tell

    async def retire(self, request: Request[RetireNode]) -> NodeRetired:
        """Take nothing from now on; asked again, the answer is the same.

        Raises:
            DsecError: ``conflict`` while there is a sandbox; the node goes on as before.
        """
        del request
        state = self._sandboxes.state
        if state.living_count:
            raise node_busy(state.rules.node, state.living_count)
        # Nothing is awaited since the look, so nothing can have come in between.
        self._sandboxes.handle(DrainBegan(now=self._sandboxes.parts.clock.now()))
        await self._tell()
        return NodeRetired(node=state.rules.node)
