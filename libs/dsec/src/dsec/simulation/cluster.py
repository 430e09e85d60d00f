"""The nodes of a simulated cluster: its own, those for bursts, and those of a node provider."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from dsec.simulation.work import Amount, Positive
from dsec_broker.books import Books
from dsec_broker.record import NodeRecord
from dsec_common.compute.conservation import BURST, CAPACITY_LABEL
from dsec_common.compute.model import COUNT_MAX, Card, CardMode
from dsec_common.compute.units import UnitTable
from dsec_common.wire.node import NodeHeartbeat

CARDS_MAX: Final = 100_000
"""Of one cluster, and of the nodes of a provider."""

_GIB = 1 << 30
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node, its labels, and when it is there, in seconds of the simulation."""

    name: str
    cards: tuple[Card, ...]
    since_s: float = 0.0
    until_s: float = math.inf
    labels: dict[str, str] = field(default_factory=dict)

    def books(self) -> Books:
        """Return the broker's books of it, with nothing held."""
        beat = NodeHeartbeat(node=self.name, epoch="", labels=self.labels)
        return Books(NodeRecord(heartbeat=beat, cards=self.cards))


class NodeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node is made of.

    Attributes:
        name: with a number behind it when there are several.
        model: as in the table of units.
        gpus: cards of each.
        islands: into how many NVLink islands the cards of one are joined; 0 for none.
    """

    name: str
    model: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] = 8
    memory_gib: Annotated[float, msgspec.Meta(ge=0, le=1 << 14)] = 0
    islands: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] = 1
    mode: CardMode = CardMode.MPS

    def cards(self, node: str, table: UnitTable) -> tuple[Card, ...]:
        """Return the cards of one of these nodes.

        Raises:
            ValueError: the model is not in the table.
        """
        known = table.find(self.model)
        if known is None:
            raise ValueError(f"{self.name}: no model {self.model!r}; say its CU under units")
        model, cu = known
        return tuple(
            Card(
                uuid=f"{node}.{index}",
                model=model,
                cu=cu,
                memory_bytes=int(self.memory_gib * _GIB),
                island=f"{index * self.islands // self.gpus}" if self.islands else "",
                mode=self.mode,
            )
            for index in range(self.gpus)
        )


class NodeGroup(NodeKind, frozen=True, kw_only=True):
    """Nodes that are alike.

    Attributes:
        nodes: how many.
        from_hour, until_hour: when they are there.
        burst: they are not of the cluster's own capacity, and take work when that is used above
            the scheduler's ``burst_factor``.
    """

    nodes: Annotated[int, msgspec.Meta(ge=1, le=CARDS_MAX)] = 1
    from_hour: Amount = 0.0
    until_hour: Annotated[float, msgspec.Meta(gt=0)] = math.inf
    burst: bool = False

    def simulated(self, table: UnitTable) -> Iterator[SimulatedNode]:
        """Yield its nodes.

        Raises:
            ValueError: the model is not in the table.
        """
        labels = {CAPACITY_LABEL: BURST} if self.burst else {}
        since_s, until_s = self.from_hour * _HOUR_S, self.until_hour * _HOUR_S
        for number in range(self.nodes):
            name = f"{self.name}-{number}" if self.nodes > 1 else self.name
            yield SimulatedNode(name, self.cards(name, table), since_s, until_s, labels)


class NodeSource(NodeKind, frozen=True, kw_only=True):
    """A node provider: where further nodes come from.

    Attributes:
        name: its nodes are called ``<name>-1``, ``<name>-2``, …
        start_s: from the order until a node takes work.
        min_nodes: so many of its nodes always run.
        max_nodes: so many at most.
        idle_s: one without leases for so long may be given up.
    """

    start_s: Positive = 180.0
    min_nodes: Annotated[int, msgspec.Meta(ge=0, le=CARDS_MAX)] = 0
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=CARDS_MAX)] = 8
    idle_s: Positive = 300.0
