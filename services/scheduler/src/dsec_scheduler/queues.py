"""The queues of those who wait for Compute Units: events in, effects out, no I/O.

Three classes. **Realtime** has a pool of cards of its own and is looked at in the moment it comes.
**Standard** goes before **batch** on all other cards; batch is placed by cost into what is left.
What a class does not use the others may take. Nobody's units are taken away for anybody, but for
what leases have beyond their promise: less important ones give that to realtime work that finds
nothing free.

Within a class projects take turns by :mod:`~dsec_scheduler.fair_share`. Within a project higher
priority goes first, and ``ageing_s`` of waiting are worth one step of priority. Nothing starves:
what has waited ``starving_s`` and longest of all is looked at first, and while it does not fit, the
nodes on which it would are kept from everybody else until they are empty enough.

A round takes from the front of the line as much as could be had, asks the solver where it goes
best, and goes on with the next of the line and what is then left (backfill) until nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, assert_never

import msgspec

from dsec_common.compute.conservation import BURST_FACTOR
from dsec_common.compute.model import ServiceClass
from dsec_scheduler.asks import (
    Ask,
    Asked,
    LeasesRefused,
    LeasesTaken,
    Part,
    RoundDue,
    Solve,
    Solved,
    TakeLeases,
    WaitingEffect,
    WaitingEvent,
    Withdrawn,
    World,
)
from dsec_scheduler.fair_share import FairShare, Quota
from dsec_scheduler.lines import Line
from dsec_scheduler.rounds import Round, Stage
from dsec_scheduler.solving.problem import Assignment, Problem, Solution, Waiting
from dsec_scheduler.supply import Cards, Supply, all_cards, place_alone, pool_of
from dsec_scheduler.yielding import places_that_yield

#: Asks that the solver is given at once.
_CANDIDATES_MAX: Final = 512
#: Questions to the solver in a round: what is left after that waits for the next.
_QUESTIONS_MAX: Final = 8
_TOLERANCE: Final = 1e-9


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the queues go by.

    Attributes:
        quotas: see :class:`~dsec_scheduler.fair_share.Quota`.
        realtime_share: of all cards, whole ones, those that only realtime requests get.
        ageing_s: waiting that is worth one step of priority.
        starving_s: what has waited this long and longest of all has nodes kept for it.
        batch_patience_s: batch that has waited this long is looked at with standard.
        burst_factor: the use of the cluster's own cards above which other capacity goes first.
    """

    quotas: tuple[Quota, ...] = ()
    realtime_share: float = 0.1
    ageing_s: float = 60.0
    starving_s: float = 60.0
    batch_patience_s: float = 600.0
    burst_factor: float = BURST_FACTOR


