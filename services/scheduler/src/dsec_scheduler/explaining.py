"""Why somebody waits for Compute Units, and what would change that. No I/O."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec

from dsec_common.compute.model import GpuDemand
from dsec_common.wire.waiting import WaitingExplained
from dsec_scheduler.asks import Ask, World
from dsec_scheduler.queues import WaitingRoom
from dsec_scheduler.solving.objective import PATIENCE, SLA_S
from dsec_scheduler.solving.problem import NodeCapacity
from dsec_scheduler.supply import Cards, Supply, place_alone

_NAMED_MAX: Final = 3
_MINUTE_S: Final = 60.0
#: What is dropped from a demand to see whether it stands in the way: the demand's own words first.
_RELAXED: Final = (
    ("island", {"same_island": False}, "leave out the same island"),
    ("model", {"models": ()}, "allow any model"),
    ("count", {"count": 0, "same_island": False}, "leave the number of cards open"),
    ("too_much_memory", {"memory_bytes": 0}, "ask for no more memory than goes with the units"),
)


def explain(
    ask: Ask, room: WaitingRoom, world: World, now: float, unix_s: float
) -> WaitingExplained:
    """Return why ``ask`` waits in ``room``: the first thing in its way, and what would change it.

    Args:
        ask: one of the room's.
        room: where it waits.
        world: as of a moment ago.
        now: monotonic, as the ask's own times are.
        unix_s: the same as Unix time, as leases' times are.
    """
    cards = room.cards_for(ask, world)
    supply = Supply(world.nodes)
    empty = Supply(NodeCapacity(it.node, it.cards) for it in world.nodes)
    ahead = len(room.line_of(ask, world))
    quota = room.limited.get(ask.ask_id, "")
    startable = _startable_cu(ask, supply, cards)
    expected_at = 0.0
    changes: tuple[str, ...]
    if quota:
        constraint = "quota"
        reason = f"quota {quota} allows no more until some of what is held under it ends"
        changes = (f"end sandboxes under quota {quota}, or raise its cu_max",)
    elif not place_alone(ask, empty, cards, {}):
        constraint, reason, changes = _never(ask, empty, cards)
    elif (
        place_alone(ask, supply, cards, {})
        and not ahead
        and _is_dear(ask, supply, world, cards, now)
    ):
        constraint = "price"
        reason = "it fits now on cards that cost more than batch work pays before it has waited"
        left = _duration(PATIENCE * SLA_S[ask.service_class] - (now - ask.asked_at))
        changes = (f"in {left} it takes whatever is free", "another service class pays any price")
    elif place_alone(ask, supply, cards, {}):
        constraint = "turn"
        reason = f"it fits now; {ahead} go before it" if ahead else "it fits now: the next round"
        changes = ("a higher priority goes first",) if ahead else ()
    else:
        constraint = "capacity"
        reason = f"waits for {_wanted(ask)}: {_most_free(ask, supply, cards)}"
        expected_at = _expected_at(ask, world, cards, unix_s)
        changes = tuple(
            _for_want(
                ask,
                room,
                world,
                supply=supply,
                cards=cards,
                startable_cu=startable,
                expected_at=expected_at,
                unix_s=unix_s,
            )
        )
    return WaitingExplained(
        request_id=ask.request_id,
        service_class=ask.service_class,
        priority=ask.priority,
        waited_s=max(now - ask.asked_at, 0.0),
        ahead=ahead,
        constraint=constraint,
        reason=reason,
        would_change=changes,
        startable_cu=startable,
        quota=quota,
        expected_at=expected_at,
    )


def _is_dear(ask: Ask, supply: Supply, world: World, cards: Cards, now: float) -> bool:
    """Return whether all that is free for an ask costs more than it pays so far."""
    limit = ask.price_limit(world.price_range, now)
    return not place_alone(ask, supply, cards, world.prices, limit)


def _with(ask: Ask, **changes: object) -> Ask:
    demands = tuple(msgspec.structs.replace(demand, **changes) for demand in ask.demands)
    return replace(ask, demands=demands)


def _never(ask: Ask, empty: Supply, cards: Cards) -> tuple[str, str, tuple[str, ...]]:
    """Return what keeps an ask out of an empty cluster."""
    anywhere = replace(ask, may_use=None)
    if place_alone(anywhere, empty, cards, {}):
        return (
            "nodes",
            "no node that has the cards has room for the rest of the sandbox",
            ("ask for fewer cpus or less memory, or wait until sandboxes there end",),
        )
    for constraint, changes, advice in _RELAXED:
        if place_alone(_with(anywhere, **changes), empty, cards, {}):
            return constraint, f"no node could ever give {_wanted(ask)}", (advice,)
    if len(ask.demands) > 1:
        return "gang", f"all nodes together could never give {_wanted(ask)}", ("add nodes",)
    most = max((empty.free_cu(own) for _, own in empty.by_node(cards)), default=0.0)
    return (
        "too_many_cu",
        f"no node could ever give {_wanted(ask)}: the most of one is {most:g} CU",
        ("ask for less, or add a larger node",),
    )


def _for_want(
    ask: Ask,
    room: WaitingRoom,
    world: World,
    *,
    supply: Supply,
    cards: Cards,
    startable_cu: float,
    expected_at: float,
    unix_s: float,
) -> Iterator[str]:
    """Yield what would let an ask start that waits for units to come free."""
    if startable_cu:
        yield f"would start now with --max-cu {startable_cu:g}"
    for _, changes, advice in _RELAXED:
        if _with(ask, **changes) != ask and place_alone(_with(ask, **changes), supply, cards, {}):
            yield f"would start now: {advice}"
    if kept := room.keeps_for_another(ask.ask_id):
        yield f"{_named(sorted(kept))} is kept for what has waited longest"
    for node in sorted(room.kept_nodes(ask.ask_id))[:_NAMED_MAX]:
        yield f"{node} is kept for it: it has waited longest"
    busiest = sorted(world.leases.items(), key=lambda it: (-sum(held.cu for held in it[1]), it[0]))
    for node, leases in busiest[:_NAMED_MAX]:
        if leases:
            oldest_s = max(unix_s - min(it.since for it in leases), 0.0)
            yield (
                f"{len(leases)} leases on {node} hold {math.fsum(it.cu for it in leases):g} CU, "
                f"the oldest for {oldest_s / 60:.0f} min"
            )
    yield from _full(world)
    held = [lease for of_node in world.leases.values() for lease in of_node]
    if expected_at:
        left = _duration(expected_at - unix_s)
        yield f"enough is expected back in {left}, who goes before it apart"
    elif held:
        silent = sum(lease.ends_at <= unix_s for lease in held)
        yield (
            "when enough comes back is not known: "
            f"{silent} of {len(held)} leases do not say when they end"
        )


def _full(world: World) -> Iterator[str]:
    for node in sorted(world.full)[:_NAMED_MAX]:
        yield (
            f"{node} holds as many leases as its record takes, whatever is free: end some there, "
            "ask for fewer and larger ones, or add a node"
        )


def _expected_at(ask: Ask, world: World, cards: Cards, unix_s: float) -> float:
    """Return the soonest Unix time by which leases have ended that make room for an ask, or 0."""
    ends = sorted({held.ends_at for of_node in world.leases.values() for held in of_node})
    ends = [at for at in ends if at > unix_s]

    def fits(at: float) -> bool:
        return bool(place_alone(ask, Supply(_left_at(world, at, unix_s)), cards, {}))

    # What has come back by one time has come back by each later one.
    first = bisect.bisect_left(ends, True, key=fits)
    return ends[first] if first < len(ends) else 0.0


def _left_at(world: World, at: float, unix_s: float) -> Iterator[NodeCapacity]:
    """Yield the nodes as they are once the leases have ended that are expected to by then."""
    for node in world.nodes:
        held = list(node.held)
        for lease in world.leases.get(node.node, ()):
            if unix_s < lease.ends_at <= at:
                for slice_ in lease.slices:
                    # Slices of a card that fell off are held by nobody.
                    if slice_ in held:
                        held.remove(slice_)
        yield replace(node, held=tuple(held))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / 60:.0f} min"


def _startable_cu(ask: Ask, supply: Supply, cards: Cards) -> float:
    """Return the most units with which a single ask would fit now, below what it wants; or 0."""
    if len(ask.demands) > 1:
        return 0.0
    (demand,) = ask.demands
    best = 0.0
    for _, own in supply.by_node(cards):
        free = math.floor(supply.free_cu(own))
        wanted = min(free, math.ceil(demand.min_cu) - 1)
        if wanted > best:
            smaller = msgspec.structs.replace(demand, min_cu=1.0, max_cu=float(wanted))
            parts = place_alone(replace(ask, demands=(smaller,)), supply, own, {})
            best = max(best, float(math.floor(sum(it.cu for p in parts for it in p.slices))))
    return min(best, float(math.ceil(demand.min_cu) - 1))


def _most_free(ask: Ask, supply: Supply, cards: Cards) -> str:
    usable = supply.nodes_for(ask)
    free = [
        (supply.free_cu(own), node)
        for node, own in supply.by_node(cards)
        if usable is None or node in usable
    ]
    cu, node = max(free, key=lambda it: (it[0], it[1]), default=(0.0, ""))
    return f"{cu:g} free on {node}" if node else "no node that it may use has cards"


def _wanted(ask: Ask) -> str:
    """Return what is asked for, in words."""
    if len(ask.demands) > 1:
        return f"{ask.min_cu:g} CU for {len(ask.demands)} sandboxes at once"
    return describe(ask.demands[0])


def describe(demand: GpuDemand) -> str:
    """Return a demand in words, such as ``40 CU on one island of A100``."""
    cards = f" on {demand.count} cards" if demand.count else ""
    island = " on one island" if demand.same_island else ""
    models = f" of {' or '.join(demand.models)}" if demand.models else ""
    memory = f" with {demand.memory_bytes / 2**30:.0f} GiB" if demand.memory_bytes else ""
    return f"{demand.min_cu:g} CU{cards}{island}{models}{memory}"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
