"""Keeps the node's warm pools: fills them in the background, hands out what waits, gives way.

A pool's sandboxes have their ids, but are in no record: they are nobody's. The record of whoever is
given one is written before he is told, so a crash at any point leaves either a sandbox with a
record, which the next daemon takes over, or one without, which it removes and nobody knows of.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id
from dsec_common.wire.pool import NodePool, NodePools, NodePoolState, SetNodePools, pool_key
from dsec_common.wire.sandbox import CreateSandbox, Limits, SandboxState
from dsec_common.wire.task import WarmUse
from dsec_sandboxd import metrics
from dsec_sandboxd.admission import check_limits, check_room
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.making import Maker
from dsec_sandboxd.pools import Kind, Pools, Rate, kind_of, kind_of_record, size_for_rate
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

#: Made at once, unless somebody waits for a sandbox.
_MAKING_MAX: Final = 2
#: What a hand-out leads to, most likely a command, and then the next one, goes before refilling:
#: nothing is made until there was none for so long, unless few are left.
_QUIET_S: Final = 0.025
_HALF: Final = 0.5
#: How often references are resolved again, since tags move.
_RESOLVE_INTERVAL_S: Final = 1.0
#: Pools are not filled into the last of the memory, and give way before it is used up.
_RESERVE_FACTOR: Final = 1.25
_REFILL_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class _Wish:
    """A pool that is wanted here, and what its references mean now."""

    pool: NodePool
    limits: Limits
    layers: tuple[Layer, ...] = ()
    kind: Kind | None = None
    error: str = ""


@dataclass(slots=True)
class _Calls:
    """The function calls of one kind."""

    rate: Rate
    key: str
    limits: Limits
    layers: tuple[Layer, ...]


class PoolKeeper:
    """The warm pools of one node; makes and hands out through the maker."""

    def __init__(self, sandboxes: Sandboxes, maker: Maker, *, calls_max: int) -> None:
        """Take the parts, and be the one whom the maker asks first.

        Args:
            sandboxes: of the node: they go first.
            maker: makes sandboxes.
            calls_max: how many may wait for function calls of one kind.
        """
        self._state = sandboxes.state
        self._maker = maker
        self._resolve = sandboxes.parts.layers.asked
        self._memory = sandboxes.parts.memory
        self._clock = sandboxes.parts.clock
        self._maxima = sandboxes.parts.maxima
        self._calls_max = calls_max
        maker.warm = self
        maker.on_end(self)
        self._pools = Pools()
        self._wishes: dict[str, _Wish] = {}
        self._calls: dict[Kind, _Calls] = {}
        self._layers: dict[Kind, tuple[Layer, ...]] = {}
        self._making: set[str] = set()
        self._dropping: set[str] = set()
        self._left: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refill_s = 0.01
        self._taken_at_s = -math.inf
        self._resolved_at_s = 0.0
        self._resolving = asyncio.Lock()
        self._refilling: asyncio.TimerHandle | None = None
        self._full = ""
        self._closed = False

    # --- Looking ------------------------------------------------------------------------------

    def is_somebodys(self, local: str) -> bool:
        """Return whether a local id is that of a sandbox with a record, or of one of the pools."""
        waits = self._pools.knows(local) or local in self._making or local in self._dropping
        return waits or self._state.is_living(local)

    @property
    def busy(self) -> bool:
        """Whether something is being made or dropped now."""
        return bool(self._tasks)

    @property
    def in_use(self) -> bool:
        """Whether there are pools, or anything waits or is on its way."""
        return bool(self._wishes or self._calls or self._tasks or self._pools.waiting)

    async def settled(self) -> None:
        """Return when nothing is being made or dropped."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def ready_by_key(self) -> dict[str, int]:
        """Return how many sandboxes wait, by the name of their pool."""
        found = {
            wish.pool.key: self._pools.ready(wish.kind)
            for wish in self._wishes.values()
            if wish.kind is not None
        }
        for kind, calls in self._calls.items():
            found.setdefault(calls.key, self._pools.ready(kind))
        return {key: count for key, count in found.items() if count}

    def _none_ready(self) -> DsecError:
        return DsecError(
            ErrorCode.EXHAUSTED,
            f"no warm sandbox of these layers waits on node {self._state.rules.node}; set a pool, "
            "let it fill, or do not require one",
            retryable=True,
            retry_after_s=0.1,
            details={"reason": "no_warm_sandbox", "node": self._state.rules.node},
        )

    # --- What is wanted -----------------------------------------------------------------------

    async def set(self, request: Request[SetNodePools]) -> NodePools:
        """Hold these pools and no others; answer with what there is. Idempotent."""
        wishes: dict[str, _Wish] = {}
        for pool in request.message.pools:
            known = self._wishes.get(pool.key)
            if known is not None and known.pool == pool:
                wishes[pool.key] = known
                continue
            wish = wishes[pool.key] = _Wish(pool, pool.limits)
            try:
                wish.limits = check_limits(pool.limits, self._maxima)
            except DsecError as error:
                wish.error = error.message
        changed = wishes.keys() != self._wishes.keys() or any(
            wishes[key] is not self._wishes[key] for key in wishes
        )
        self._wishes = wishes
        if changed:
            await self._resolve_all()
            self._fill()
        return NodePools(
            cause_id=request.message.message_id,
            pools=tuple(self._told(wish) for wish in self._wishes.values()),
        )

    def _told(self, wish: _Wish) -> NodePoolState:
        pool = self._pools.find(wish.kind) if wish.kind else None
        ready = len(pool.ready) if pool else 0
        note = wish.error or (pool.error if pool else "")
        if not note and ready < wish.pool.wanted:
            note = self._full
        return NodePoolState(key=wish.pool.key, wanted=wish.pool.wanted, ready=ready, note=note)

    async def _resolve_all(self) -> None:
        """Find out what the references mean now, and drop what they do not mean any more."""
        async with self._resolving:
            wishes = dict(self._wishes)
            for wish in wishes.values():
                await self._resolve_one(wish)
            self._resolved_at_s = self._clock.monotonic()
            asked: dict[Kind, tuple[int, Limits]] = {}
            for wish in wishes.values():
                if wish.kind is not None:  # two names may mean the same layers
                    size = asked[wish.kind][0] if wish.kind in asked else 0
                    asked[wish.kind] = (size + wish.pool.wanted, wish.limits)
                    self._layers[wish.kind] = wish.layers
            self._drop(self._pools.ask(asked))
            self._layers = {
                kind: layers
                for kind, layers in self._layers.items()
                if kind in asked or kind in self._calls or self._pools.find(kind)
            }

    async def _resolve_one(self, wish: _Wish) -> None:
        pool = wish.pool
        try:
            check_limits(pool.limits, self._maxima)
            wish.layers = await self._resolve(
                pool.project,
                CreateSandbox(base=pool.base, workspace=pool.workspace, toolkits=pool.toolkits),
            )
        except DsecError as error:
            wish.kind, wish.layers, wish.error = None, (), error.message
            return
        digests = tuple(layer.digest for layer in wish.layers)
        wish.kind, wish.error = kind_of(pool.project, digests, wish.limits), ""

    def _count_call(
        self,
        request: CreateSandbox,
        record: SandboxRecord,
        kind: Kind,
        layers: tuple[Layer, ...],
    ) -> None:
        """Count a call of a function: from now on some sandboxes wait for the next."""
        calls = self._calls.get(kind)
        if calls is None:
            key = pool_key(
                record.project, request.base, request.workspace, request.toolkits, record.limits
            )
            calls = self._calls[kind] = _Calls(Rate(), key, record.limits, layers)
            self._layers.setdefault(kind, layers)
        calls.rate.count(self._clock.monotonic())
        self._adapt()
        self._fill_soon()

    def _adapt(self) -> None:
        now_s = self._clock.monotonic()
        sizes: dict[Kind, tuple[int, Limits]] = {}
        for kind, calls in list(self._calls.items()):
            size = size_for_rate(calls.rate.per_s(now_s), self._refill_s, self._calls_max)
            if size:
                sizes[kind] = (size, calls.limits)
            else:
                del self._calls[kind]
        self._drop(self._pools.adapt(sizes))

    async def tick(self) -> None:
        """Let time pass: tags move, calls become fewer, others need the room."""
        if self._closed:
            return
        if self._clock.monotonic() - self._resolved_at_s >= _RESOLVE_INTERVAL_S:
            await self._resolve_all()
        self._adapt()
        left, self._left = sorted(self._left), set()
        self._drop(left + self._too_many())
        self._fill()
        metrics.WARM_READY.set(self._pools.waiting)

    # --- Room ---------------------------------------------------------------------------------

    def _room_for(self, limits: Limits) -> str:
        """Return why the node has no room for one more that waits, or the empty string."""
        allocated, rules = self._state.allocated, self._state.rules
        for held, count in self._pools.limits():
            allocated = msgspec.structs.replace(
                allocated,
                cpus=allocated.cpus + count * held.cpus,
                memory_bytes=allocated.memory_bytes + count * held.memory_bytes,
                sandboxes=allocated.sandboxes + count,
            )
        available = self._memory.memory_bytes_available()
        spare = int(available - (_RESERVE_FACTOR - 1) * rules.memory_reserve_bytes)
        try:
            check_room(rules, allocated, limits, spare)
        except DsecError as error:
            return error.message
        return ""

    def _too_many(self) -> list[str]:
        """Return what has to give way to sandboxes that somebody uses."""
        rules, allocated = self._state.rules, self._state.allocated
        capacity = rules.capacity
        dropped: list[str] = []
        while self._pools.waiting:
            held = list(self._pools.limits())
            sandboxes = allocated.sandboxes + sum(count for _, count in held)
            memory = allocated.memory_bytes + sum(it.memory_bytes * n for it, n in held)
            cpus = allocated.cpus + sum(it.cpus * n for it, n in held)
            scarce = self._memory.memory_bytes_available() <= (
                _RESERVE_FACTOR * rules.memory_reserve_bytes
            )
            if (
                sandboxes <= capacity.sandboxes
                and memory <= capacity.memory_bytes
                and cpus <= capacity.cpus + 1e-6
                and not scarce
            ):
                break
            dropped += self._pools.give_way(1)
            if scarce and len(dropped) >= 1:
                break  # what it frees shows in a while
        return dropped

    # --- Filling ------------------------------------------------------------------------------

    def _fill_soon(self, delay_s: float = _QUIET_S) -> None:
        if self._refilling is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._refilling = loop.call_later(delay_s, self._fill)

    def _fill(self) -> None:
        """Make what is missing: one after the other and out of the way, or faster if few are left.

        Full pools wait for quiet; one that is half empty is filled one by one beside hand-outs; one
        that is three quarters empty as fast as it goes.
        """
        if self._refilling is not None:
            self._refilling.cancel()
            self._refilling = None
        while not self._closed and not self._state.draining:
            quiet_in_s = self._taken_at_s + _QUIET_S - self._clock.monotonic()
            left = self._pools.fullness
            if quiet_in_s > 0 and left > _HALF:
                self._fill_soon(quiet_in_s)
                return
            one_by_one = self._maker.cold or (quiet_in_s > 0 and left > _HALF / 2)
            if len(self._making) >= (1 if one_by_one else _MAKING_MAX):
                return
            kind = self._pools.begin(self._clock.monotonic())
            if kind is None:
                return
            pool = self._pools.find(kind)
            assert pool is not None  # noqa: S101  just begun
            layers = self._layers.get(kind)
            self._full = self._room_for(pool.limits) if layers else "its layers are not known"
            if self._full or layers is None:
                self._pools.not_made(kind, self._clock.monotonic(), "")
                return
            handle = new_id()
            self._making.add(handle)
            self._start(self._make(kind, handle, pool.limits, layers), f"make {handle}")

    async def _make(
        self, kind: Kind, handle: str, limits: Limits, layers: tuple[Layer, ...]
    ) -> None:
        began = time.perf_counter()
        record = SandboxRecord(
            local=handle,
            project=kind.project,
            placement_id="",
            request_id="",
            state=SandboxState.CREATING,
            created_at=0.0,
            layer_references=tuple(layer.reference for layer in layers),
            layer_digests=kind.digests,
            limits=limits,
        )
        try:
            await self._maker.make_ahead(record, layers)
        except Exception as error:  # noqa: BLE001  the pool tells of it and tries again
            self._making.discard(handle)
            told = error.message if isinstance(error, DsecError) else type(error).__name__
            _log.warning("not_made_ahead", layers=record.layer_references, error=str(error))
            self._pools.not_made(kind, self._clock.monotonic(), told)
            return
        self._making.discard(handle)
        took_s = time.perf_counter() - began
        self._refill_s += _REFILL_SMOOTHING * (took_s - self._refill_s)
        if self._closed or not self._pools.made(kind, handle):
            self._drop([handle])
        self._fill()

    # --- Handing out --------------------------------------------------------------------------

    def claim(
        self, request: CreateSandbox, record: SandboxRecord, layers: tuple[Layer, ...]
    ) -> SandboxRecord:
        """Return the record as that of a sandbox that waits, or as it is when one is to be made.

        The sandbox is nobody else's from then on: :meth:`give_back`, or the maker's ``hand_out``,
        must follow: that looks whether it lives, and takes the next one if not. Function calls are
        counted.

        Raises:
            DsecError: ``exhausted`` when it has to be a warm one and none waits.
        """
        kind = kind_of_record(record)
        if kind is None or record.warm is WarmUse.BYPASS:
            return self._without(record)
        claimed = self._claimed(record, kind)
        if request.task is not None:
            self._count_call(request, record, kind, layers)
        return claimed

    def claim_next(self, record: SandboxRecord) -> SandboxRecord:
        """Do the same after the one that was claimed has turned out to be of no use; drop that.

        Raises:
            DsecError: as :meth:`claim`.
        """
        metrics.WARM_HAND_OUTS.labels("dead").inc()
        self._drop([record.local])
        asked = msgspec.structs.replace(record, local=record.asked_as, asked_as="")
        return self._claimed(asked, _kind_required(record))

    def _claimed(self, record: SandboxRecord, kind: Kind) -> SandboxRecord:
        while (handle := self._pools.take(kind)) is not None:
            self._taken_at_s = self._clock.monotonic()
            self._fill_soon()
            if self._maker.waits(handle):
                return msgspec.structs.replace(record, local=handle, asked_as=record.local)
            self._drop([handle])
            metrics.WARM_HAND_OUTS.labels("dead").inc()
        return self._without(record)

    def _without(self, record: SandboxRecord) -> SandboxRecord:
        if record.warm is WarmUse.REQUIRE:
            raise self._none_ready()
        return record

    def give_back(self, record: SandboxRecord) -> None:
        """Have one that was claimed wait again: nothing was done with it."""
        if self._closed or not self._pools.put_back(_kind_required(record), record.local):
            self._drop([record.local])

    def handed_out(self, record: SandboxRecord) -> None:
        """Note that one that was claimed is its owner's."""
        del record
        metrics.WARM_HAND_OUTS.labels("warm").inc()

    def passed_over(self) -> None:
        """Note that a sandbox is made now for somebody who waits: what waits here may give way."""
        if self._pools.held:
            metrics.WARM_HAND_OUTS.labels("cold").inc()
            self._fill_soon()
        self._drop(self._too_many())

    async def sandbox_ending(self, local: str) -> None:
        """Forget a sandbox that has ended while it waited."""
        if self._pools.lost(local):
            self._fill_soon()

    # --- Ending -------------------------------------------------------------------------------

    def _drop(self, handles: list[str]) -> None:
        for handle in handles:
            self._dropping.add(handle)
            self._start(self._drop_one(handle), f"drop {handle}")

    async def _drop_one(self, handle: str) -> None:
        try:
            await self._maker.drop_ahead(handle)
        except DsecError as error:
            _log.warning("warm_sandbox_left", handle=handle, error=str(error))
            self._left.add(handle)  # tried again at the next tick
        else:
            self._dropping.discard(handle)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop everything that waits; on return nothing of it is left. Idempotent."""
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
            self._refilling = None
        await self.settled()
        self._drop(sorted(self._left) + self._pools.give_way(self._pools.waiting))
        await self.settled()


def _kind_required(record: SandboxRecord) -> Kind:
    kind = kind_of_record(record)
    assert kind is not None  # noqa: S101  it was claimed by its kind
    return kind
