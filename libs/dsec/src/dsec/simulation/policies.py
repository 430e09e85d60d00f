"""Who gets what: the scheduler's own way, and two plainer ones to compare it with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from dsec.simulation.engine import Grant
from dsec.simulation.work import Work
from dsec_broker.books import Books
from dsec_broker.record import Lease
from dsec_common.compute.conservation import is_other_capacity, rank_of
from dsec_common.compute.model import WHOLE_PERCENT, Slice, part_of_card
from dsec_scheduler.asks import (
    Ask,
    Asked,
    HeldUnits,
    LeasesRefused,
    LeasesTaken,
    RoundDue,
    Solve,
    Solved,
    TakeLeases,
    WaitingEffect,
    WaitingEvent,
    World,
)
from dsec_scheduler.queues import QueueRules, WaitingRoom
from dsec_scheduler.solver import solve
from dsec_scheduler.solving.problem import NodeCapacity


class Scheduler:
    """The scheduler's queues and solver, as they are.

    Args:
        rules: of the queues.
        prices: of a unit for an hour, by model.
        solve_s: how long the solver may take.
        leases_yield: whether leases give realtime work what they have beyond their promise.
    """

    def __init__(
        self,
        rules: QueueRules,
        prices: Mapping[str, float],
        solve_s: float = math.inf,
        *,
        leases_yield: bool = False,
    ) -> None:
        self._room = WaitingRoom(rules)
        self._prices = prices
        self._solve_s = solve_s
        self._leases_yield = leases_yield
        self._asks: dict[str, int] = {}
        self._works: dict[int, Work] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._room)

    def arrive(self, work: Work, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:
        """Ask for the work's units."""
        ask_id = len(self._works) + 1
        self._works[ask_id] = work
        self._asks[work.name] = ask_id
        ask = Ask(
            ask_id=ask_id,
            request_id=work.name,
            project=work.project,
            demands=(work.demand,),
            asked_at=now_s,
            service_class=work.service_class,
            priority=work.priority,
            duration_s=work.duration_s,
        )
        return self._handle(Asked(ask, self._world(books), now_s), now_s)

    def look(self, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:
        """Do a round."""
        return self._handle(RoundDue(self._world(books), now_s), now_s)

    def granted(self, work: Work) -> None:
        """Tell the queues."""
        self._room.handle(LeasesTaken(self._asks[work.name]))

    def refused(self, work: Work) -> None:
        """Tell the queues."""
        self._room.handle(LeasesRefused(self._asks[work.name]))

    def _handle(self, event: WaitingEvent, now_s: float) -> list[Grant]:
        grants: list[Grant] = []
        effects: list[WaitingEffect] = self._room.handle(event)
        while effects:
            effect = effects.pop(0)
            match effect:
                case Solve():
                    # Time stands still meanwhile: the answer depends on the problem alone.
                    solution = solve(effect.problem, self._solve_s, lambda: 0.0)
                    effects += self._room.handle(Solved(solution, now_s))
                case TakeLeases():
                    work = self._works[effect.ask_id]
                    # Where room is made, the broker says with which slices.
                    grants += [
                        Grant(work, part.node, () if effect.makes_room else part.slices)
                        for part in effect.parts
                    ]
        return grants

    def _world(self, books: Mapping[str, Books]) -> World:
        nodes = []
        held_cu: dict[str, float] = {}
        yielding: dict[str, tuple[HeldUnits, ...]] = {}
        others = set()
        for name, of_node in books.items():
            leases = of_node.leases()
            held = tuple(slice_ for lease in leases for slice_ in lease.slices)
            nodes.append(NodeCapacity(name, of_node.cards, held))
            for lease in leases:
                held_cu[lease.project] = held_cu.get(lease.project, 0.0) + lease.cu
            if self._leases_yield:
                yielding[name] = tuple(map(_held, leases))
            if is_other_capacity(of_node.record().heartbeat.labels):
                others.add(name)
        return World(
            nodes=tuple(nodes),
            held_cu=held_cu,
            prices=self._prices,
            leases=yielding,
            others=frozenset(others),
        )


def _held(lease: Lease) -> HeldUnits:
    return HeldUnits(
        cu=lease.cu,
        since=lease.granted_at,
        slices=lease.slices,
        demand=lease.demand,
        rank=rank_of(lease.service_class, lease.priority),
    )


class _InOrder(ABC):
    """Everybody in the order of coming, each on the first node that has room; who finds none waits.

    Whoever comes later and finds room goes past, as in Kubernetes.
    """

    def __init__(self) -> None:
        self._line: dict[str, Work] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def arrive(self, work: Work, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:  # noqa: ARG002  a policy's
        """Stand in line."""
        self._line[work.name] = work
        return ()

    def look(self, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:  # noqa: ARG002  a policy's
        """Return the first places."""
        grants = []
        for work in self._line.values():
            for node, of_node in books.items():
                slices = self.find(work, of_node)
                if slices is not None:
                    of_node.pool.take(slices)
                    grants.append(Grant(work, node, slices))
                    break
        for grant in grants:
            books[grant.node].pool.give(grant.slices)
        return grants

    def granted(self, work: Work) -> None:
        """Leave the line."""
        del self._line[work.name]

    def refused(self, work: Work) -> None:  # noqa: B027  nobody has left the line
        """Stay in line."""

    @abstractmethod
    def find(self, work: Work, books: Books) -> tuple[Slice, ...] | None:
        """Return slices of one node, or None."""


class FirstFit(_InOrder):
    """The same slices as ours, without a look at prices or at what others need."""

    def find(self, work: Work, books: Books) -> tuple[Slice, ...] | None:
        """Return what the broker would give."""
        return books.pool.find(work.demand)


class WholeCards(_InOrder):
    """Cards are given whole, as device plug-ins do; as many as the units need."""

    def find(self, work: Work, books: Books) -> tuple[Slice, ...] | None:
        """Return whole cards of one model that nobody holds."""
        free = books.pool.free()
        by_model: dict[str, list[Slice]] = {}
        for card in books.cards:
            if free[card.uuid][0] == WHOLE_PERCENT and card.healthy:
                by_model.setdefault(card.model, []).append(part_of_card(card, WHOLE_PERCENT))
        demand = work.demand
        for model, slices in by_model.items():
            count = demand.count or math.ceil(demand.min_cu / slices[0].cu - 1e-9)
            enough = len(slices) >= count and count * slices[0].cu >= demand.min_cu
            if enough and (not demand.models or model in demand.models):
                return tuple(slices[:count])
        return None
