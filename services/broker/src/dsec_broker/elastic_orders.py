"""What is remembered from look to look: which nodes idle since when, and what was ordered last.

Pure: it is told the time, by the broker's clock or the simulation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from dsec_broker.elastic import Fleet, Plan, ProvidedNode, fleet
from dsec_broker.elastic_config import ElasticConfig

_REPEAT_S: Final = 60.0
"""An order whose nodes have not come is given again after this long."""


class NodeOrders:
    """The orders to one node provider."""

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._idle_since: dict[str, float] = {}
        self._given: tuple[int, tuple[str, ...]] = (0, ())
        self._given_at_s = -math.inf

    def wish(
        self,
        plan_: Plan,
        nodes: Sequence[ProvidedNode],
        may_leave: Callable[[Collection[str], Collection[str]], Sequence[str]],
        now_s: float,
    ) -> Fleet:
        """Return how many nodes there are to be; see :func:`~dsec_broker.elastic.fleet`."""
        idle = {node.name for node in nodes if node.idle}
        self._idle_since = {name: self._idle_since.get(name, now_s) for name in idle}
        long_idle = {
            name
            for name, since_s in self._idle_since.items()
            if now_s - since_s >= self._config.node_idle_s
        }
        return fleet(plan_, nodes, long_idle, may_leave, self._config)

    def is_due(self, wish: Fleet, nodes: Iterable[ProvidedNode], now_s: float) -> bool:
        """Return whether the provider is to be told: something new, or once more what was lost."""
        if (wish.wanted, wish.leaving) != self._given:
            return True
        come = sum(not node.leaving for node in nodes)
        return come < wish.wanted and now_s - self._given_at_s > _REPEAT_S

    @staticmethod
    def order(wish: Fleet, retired: Collection[str]) -> tuple[int, tuple[str, ...]]:
        """Return how many nodes to ask for and which are to end, when so many agreed to leave."""
        kept = len(wish.retire) - len(retired)
        return wish.wanted + kept, tuple(sorted({*wish.leaving, *retired}))

    def given(self, wanted: int, leaving: tuple[str, ...], now_s: float) -> None:
        """Note that the provider took an order on."""
        self._given = (wanted, leaving)
        self._given_at_s = now_s

    def is_given(self, wanted: int, leaving: tuple[str, ...]) -> bool:
        """Return whether that was the last order."""
        return (wanted, leaving) == self._given

    def busy(self, node: str) -> None:
        """Note that a node did not agree to leave: it idles anew from the next look on."""
        self._idle_since.pop(node, None)

    def next_idle_s(self, now_s: float) -> float:
        """Return when another node will have idled for ``node_idle_s``; infinity when none will."""
        ends = (since_s + self._config.node_idle_s for since_s in self._idle_since.values())
        return min((end for end in ends if end > now_s), default=math.inf)
