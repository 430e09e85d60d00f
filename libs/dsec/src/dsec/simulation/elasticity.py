"""The broker's elastic engine on the simulation's clock, and a node provider for it.

What is decided is decided by the broker's own code; here is only what its shell does besides: look
``elastic_interval_s`` after a change, and have done what should be. A broker looks every few
seconds without a change too, for the sake of nodes that idle; here that is when their time is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dsec.simulation.cluster import NodeSource, SimulatedNode
from dsec_broker.elastic import Fleet, ProvidedNode, plan, provided
from dsec_broker.elastic_config import ElasticConfig
from dsec_broker.elastic_orders import NodeOrders
from dsec_broker.record import NodeRecord
from dsec_common.compute.conservation import PROVIDER_LABEL
from dsec_common.compute.units import UnitTable


class SimulatedProvider:
    """A node provider whose nodes take their time to start and end at once.

    Args:
        source: its nodes.
        table: what their cards are worth.
    """

    def __init__(self, source: NodeSource, table: UnitTable) -> None:
        self._source = source
        self._table = table
        self._numbers = itertools.count(1)
        self._names: set[str] = set()

    @property
    def name(self) -> str:
        """By which its nodes name it."""
        return self._source.name

    def may_leave(self, nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
        """Return all idle nodes: any can be ended."""
        del nodes
        return sorted(idle)

    def scale(self, wanted: int, leaving: Collection[str], now_s: float) -> list[SimulatedNode]:
        """Return the nodes that start for an order: so many as are missing with those under way."""
        self._names -= set(leaving)
        started = []
        while len(self._names) < wanted:
            name = f"{self.name}-{next(self._numbers)}"
            self._names.add(name)
            cards = self._source.cards(name, self._table)
            since_s = now_s + self._source.start_s
            labels = {PROVIDER_LABEL: self.name}
            started.append(SimulatedNode(name, cards, since_s, labels=labels))
        return started


class Look(NamedTuple):
    """What one look has done.

    Attributes:
        targets: by node, the units that leases on it should have.
        ordered: nodes, each there from its ``since_s`` on.
        given_up: nodes that are gone.
        again_s: when to look again, whether or not anything has changed; infinity for never.
    """

    targets: Mapping[str, Mapping[str, float]]
    ordered: Sequence[SimulatedNode] = ()
    given_up: Sequence[str] = ()
    again_s: float = math.inf


class Elasticity:
    """One broker that balances.

    Args:
        config: its constants.
        provider: where nodes come from, if from anywhere.
    """

    def __init__(self, config: ElasticConfig, provider: SimulatedProvider | None = None) -> None:
        self._config = config
        self._provider = provider
        self._orders = NodeOrders(config)

    @property
    def interval_s(self) -> float:
        """How long after a change to look."""
        return self._config.elastic_interval_s

    def is_provided(self, node: SimulatedNode) -> bool:
        """Return whether a node is of the provider."""
        return self._provider is not None and _is_of(self._provider, node.labels)

    def look(self, records: Iterable[NodeRecord], now_s: float) -> Look:
        """Return what is to be done now."""
        known = list(records)
        plan_ = plan(known, self._config)
        provider = self._provider
        if provider is None:
            return Look(plan_.targets)
        nodes = [
            provided(record.heartbeat, record)
            for record in known
            if _is_of(provider, record.heartbeat.labels)
        ]
        wish = self._orders.wish(plan_, nodes, provider.may_leave, now_s)
        ordered, given_up = self._provide(provider, wish, nodes, now_s)
        # A node whose time is over is seen by the first look after that.
        again_s = self._orders.next_idle_s(now_s) + self.interval_s
        return Look(plan_.targets, ordered, given_up, again_s)

    def _provide(
        self,
        provider: SimulatedProvider,
        wish: Fleet,
        nodes: Sequence[ProvidedNode],
        now_s: float,
    ) -> tuple[Sequence[SimulatedNode], Sequence[str]]:
        if not wish.retire and not self._orders.is_due(wish, nodes, now_s):
            return (), ()
        # None has a lease, so all that are asked agree to leave, and are gone at once.
        wanted, leaving = self._orders.order(wish, wish.retire)
        self._orders.given(wanted, leaving, now_s)
        return provider.scale(wanted, leaving, now_s), leaving


def _is_of(provider: SimulatedProvider, labels: Mapping[str, str]) -> bool:
    return labels.get(PROVIDER_LABEL) == provider.name
