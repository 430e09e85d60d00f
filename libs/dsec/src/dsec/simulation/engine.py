"""The simulation: arrivals, ends and rounds in the order of a virtual clock.

Grants go through the broker's own books, so nothing is held twice and nothing fits that would not.
Who is granted what is a :class:`Policy`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dsec.simulation.cluster import SimulatedNode
from dsec.simulation.elasticity import Elasticity
from dsec.simulation.outcome import Moves, Outcome, Served
from dsec.simulation.work import Work
from dsec_broker.books import Books
from dsec_broker.shares import resize
from dsec_common.compute.model import ServiceClass, Slice
from dsec_common.compute.resizing import bounds_of
from dsec_common.errors import DsecError
from dsec_common.wire.lease import GrantLease
from dsec_scheduler.solving.objective import PATIENCE, SLA_S

#: How often the scheduler looks at what waits.
ROUND_S: Final = 0.2
#: With nothing new, so often: requests that wait for a better price become less particular.
_QUIET_ROUND_S: Final = 30.0
#: As long as nothing else happens batch becomes less particular; after this it takes anything.
_PATIENCE_S: Final = PATIENCE * SLA_S[ServiceClass.BATCH] + 2 * _QUIET_ROUND_S
_FOREVER_S: Final = 1e12
#: What is looked at rather than what happens: nobody is granted anything for these alone.
_LOOKS: Final = ("round", "balance")


@dataclass(frozen=True, slots=True)
class Grant:
    """Who gets which slices of which node; none when the broker is to make room for it."""

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

    def refused(self, work: Work) -> None:
        """Note that a grant is not: there was less than it took there to be."""

    @property
    def waiting(self) -> int:
        """How many wait."""


class Simulation:
    """One run of one policy.

    Args:
        nodes: of the cluster.
        works: what is asked for.
        policy: in its first state.
        prices: of a unit for an hour, by model.
        elasticity: in its first state; without it leases keep what they were granted.
    """

    def __init__(
        self,
        nodes: Sequence[SimulatedNode],
        works: Iterable[Work],
        policy: Policy,
        prices: Mapping[str, float],
        elasticity: Elasticity | None = None,
    ) -> None:
        self._policy = policy
        self._prices = prices
        #: By card.
        self._price: dict[str, float] = {}
        self._elasticity = elasticity
        self._books: dict[str, Books] = {}
        self._held: dict[str, Served] = {}
        self._works: dict[str, Work] = {}
        self._useful = self._taken = self._elastic = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        #: Events that are not looks, and when the last of those was.
        self._to_come = 0
        self._quiet_since = 0.0
        self._round_at = self._balance_at = math.inf
        self._provided = 0
        self._outcome = Outcome(moves=Moves() if elasticity else None)
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
            if kind not in _LOOKS:
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
            # It may have been broken off, or be at it longer with fewer units.
            if self._held.get(what.work.name) is what and what.ended_s == now_s:
                self._end(what, now_s)
                self._round_soon(now_s)
        elif kind == "round":
            if now_s == self._round_at:
                self._round(now_s)
        elif kind == "balance":
            if now_s == self._balance_at:
                self._balance(now_s)
        else:
            assert isinstance(what, SimulatedNode)  # noqa: S101  by kind
            self._node(kind, what, now_s)

    def _node(self, kind: str, node: SimulatedNode, now_s: float) -> None:
        if kind == "up":
            self._books[node.name] = node.books()
            for card in node.cards:
                self._price[card.uuid] = self._prices.get(card.model, 1.0)
            if self._elasticity is not None:
                self._provided += self._elasticity.is_provided(node)
        else:
            broken = [served for served in self._held.values() if served.node == node.name]
            for served in broken:
                served.ended_s = now_s
                self._end(served, now_s)
            del self._books[node.name]
            for served in broken:
                # It begins again from nothing, like a sandbox whose node is gone.
                self._grant(self._policy.arrive(served.work, now_s, self._books), now_s)
        self._round_soon(now_s)
        self._balance_soon(now_s)

    def _round(self, now_s: float) -> None:
        self._round_at = math.inf
        self._grant(self._policy.look(now_s, self._books), now_s)
        # When nothing else can happen, patience can still end; who waits after that waits forever.
        if self._policy.waiting and (self._to_come or now_s - self._quiet_since <= _PATIENCE_S):
            self._round_by(now_s + _QUIET_ROUND_S)

    def _grant(self, grants: Sequence[Grant], now_s: float) -> None:
        refused = 0
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
            books = self._books[grant.node]
            try:
                lease = books.grant(f"{grant.node}.{work.name}", asked, now_s)
            except DsecError:
                # Room for another in the same round was not made where it was thought to be.
                self._policy.refused(work)
                refused += 1
                continue
            self._policy.granted(work)
            self._begin(Served.begun(work, grant.node, lease.slices, now_s), now_s)
            if not grant.slices:
                self._follow(grant.node, now_s)
        if 0 < refused < len(grants):
            self._round_soon(now_s)

    def _begin(self, served: Served, now_s: float) -> None:
        self._held[served.work.name] = served
        self._outcome.served.append(served)
        self._count(served, 1)
        self._at(served.ended_s, "end", served)
        self._balance_soon(now_s)

    def _end(self, served: Served, now_s: float) -> None:
        del self._held[served.work.name]
        self._count(served, -1)
        self._books[served.node].release(f"{served.node}.{served.work.name}")
        self._charge(served, now_s)
        self._balance_soon(now_s)

    def _count(self, served: Served, sign: int) -> None:
        self._useful += sign * served.useful_cu
        self._taken += sign * served.held_cu
        if self._elasticity is not None:
            cards = {card.uuid: card for card in self._books[served.node].cards}
            bounds = bounds_of(served.slices, cards, served.work.demand)
            self._elastic += sign * (bounds.cu - bounds.least_cu)

    def _charge(self, served: Served, until_s: float) -> None:
        self._outcome.cost += served.cost(self._price, until_s)

    # --- The elastic engine -------------------------------------------------------------------

    def _balance(self, now_s: float) -> None:
        assert self._elasticity is not None  # noqa: S101  nobody else asks for it
        self._balance_at = math.inf
        records = [books.record() for books in self._books.values()]
        look = self._elasticity.look(records, now_s)
        for node, targets in look.targets.items():
            resize(self._books[node], targets, "")
            self._follow(node, now_s)
        for ordered in look.ordered:
            self._at(ordered.since_s, "up", ordered)
        for name in look.given_up:
            del self._books[name]
            self._balance_soon(now_s)
        self._provided -= len(look.given_up)
        moves = self._moves()
        moves.ordered += len(look.ordered)
        moves.given_up += len(look.given_up)
        if look.again_s < math.inf:
            self._balance_by(look.again_s)

    def _follow(self, node: str, now_s: float) -> None:
        """Have work go on with what its leases have now."""
        moves, changed = self._moves(), False
        for lease in self._books[node].leases():
            served = self._held[lease.holder]
            if served.slices == lease.slices:
                continue
            changed = True
            before_cu = served.held_cu
            self._count(served, -1)
            served.resize(lease.slices, now_s)
            self._count(served, 1)
            self._at(served.ended_s, "end", served)
            moves.shrinks += served.held_cu < before_cu
            moves.recoveries += served.held_cu > before_cu
        if changed:
            self._round_soon(now_s)
            self._balance_soon(now_s)

    def _moves(self) -> Moves:
        assert self._outcome.moves is not None  # noqa: S101  only with the elastic engine
        return self._outcome.moves

    # --- Time ---------------------------------------------------------------------------------

    def _at(self, when_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, what))
        self._to_come += kind not in _LOOKS

    def _round_soon(self, now_s: float) -> None:
        """Have a round at the next beat of the scheduler's clock, if anybody waits."""
        if self._policy.waiting:
            self._round_by((math.floor(now_s / ROUND_S) + 1) * ROUND_S)

    def _round_by(self, when_s: float) -> None:
        if when_s < self._round_at:
            self._round_at = when_s
            self._at(when_s, "round", None)

    def _balance_soon(self, now_s: float) -> None:
        """Look at the cluster a moment after a change, once for all that changes until then."""
        if self._elasticity is not None:
            self._balance_by(now_s + self._elasticity.interval_s)

    def _balance_by(self, when_s: float) -> None:
        if when_s < self._balance_at:
            self._balance_at = when_s
            self._at(when_s, "balance", None)

    def _note(self, now_s: float) -> None:
        outcome = self._outcome
        outcome.times_s.append(now_s)
        outcome.useful_cu.append(self._useful)
        outcome.held_cu.append(self._taken)
        outcome.total_cu.append(math.fsum(books.cu_total for books in self._books.values()))
        outcome.waiting.append(self._policy.waiting)
        if outcome.moves is not None:
            outcome.moves.elastic_cu.append(self._elastic)
            outcome.moves.nodes.append(self._provided)
