"""Which node a card is counted for when several name it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec_broker.record import NodeRecord
    from dsec_common.wire.node import Gpu

_NONE: Final[frozenset[str]] = frozenset()


class Claims:
    """The nodes whose records have each card.

    A card is counted for the node whose record has it already; of two records that two brokers
    wrote at once, for the node that is first by name. Only records decide, so all brokers say the
    same, those that have just started too.
    """

    def __init__(self) -> None:
        self._cards: dict[str, frozenset[str]] = {}
        self._nodes: dict[str, set[str]] = {}

    def know(self, node: str, record: NodeRecord | None) -> None:
        """Take in what a node's record is now; None when it has none."""
        before = self._cards.pop(node, _NONE)
        now = frozenset(card.uuid for card in record.cards) if record else _NONE
        if now:
            self._cards[node] = now
        for uuid in before - now:
            self._nodes[uuid].discard(node)
            if not self._nodes[uuid]:
                del self._nodes[uuid]
        for uuid in now - before:
            self._nodes.setdefault(uuid, set()).add(node)

    def others(self, node: str, gpus: Iterable[Gpu]) -> dict[str, str]:
        """Return those of a node's cards that are counted for another node, and for which."""
        own = self._cards.get(node, _NONE)
        found = {}
        for gpu in gpus:
            rivals = [
                other
                for other in self._nodes.get(gpu.uuid, ())
                if other < node or (other != node and gpu.uuid not in own)
            ]
            if rivals:
                found[gpu.uuid] = min(rivals)
        return found
