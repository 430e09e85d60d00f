"""The simulation: arrivals, ends and rounds in the order of a virtual clock.

Grants go through the broker's own books, so nothing is held twice and nothing fits that would not.
Who is granted what is a :class:`Policy`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from dsec.simulation.work import Work
from dsec_broker.books import Books
from dsec_broker.record import NodeRecord
from dsec_common.compute.model import Card, ServiceClass, Slice
from dsec_common.wire.lease import GrantLease
from dsec_common.wire.node import NodeHeartbeat
from dsec_scheduler.solving.objective import PATIENCE, SLA_S

#: How often the scheduler looks at what waits.
ROUND_S: Final = 0.2
#: With nothing new, so often: requests that wait for a better price become less particular.
_QUIET_ROUND_S: Final = 30.0
#: As long as nothing else happens batch becomes less particular; after this it takes anything.
_PATIENCE_S: Final = PATIENCE * SLA_S[ServiceClass.BATCH] + 2 * _QUIET_ROUND_S
_FOREVER_S: Final = 1e12


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node and when it is there, in seconds of the simulation."""

    name: str
    cards: tuple[Card, ...]
    since_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Grant:
    """Who gets which slices of which node."""

    work: Work
    node: str
    slices: tuple[Slice, ...]


class Policy(Protocol):
    """Decides who gets what. It is told all that happens, and looks at the books."""

    def arrive(self, work: Work, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:
        """Take in new work; return what is granted at once."""

    def look(self, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:
        """Return what is granted in a round."""

    def granted(self, work: Work) -> None:
        """Note that a grant is in the books."""

    @property
    def waiting(self) -> int:
        """How many wait."""


@dataclass(frozen=True, slots=True)
class Served:
    """A piece of work that got its units, and when."""

    work: Work
    node: str
    slices: tuple[Slice, ...]
    started_s: float
    ended_s: float

    @property
    def wait_s(self) -> float:
        """From being asked for to the grant."""
        return self.started_s - self.work.at_s

    @property
    def useful_cu(self) -> float:
        """Units that it can use of those it holds."""
        return min(math.fsum(it.cu for it in self.slices), self.work.demand.max_cu)


@dataclass(slots=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        served: in the order of their starts; work that a lost node broke off is there once more.
        left: never granted.
        times_s, useful_cu, held_cu, total_cu, waiting: after each change.
        cost: price x CU x hours of all that was held.
    """

    served: list[Served] = field(default_factory=list)
    left: list[Work] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    useful_cu: list[float] = field(default_factory=list)
    held_cu: list[float] = field(default_factory=list)
    total_cu: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    cost: float = 0.0


class Simulation:
    """One run of one policy."""

    def __init__(
        self,
        nodes: Sequence[SimulatedNode],
        works: Iterable[Work],
        policy: Policy,
        prices: Mapping[str, float],
    ) -> None:
        self._policy = policy
        self._price = {
            card.uuid: prices.get(card.model, 1.0) for node in nodes for card in node.cards
        }
        self._books: dict[str, Books] = {}
        self._held: dict[str, Served] = {}
        self._works: dict[str, Work] = {}
        self._useful = self._taken = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        #: Events that are not rounds, and when the last of those was.
        self._to_come = 0
        self._quiet_since = 0.0
        self._round_at = math.inf
        self._outcome = Outcome()
        for node in nodes:
            self._at(node.since_s, "up", node)
            if node.until_s < math.inf:
                self._at(node.until_s, "down", node)
        for work in works:
            self._works[work.name] = work
            self._at(work.at_s, "arrive", work)

    def run(self, until_s: float = math.inf) -> Outcome:
        """Return what came of it, when all is done or at ``until_s``."""
        now_s = 0.0
        while self._events and self._events[0][0] <= until_s:
            now_s, _, kind, what = heapq.heappop(self._events)
            if kind != "round":
                self._to_come -= 1
                self._quiet_since = now_s
            self._happen(kind, what, now_s)
            if not self._events or self._events[0][0] > now_s:
                self._note(now_s)
        outcome = self._outcome
        started = {served.work.name for served in outcome.served}
        outcome.left = [
            work
            for name, work in self._works.items()
            if name not in started and work.at_s <= until_s
        ]
        for served in self._held.values():
            self._charge(served, min(until_s, now_s))
        return outcome

    # --- What happens -------------------------------------------------------------------------

    def _happen(self, kind: str, what: object, now_s: float) -> None:
        if kind == "arrive":
            assert isinstance(what, Work)  # noqa: S101  by kind
            self._grant(self._policy.arrive(what, now_s, self._books), now_s)
            self._round_soon(now_s)
        elif kind == "end":
            assert isinstance(what, Served)  # noqa: S101  by kind
            if self._held.get(what.work.name) is what:
                self._end(what, now_s)
                self._round_soon(now_s)
        elif kind == "round":
            if now_s == self._round_at:
                self._round(now_s)
        else:
            assert isinstance(what, SimulatedNode)  # noqa: S101  by kind
            self._node(kind, what, now_s)

    def _node(self, kind: str, node: SimulatedNode, now_s: float) -> None:
        if kind == "up":
            record = NodeRecord(heartbeat=NodeHeartbeat(node=node.name, epoch=""), cards=node.cards)
            self._books[node.name] = Books(record)
        else:
            broken = [served for served in self._held.values() if served.node == node.name]
            for served in broken:
                self._end(served, now_s)
            del self._books[node.name]
            for served in broken:
                # It begins again from nothing, like a sandbox whose node is gone.
                self._grant(self._policy.arrive(served.work, now_s, self._books), now_s)
        self._round_soon(now_s)

    def _round(self, now_s: float) -> None:
        self._round_at = math.inf
        self._grant(self._policy.look(now_s, self._books), now_s)
        # When nothing else can happen, patience can still end; who waits after that waits forever.
        if self._policy.waiting and (self._to_come or now_s - self._quiet_since <= _PATIENCE_S):
            self._round_by(now_s + _QUIET_ROUND_S)

    def _grant(self, grants: Sequence[Grant], now_s: float) -> None:
        for grant in grants:
            work = grant.work
            asked = GrantLease(
                project=work.project,
                holder=work.name,
                node=grant.node,
                demand=work.demand,
                slices=grant.slices,
                service_class=work.service_class,
                priority=work.priority,
                ttl_s=_FOREVER_S,
            )
            self._books[grant.node].grant(f"{grant.node}.{work.name}", asked, now_s)
            self._policy.granted(work)
            self._begin(grant, now_s)

    def _begin(self, grant: Grant, now_s: float) -> None:
        work = grant.work
        cu = min(math.fsum(it.cu for it in grant.slices), work.demand.max_cu)
        ended_s = now_s + work.cu_seconds / cu
        served = Served(work, grant.node, grant.slices, now_s, ended_s)
        self._held[work.name] = served
        self._outcome.served.append(served)
        self._useful += served.useful_cu
        self._taken += math.fsum(it.cu for it in served.slices)
        self._at(ended_s, "end", served)

    def _end(self, served: Served, now_s: float) -> None:
        del self._held[served.work.name]
        self._books[served.node].release(f"{served.node}.{served.work.name}")
        self._useful -= served.useful_cu
        self._taken -= math.fsum(it.cu for it in served.slices)
        self._charge(served, now_s)

    def _charge(self, served: Served, until_s: float) -> None:
        hours = (until_s - served.started_s) / 3600
        self._outcome.cost += math.fsum(
            self._price[it.card] * it.cu * hours for it in served.slices
        )

    # --- Time ---------------------------------------------------------------------------------

    def _at(self, when_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, what))
        self._to_come += kind != "round"

    def _round_soon(self, now_s: float) -> None:
        """Have a round at the next beat of the scheduler's clock, if anybody waits."""
        if self._policy.waiting:
            self._round_by((math.floor(now_s / ROUND_S) + 1) * ROUND_S)

    def _round_by(self, when_s: float) -> None:
        if when_s < self._round_at:
            self._round_at = when_s
            self._at(when_s, "round", None)

    def _note(self, now_s: float) -> None:
        outcome = self._outcome
        outcome.times_s.append(now_s)
        outcome.useful_cu.append(self._useful)
        outcome.held_cu.append(self._taken)
        outcome.total_cu.append(math.fsum(books.cu_total for books in self._books.values()))
        outcome.waiting.append(self._policy.waiting)