class WaitingRoom:
    """All that waits at this scheduler; :meth:`handle` is its only way to change."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._share = FairShare(rules.quotas)
        self._asks: dict[int, Ask] = {}
        #: What the broker has been asked for.
        self._granting: set[int] = set()
        self._lines = {service_class: Line() for service_class in ServiceClass}
        self._round: Round | None = None
        self._kept: tuple[int, frozenset[str]] = (0, frozenset())
        self._previous: tuple[Assignment, ...] = ()
        #: Which quota keeps an ask waiting, as of the last round.
        self.limited: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def idle(self) -> bool:
        """Whether something waits for which the broker is not being asked."""
        return len(self._asks) > len(self._granting)

    def count(self, service_class: ServiceClass) -> int:
        """Return how many of a class wait."""
        return self._lines[service_class].count

    def waiting_cu(self, service_class: ServiceClass) -> float:
        """Return the units that a class waits for, at least."""
        return math.fsum(ask.min_cu for ask in self._lines[service_class].asks())

    def get(self, ask_id: int) -> Ask | None:
        """Return what waits, or None."""
        return self._asks.get(ask_id)

    def handle(self, event: WaitingEvent) -> list[WaitingEffect]:
        """Take in one event and return what is to be done; unknown asks have no effect."""
        effects: list[WaitingEffect] = []
        match event:
            case Asked():
                effects = self._on_asked(event)
            case Withdrawn() | LeasesTaken():
                self._forget(event.ask_id)
            case LeasesRefused():
                self._granting.discard(event.ask_id)
            case RoundDue():
                effects = self._on_round(event)
            case Solved():
                effects = self._on_solved(event)
            case _:
                assert_never(event)
        return effects

    @property
    def in_round(self) -> bool:
        """Whether the solver is at work."""
        return self._round is not None

    def heads(self, count: int) -> list[Ask]:
        """Return what goes first here, for other schedulers to know."""
        found: list[Ask] = []
        for line in self._lines.values():
            taken: Iterable[Ask] = line.asks()
            if len(self._asks) > count:
                taken = sorted(taken, key=lambda ask: ask.asked_at)
            found += [ask for ask in taken if ask.ask_id not in self._granting][:count]
        return found

    def cards_for(self, ask: Ask, world: World) -> Cards:
        """Return the cards that an ask's class may have, those kept for another apart."""
        pool = self._pool(world)
        urgent = ask.service_class is ServiceClass.REALTIME
        kept = self.keeps_for_another(ask.ask_id)
        return frozenset(
            card
            for card in all_cards(world.nodes)
            if (urgent or card not in pool) and card[0] not in kept
        )

    def line_of(self, ask: Ask, world: World) -> list[Ask]:
        """Return what goes before ``ask`` in its class, in order; for an explanation."""
        before: list[Ask] = []
        for other, _ in self._order(self._lines[ask.service_class], ask.service_class, world):
            if other is ask:
                return before
            before.append(other)
        return before

    # --- Coming and going -----------------------------------------------------------------------

    def _on_asked(self, event: Asked) -> list[WaitingEffect]:
        ask = event.ask
        alone = self._is_first(ask, event.world)
        self._asks[ask.ask_id] = ask
        self._lines[ask.service_class].add(ask, self._rules.ageing_s)
        if not alone:
            return []
        world = event.world
        pool = self._pool(world)
        supply = Supply(world.nodes)
        for cards in self._cards_for(ask.service_class, world, pool, supply):
            order = list(self._share.order({ask.project: [ask]}, world.held_cu, _min_cu))
            if order[0][1]:
                self.limited[ask.ask_id] = order[0][1]
                return []
            limit = ask.price_limit(world.price_range, event.now)
            parts = place_alone(ask, supply, cards, world.prices, limit)
            if parts:
                return [self._grant(ask, parts)]
        return self._make_room([ask], world, supply)

    def _is_first(self, ask: Ask, world: World) -> bool:
        """Return whether nobody who waits may go before it: realtime does not wait for others."""
        if self._round is not None or self._kept[1]:
            return False
        urgent = ask.service_class is ServiceClass.REALTIME
        rivals = (ServiceClass.REALTIME,) if urgent else tuple(ServiceClass)
        return not (
            any(self._lines[it].count > self._granting_of(it) for it in rivals)
            or any(it.service_class in rivals for it in world.foreign)
        )

    def _granting_of(self, service_class: ServiceClass) -> int:
        return sum(self._asks[it].service_class is service_class for it in self._granting)

    def _cards_for(
        self, service_class: ServiceClass, world: World, pool: Cards, supply: Supply
    ) -> Iterator[Cards]:
        """Yield the cards that a newcomer of a class may have, those to be tried first first."""
        everything = all_cards(world.nodes)
        if service_class is not ServiceClass.REALTIME:
            yield from self._in_turn(everything - pool, service_class, world, supply)
            return
        if pool:
            yield from self._in_turn(pool, service_class, world, supply)
        if not pool or self._lines[ServiceClass.REALTIME].count == len(self._asks):
            yield from self._in_turn(everything, service_class, world, supply)

    def _in_turn(
        self, cards: Cards, service_class: ServiceClass, world: World, supply: Supply
    ) -> tuple[Cards, ...]:
        urgent = service_class is ServiceClass.REALTIME
        return supply.in_turn(cards, world.others, self._rules.burst_factor, own_first=urgent)

    def _grant(self, ask: Ask, parts: tuple[Part, ...], *, makes_room: bool = False) -> TakeLeases:
        self._granting.add(ask.ask_id)
        self.limited.pop(ask.ask_id, None)
        return TakeLeases(ask.ask_id, parts, makes_room)

    def _make_room(self, asks: Iterable[Ask], world: World, supply: Supply) -> list[WaitingEffect]:
        """Give those of the realtime class what less important leases can spare."""
        urgent = (ask for ask in asks if ask.service_class is ServiceClass.REALTIME)
        effects: list[WaitingEffect] = []
        for ask, parts in places_that_yield(urgent, world, supply, self._kept[1]):
            supply.take(parts)
            if self._round is not None:
                self._round.note(ask)
            if not ask.foreign:
                effects.append(self._grant(ask, parts, makes_room=True))
        return effects

    def _forget(self, ask_id: int) -> None:
        ask = self._asks.pop(ask_id, None)
        if ask is None:
            return
        self._lines[ask.service_class].remove(ask, self._rules.ageing_s)
        self._granting.discard(ask_id)
        self.limited.pop(ask_id, None)
        if self._kept[0] == ask_id:
            self._kept = (0, frozenset())

    # --- A round ------------------------------------------------------------------------------

    def _pool(self, world: World) -> Cards:
        return pool_of(world.nodes, self._rules.realtime_share)

    def _order(
        self, line: Line, service_class: ServiceClass, world: World, extra: Iterable[Ask] = ()
    ) -> Iterator[tuple[Ask, str]]:
        """Yield a class's line as it is to be served, other schedulers' heads in their turn.

        What the round has found places for counts as held, whatever its class.
        """
        merged = Line({name: list(asks) for name, asks in line.waiting.items()})
        foreign = (ask for ask in world.foreign if ask.service_class is service_class)
        for ask in (*foreign, *extra):
            merged.add(ask, self._rules.ageing_s)
        waiting = {
            name: [ask for _, _, ask in asks if ask.ask_id not in self._granting]
            for name, asks in merged.waiting.items()
        }
        held_cu = self._round.held_cu if self._round is not None else world.held_cu
        yield from self._share.order(waiting, held_cu, _min_cu)

    def _on_round(self, event: RoundDue) -> list[WaitingEffect]:
        if self._round is not None or not self._asks:
            return []
        world = event.world
        pool = self._pool(world)
        everything = all_cards(world.nodes)
        supply = Supply(world.nodes)
        effects = self._feed_the_starving(supply, everything - pool, event)
        common = frozenset(it for it in everything - pool if it[0] not in self._kept[1])
        realtime, standard, batch = (self._lines[it] for it in ServiceClass)
        aged = [
            ask for ask in batch.asks() if event.now - ask.asked_at >= self._rules.batch_patience_s
        ]

        def stages(
            line: Line, it: ServiceClass, cards: Cards, extra: Iterable[Ask] = ()
        ) -> list[Stage]:
            return [
                Stage(self._order(line, it, world, extra), some)
                for some in self._in_turn(cards, it, world, supply)
            ]

        urgent = stages(realtime, ServiceClass.REALTIME, pool or common)
        urgent[-1].makes_room = True
        going = [
            *urgent,
            *stages(standard, ServiceClass.STANDARD, common, aged),
            *stages(batch, ServiceClass.BATCH, common),
            *stages(realtime, ServiceClass.REALTIME, common if pool else frozenset()),
        ]
        self._round = Round(world, supply, event.now, going)
        for effect in effects:
            self._round.note(self._asks[effect.ask_id])
        return [*effects, *self._ask_on()]

    def _feed_the_starving(self, supply: Supply, cards: Cards, event: RoundDue) -> list[TakeLeases]:
        """Look at what has waited longest before all else, and keep nodes for it."""
        prices = event.world.price_range
        hungry = [
            ask
            for ask in self._asks.values()
            if event.now - ask.asked_at >= self._rules.starving_s
            # Who still waits for a better price does not starve.
            and ask.price_limit(prices, event.now) == math.inf
            and ask.ask_id not in self._granting
            and ask.ask_id not in self.limited
        ]
        self._kept = (0, frozenset()) if not hungry else self._kept
        if not hungry:
            return []
        first = min(hungry, key=lambda ask: (ask.asked_at, ask.ask_id))
        ((_, limit),) = self._share.order({first.project: [first]}, event.world.held_cu, _min_cu)
        if limit:
            self.limited[first.ask_id] = limit
            return []
        parts = place_alone(first, supply, cards, event.world.prices)
        if parts:
            supply.take(parts)
            self._kept = (0, frozenset())
            return [self._grant(first, parts)]
        kept = self._kept[1] if self._kept[0] == first.ask_id else frozenset()
        self._kept = (first.ask_id, supply.keep_for(first, cards, kept))
        return []

    def _ask_on(self) -> list[WaitingEffect]:
        """Put the next question to the solver, or end the round."""
        going = self._round
        effects: list[WaitingEffect] = []
        while going is not None and going.stages:
            stage = going.stages[0]
            chosen = self._next_of(going, stage)
            if chosen and going.questions < _QUESTIONS_MAX:
                going.questions += 1
                return [*effects, Solve(self._problem(going, stage, chosen))]
            going.stages.pop(0)
            going.left_over = None
            if stage.makes_room:
                line = self._lines[ServiceClass.REALTIME]
                order = self._order(line, ServiceClass.REALTIME, going.world)
                left = (it for it, limit in order if not limit and it.ask_id not in self._granting)
                effects += self._make_room(left, going.world, going.supply)
        self._round = None
        return effects

    def _next_of(self, going: Round, stage: Stage) -> list[Ask]:
        """Take from the front of a line what its free units would do for, if shapes did not matter.

        What wants more than all that is free stays where it is; who comes after may go. The front
        has had its word after the first question: what then fills the gaps is looked for among
        twice as many with each further one, or a long line would never be looked through.
        """
        free = going.supply.free_cu(stage.cards)
        budget = free * 2**stage.questions
        stage.questions += 1
        chosen: list[Ask] = []
        while budget > _TOLERANCE and len(chosen) < _CANDIDATES_MAX:
            if going.left_over is not None:
                ask, limit, going.left_over = going.left_over, "", None
            else:
                following = next(stage.order, None)
                if following is None:
                    break
                ask, limit = following
            if limit:
                if not ask.foreign:
                    self.limited[ask.ask_id] = limit
                continue
            if ask.ask_id in self._granting:
                continue
            self.limited.pop(ask.ask_id, None)
            if ask.min_cu > budget + _TOLERANCE and chosen:
                going.left_over = ask
                break
            if ask.min_cu <= free + _TOLERANCE:
                budget -= ask.min_cu
                chosen.append(ask)
        return chosen

    def _problem(self, going: Round, stage: Stage, chosen: list[Ask]) -> Problem:
        world = going.world
        projects = list(dict.fromkeys(ask.project for ask in chosen))
        total_cu = math.fsum(card.cu_total for node in world.nodes for card in node.cards)
        shares = self._share.shares(projects, world.held_cu, total_cu)
        waiting: list[Waiting] = []
        going.asked = {}
        for number, ask in enumerate(chosen):
            nodes = going.supply.nodes_for(ask)
            gang = f"{number}" if len(ask.demands) > 1 else ""
            for member, demand in enumerate(ask.demands):
                name = f"{number}.{member}"
                going.asked[name] = ask
                waiting.append(
                    Waiting(
                        request_id=name,
                        demand=demand,
                        project=ask.project,
                        service_class=ask.service_class,
                        priority=ask.priority,
                        waited_s=max(going.now - ask.asked_at, 0.0),
                        duration_s=ask.duration_s,
                        share=shares[ask.project],
                        nodes=nodes,
                        gang=gang,
                    )
                )
        return Problem(
            waiting=tuple(waiting),
            nodes=going.supply.capacities(stage.cards),
            prices=world.prices,
        )

    def _on_solved(self, event: Solved) -> list[WaitingEffect]:
        going = self._round
        if going is None:
            return []
        effects: list[WaitingEffect] = []
        for ask, parts in self._placed(going, event.solution):
            going.supply.take(parts)
            going.note(ask)
            # Who has left meanwhile wants nothing; who waits elsewhere is granted there.
            if ask.ask_id in self._asks and ask.ask_id not in self._granting:
                effects.append(self._grant(ask, parts))
        if event.solution is None:
            going.stages.clear()
        return effects + self._ask_on()

    @staticmethod
    def _placed(going: Round, solution: Solution | None) -> list[tuple[Ask, tuple[Part, ...]]]:
        """Return the asks all of whose members have a place."""
        found: dict[Ask, dict[str, Part]] = {}
        for assignment in solution.assignments if solution is not None else ():
            ask = going.asked[assignment.request_id]
            part = Part(assignment.node, assignment.slices)
            found.setdefault(ask, {})[assignment.request_id] = part
        return [
            (ask, tuple(parts[name] for name in sorted(parts, key=_member)))
            for ask, parts in found.items()
            if len(parts) == len(ask.demands)
        ]

    # --- Looking ------------------------------------------------------------------------------

    def kept_nodes(self, ask_id: int) -> frozenset[str]:
        """Return the nodes that are kept for an ask that has waited longest."""
        return self._kept[1] if self._kept[0] == ask_id else frozenset()

    def keeps_for_another(self, ask_id: int) -> frozenset[str]:
        """Return the nodes that are kept from an ask."""
        return self._kept[1] if self._kept[0] != ask_id else frozenset()

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        lined = [ask.ask_id for line in self._lines.values() for ask in line.asks()]
        assert sorted(lined) == sorted(self._asks)  # noqa: S101  invariant
        assert self._granting <= set(self._asks)  # noqa: S101  invariant
        assert set(self.limited) <= set(self._asks)  # noqa: S101  invariant
        for line in self._lines.values():
            for waiting in line.waiting.values():
                assert waiting  # noqa: S101  invariant
                assert waiting == sorted(waiting, key=lambda it: it[:2])  # noqa: S101  invariant


def _min_cu(ask: Ask) -> float:
    return ask.min_cu


def _member(name: str) -> int:
    return int(name.partition(".")[2])
