"""Cards and leases of all nodes, as the broker told them last, and what was asked of it since."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.compute.conservation import rank_of
from dsec_common.compute.model import Card, CardMode, Slice, cu_of
from dsec_common.compute.slice_pool import SlicePool
from dsec_common.wire.lease import HeldLease, LeaseList, ListLeases, NodeLeases
from dsec_scheduler.asks import Ask, HeldUnits, Part, World
from dsec_scheduler.solving.problem import NodeCapacity

_TIMEOUT_S: Final = 2.0


class UnitBooks:
    """What a round goes by; nothing is asked of the broker while nobody wants units."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        prices: Mapping[str, float],
        is_other: Callable[[str], bool],
    ) -> None:
        self._bus = bus
        self._is_other = is_other
        self._clock = clock
        self._prices = prices
        self._nodes: tuple[NodeLeases, ...] = ()
        self._leases: dict[str, tuple[HeldUnits, ...]] = {}
        self._asked_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        #: What is being taken, or was since the broker was asked, by ask.
        self._taken: dict[int, tuple[str, tuple[Part, ...], float]] = {}

    async def refresh(self, max_age_s: float) -> None:
        """Have what is known here be no older than so long; who asks meanwhile shares the answer.

        Raises:
            DsecError: the broker did not answer.
        """
        if self._clock.monotonic() - self._asked_at <= max_age_s:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="ask for leases")
            # Who asked may have gone.
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        asked_at = self._clock.monotonic()
        nodes: list[NodeLeases] = []
        after, more = "", True
        while more:
            page = await self._bus.request(
                subjects.lease("list"), ListLeases(after=after), LeaseList, timeout_s=_TIMEOUT_S
            )
            nodes += page.nodes
            more = page.more and bool(page.nodes)
            after = nodes[-1].node if nodes else ""
        self._nodes, self._asked_at = tuple(nodes), asked_at
        self._leases = {
            it.node: tuple(_held(lease, yields=not it.full) for lease in it.leases) for it in nodes
        }
        # What was granted before the question is in the answer.
        self._taken = {key: it for key, it in self._taken.items() if it[2] >= asked_at}

    def taking(self, ask: Ask, parts: tuple[Part, ...]) -> None:
        """Count what the broker is being asked for."""
        self._taken[ask.ask_id] = (ask.project, parts, math.inf)

    def taken(self, ask_id: int, *, granted: bool) -> None:
        """Note what the broker said."""
        project, parts, _ = self._taken.pop(ask_id)
        if granted:
            self._taken[ask_id] = (project, parts, self._clock.monotonic())

    def world(self, foreign: Iterable[Ask]) -> World:
        """Return what is known."""
        held_cu: dict[str, float] = {}
        held = {it.node: [s for lease in it.leases for s in lease.slices] for it in self._nodes}
        for it in self._nodes:
            for lease in it.leases:
                held_cu[lease.project] = held_cu.get(lease.project, 0.0) + lease.cu
        for project, parts, _ in self._taken.values():
            for part in parts:
                # A grant may be in the list already though it came before the answer.
                fresh = [s for s in part.slices if s not in held.get(part.node, ())]
                held.setdefault(part.node, []).extend(fresh)
                held_cu[project] = held_cu.get(project, 0.0) + math.fsum(s.cu for s in fresh)
        ready = [it for it in self._nodes if it.ready and it.cards]
        for it in ready:
            if it.full:
                held[it.node] += _rest(it.cards, held[it.node])
        return World(
            nodes=tuple(NodeCapacity(it.node, it.cards, tuple(held[it.node])) for it in ready),
            held_cu=held_cu,
            prices=self._prices,
            foreign=tuple(foreign),
            leases=self._leases,
            others=frozenset(it.node for it in self._nodes if self._is_other(it.node)),
            full=frozenset(it.node for it in ready if it.full),
        )


def _rest(cards: Iterable[Card], held: Iterable[Slice]) -> list[Slice]:
    """Return what nobody holds of the cards: on a node that takes no lease it is as good as held.

    The cards stay in the world, since leases there will end.
    """
    free = SlicePool(cards, held).free()
    rest = []
    for card in cards:
        is_cut = card.mode is CardMode.MIG
        worth = {it.uuid: it.cu for it in card.mig} if is_cut else {card.uuid: card.cu}
        for uuid, cu in worth.items():
            percent, memory_bytes = free[uuid]
            if percent > 0:
                rest.append(
                    Slice(
                        card=card.uuid,
                        kind=card.mode,
                        percent=percent,
                        mig_uuid=uuid if is_cut else "",
                        cu=cu_of(percent, cu),
                        memory_bytes=max(0, memory_bytes),
                    )
                )
    return rest


def _held(lease: HeldLease, *, yields: bool) -> HeldUnits:
    return HeldUnits(
        cu=lease.cu,
        since=lease.granted_at,
        slices=lease.slices,
        demand=lease.demand if yields else None,
        rank=rank_of(lease.service_class, lease.priority),
        ends_at=lease.ends_at,
    )
