"""What waits for Compute Units, what is known of those, and what becomes of either. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dsec_common.compute.conservation import Rank, rank_of
from dsec_common.compute.model import GpuDemand, ServiceClass, Slice
from dsec_scheduler.solving.objective import price_limit
from dsec_scheduler.solving.problem import DURATION_S, NodeCapacity, Problem, Solution

_STANDARD: Final = rank_of(ServiceClass.STANDARD, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request for Compute Units, or a gang of them that is granted together or not at all.

    Attributes:
        ask_id: this process's own number; one of another scheduler's asks has none of ours.
        request_id: the create request's message id, by which its project knows it.
        demands: one for each sandbox.
        asked_at: when it began to wait, by this process's monotonic clock; before its start for
            one that has waited at another scheduler.
        duration_s: how long it will hold its units, as well as anyone can tell.
        may_use: whether a node may be given to it, its cards apart; the same for equal ``needs``.
        needs: what ``may_use`` depends on.
        foreign: it waits at another scheduler: it keeps its turn here, and is granted there.
    """

    ask_id: int
    request_id: str
    project: str
    demands: tuple[GpuDemand, ...]
    asked_at: float
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    duration_s: float = DURATION_S
    may_use: Callable[[str], bool] | None = None
    needs: object = None
    foreign: bool = False

    @property
    def min_cu(self) -> float:
        """Units without which it is not granted."""
        return sum(demand.min_cu for demand in self.demands)

    def price_limit(self, price_range: tuple[float, float], now: float) -> float:
        """Return the most that it pays for a unit and hour."""
        return price_limit(self.service_class, max(now - self.asked_at, 0.0), *price_range)


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """One lease.

    Attributes:
        since: Unix time.
        slices: what it holds.
        demand: what it was granted for; None when nobody can tell what it could do with less.
        rank: how important it is.
        ends_at: Unix time by which it is expected to be over; 0 when nobody knows.
    """

    cu: float
    since: float
    slices: tuple[Slice, ...] = ()
    demand: GpuDemand | None = None
    rank: Rank = _STANDARD
    ends_at: float = 0.0


@dataclass(frozen=True, slots=True)
class World:
    """All that a round goes by.

    Attributes:
        nodes: those that take sandboxes; what was granted a moment ago is held there already.
        held_cu: by project, under leases.
        prices: of one CU for an hour, by model.
        foreign: what waits at other schedulers, each one's first.
        leases: by node: what could make room, and what an explanation names.
        others: the names of nodes that are not of the cluster's own capacity.
        full: of nodes whose records hold no further lease: all of their cards counts as held.
    """

    nodes: tuple[NodeCapacity, ...] = ()
    held_cu: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    foreign: tuple[Ask, ...] = ()
    leases: Mapping[str, tuple[HeldUnits, ...]] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()

    @property
    def price_range(self) -> tuple[float, float]:
        """What the cheapest and the dearest card's unit costs for an hour."""
        models = {card.model for node in self.nodes for card in node.cards}
        prices = [self.prices.get(model, 1.0) for model in models]
        return min(prices, default=1.0), max(prices, default=1.0)


@dataclass(frozen=True, slots=True)
class Part:
    """What one sandbox of an ask gets."""

    node: str
    slices: tuple[Slice, ...]


# --- Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants units; ``world`` is looked at when nobody goes before it."""

    ask: Ask
    world: World
    now: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An ask is over for its own reasons: cancelled, out of time, its caller gone."""

    ask_id: int


@dataclass(frozen=True, slots=True)
class RoundDue:
    """Time to see who gets what."""

    world: World
    now: float


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver's answer to the last :class:`Solve`; None when it failed."""

    solution: Solution | None
    now: float


@dataclass(frozen=True, slots=True)
class LeasesTaken:
    """The broker granted all that a :class:`TakeLeases` names."""

    ask_id: int


@dataclass(frozen=True, slots=True)
class LeasesRefused:
    """It did not; nothing is held of it. The ask waits on, in its place."""

    ask_id: int


WaitingEvent: TypeAlias = Asked | Withdrawn | RoundDue | Solved | LeasesTaken | LeasesRefused


# --- Effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solve:
    """Ask the solver; :class:`Solved` must follow, whatever comes of it."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class TakeLeases:
    """Take all of these from the broker, or none; the answer must follow.

    Attributes:
        makes_room: there is room for the parts only once less important leases on their nodes have
            given what they have beyond what was promised to them. The broker finds out how little
            of that is needed, so the slices it grants may be others.
    """

    ask_id: int
    parts: tuple[Part, ...]
    makes_room: bool = False


WaitingEffect: TypeAlias = Solve | TakeLeases
