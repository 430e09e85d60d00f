"""Which nodes are gone, as far as their heartbeats tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.clock import Clock
from dsec_common.wire.node import NodeHeartbeat


class NodesSeen(NamedTuple):
    """Which of the nodes that somebody asked about are gone, and which of all are surely not."""

    lost: frozenset[str] = frozenset()
    living: frozenset[str] = frozenset()


class NodeWatch:
    """Hears the nodes; silence counts only while they could have been heard.

    Args:
        bus: a connected bus.
        clock: counts silence.
        lost_after_s: how much of it means that a node is gone.
    """

    def __init__(self, bus: Bus, clock: Clock, lost_after_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._lost_after_s = lost_after_s
        self._heard: dict[str, float] = {}
        self._silent: frozenset[str] = frozenset()
        self._listening_since = clock.monotonic()

    async def start(self) -> None:
        """Listen until the connection is closed."""
        await self._bus.subscribe(subjects.HEARTBEATS, NodeHeartbeat, self._on_heartbeat)
        self._listening_since = self._clock.monotonic()

    async def _on_heartbeat(self, request: Request[NodeHeartbeat]) -> None:
        self._heard[request.tokens[-1]] = self._clock.monotonic()

    def look(self, nodes: Iterable[str]) -> NodesSeen:
        """Return which of them are gone; to be asked several times in ``lost_after_s``.

        They were silent for long when this was asked the time before, too: after this process
        stood still, what came meanwhile is read only once it has looked.
        """
        now = self._clock.monotonic()
        if not self._bus.connected:
            self._listening_since = now
        silent = [
            node
            for node in nodes
            if now - max(self._heard.get(node, 0.0), self._listening_since) > self._lost_after_s
        ]
        before, self._silent = self._silent, frozenset(silent)
        living = {node for node, at in self._heard.items() if now - at <= self._lost_after_s}
        return NodesSeen(self._silent & before, frozenset(living))
