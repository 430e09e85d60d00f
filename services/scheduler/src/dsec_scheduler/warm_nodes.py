"""Which nodes hold warm sandboxes of which pool, and how a pool is spread over them. No I/O.

As believed: a heartbeat says what waits, and each choice since counts one less. It need not be
right: a node that has none left makes a cold one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from dsec_common.wire.node import NodeHeartbeat


class WarmNodes:
    """What waits where."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[str, int]] = {}
        self._keys: dict[str, tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        """Whether anything waits anywhere."""
        return bool(self._ready)

    def observe(self, heartbeat: NodeHeartbeat) -> None:
        """Take over what a node says."""
        self.forget(heartbeat.node)
        for key, count in heartbeat.warm.items():
            if count > 0:
                self._ready.setdefault(key, {})[heartbeat.node] = count
        if heartbeat.warm:
            self._keys[heartbeat.node] = tuple(heartbeat.warm)

    def forget(self, node: str) -> None:
        """Drop what is believed of a node."""
        for key in self._keys.pop(node, ()):
            nodes = self._ready.get(key)
            if nodes is not None:
                nodes.pop(node, None)
                if not nodes:
                    del self._ready[key]

    def take(self, key: str, usable: Callable[[str], bool]) -> str | None:
        """Return the usable node that holds most of a pool, and count one less; None without."""
        nodes = self._ready.get(key)
        if not nodes:
            return None
        for node, count in sorted(nodes.items(), key=lambda item: -item[1]):
            if usable(node):
                if count > 1:
                    nodes[node] = count - 1
                else:
                    del nodes[node]
                    if not nodes:
                        del self._ready[key]
                return node
        return None


def spread(key: str, size: int, nodes: Sequence[str]) -> dict[str, int]:
    """Return how many of a pool each node is to hold: as evenly as it goes.

    All schedulers that know the same nodes say the same. Which nodes hold one more than others
    differs from pool to pool.
    """
    if not nodes:
        return {}
    share, over = divmod(size, len(nodes))
    first = zlib.crc32(key.encode()) % len(nodes)
    return {
        node: share + ((index - first) % len(nodes) < over)
        for index, node in enumerate(sorted(nodes))
    }
