"""The pools that projects want: kept in a bucket, told to the nodes again and again.

A node is told all that it is to hold, so whatever it missed, or lost with a restart, the next word
puts right. A scheduler says nothing before it has read the whole bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, KeyValue
from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.node import NodeHeartbeat
from dsec_common.wire.pool import (
    POOL_SIZE_MAX,
    ListPools,
    NodePool,
    NodePools,
    NodePoolState,
    PoolInfo,
    PoolList,
    PoolOnNode,
    PoolRemoved,
    PoolSpec,
    RemovePool,
    SetNodePools,
    SetPool,
)
from dsec_common.wire.sandbox import CreateSandbox
from dsec_scheduler import admission
from dsec_scheduler.errors import bad_field
from dsec_scheduler.warm_nodes import spread

_log: Final = structlog.get_logger(__name__)

BUCKET: Final = "dsec-pools"

POOLS_MAX: Final = 256
"""Pools of one project."""

_PUSH_INTERVAL_S: Final = 2.0
_TELL_AGAIN_S: Final = 10.0
_IDLE_INTERVAL_S: Final = 30.0
_READ_ANEW_S: Final = 300.0
_NODE_TIMEOUT_S: Final = 2.0


class _Told(NamedTuple):
    """What a node was told, in which of its lives and when, and what it answered."""

    pools: tuple[NodePool, ...]
    answer: NodePools
    epoch: str
    at_s: float

    def is_fresh(self, pools: tuple[NodePool, ...], beat: NodeHeartbeat, now_s: float) -> bool:
        """Return whether the node, in this life, was told just that a moment ago."""
        same = self.pools == pools and self.epoch == beat.epoch
        return same and now_s - self.at_s < _TELL_AGAIN_S


class PoolDoor:
    """Takes, keeps and spreads pools."""

    def __init__(
        self,
        bus: Bus,
        bucket: KeyValue[PoolSpec],
        open_nodes: Callable[[], list[NodeHeartbeat]],
        clock: Clock,
    ) -> None:
        """Take the parts.

        Args:
            bus: to the nodes.
            bucket: where pools are kept.
            open_nodes: the last heartbeats of those that take sandboxes.
            clock: for pauses.
        """
        self._bus = bus
        self._bucket = bucket
        self._open_nodes = open_nodes
        self._clock = clock
        self._specs: dict[str, PoolSpec] = {}
        self._told: dict[str, _Told] = {}
        self._pushing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._known = asyncio.Event()

    # --- The bucket ---------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep up with what any scheduler writes, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_READ_ANEW_S):
                    await self._follow_once()
            except TimeoutError:
                continue  # what vanished while the connection was away is not told
            except DsecError as error:
                _log.info("pools_not_read", error=str(error))
                await self._clock.sleep(_PUSH_INTERVAL_S)

    async def _follow_once(self) -> None:
        present: dict[str, PoolSpec] | None = {}
        async with contextlib.aclosing(self._bucket.watch()) as entries:
            async for entry in entries:
                if entry is None:
                    self._specs, present = self._specs if present is None else present, None
                    self._known.set()
                    self._changed.set()
                    continue
                self._changed.set()
                specs = self._specs if present is None else present
                if entry.value is None:
                    specs.pop(entry.key, None)
                else:
                    specs[entry.key] = entry.value

    # --- The nodes ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell the nodes, again and again, until cancelled; seldom while there are no pools."""
        await self._known.wait()
        while True:
            self._changed.clear()
            await self.push()
            busy = self._specs or any(told.pools for told in self._told.values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PUSH_INTERVAL_S if busy else _IDLE_INTERVAL_S):
                    await self._changed.wait()

    async def push(self, *, again: bool = False) -> None:
        """Tell each node what it is to hold, and remember what it answers.

        Args:
            again: also those that were told the same a moment ago.
        """
        async with self._pushing:
            nodes = {beat.node: beat for beat in self._open_nodes()}
            for gone in self._told.keys() - nodes.keys():
                del self._told[gone]
            shares = {key: spread(key, spec.size, list(nodes)) for key, spec in self._specs.items()}
            await asyncio.gather(*(self._tell(beat, shares, again) for beat in nodes.values()))

    async def _tell(
        self, beat: NodeHeartbeat, shares: dict[str, dict[str, int]], again: bool
    ) -> None:
        node = beat.node
        pools = tuple(
            NodePool(
                key=spec.key,
                project=spec.project,
                base=spec.base,
                workspace=spec.workspace,
                toolkits=spec.toolkits,
                limits=spec.limits,
                wanted=shares[key][node],
            )
            for key, spec in sorted(self._specs.items())
            if shares.get(key, {}).get(node)
        )
        told = self._told.get(node)
        if not pools and not beat.warm and (told is None or not told.pools):
            return
        now_s = self._clock.monotonic()
        if told is not None and not again and told.is_fresh(pools, beat, now_s):
            return
        try:
            answer = await self._bus.request(
                subjects.node_request(node, "pools"),
                SetNodePools(pools=pools),
                NodePools,
                timeout_s=_NODE_TIMEOUT_S,
            )
        except DsecError as error:
            _log.info("a node was not told its pools", node=node, error=str(error))
            self._told.pop(node, None)
            return
        self._told[node] = _Told(pools, answer, beat.epoch, now_s)

    # --- Requests -----------------------------------------------------------------------------

    async def set(self, asked: Request[SetPool]) -> PoolInfo:
        """Keep a pool and have the nodes told.

        Raises:
            DsecError: ``invalid``; ``exhausted`` for too many pools.
        """
        request, project = asked.message, asked.project
        if not 1 <= request.size <= POOL_SIZE_MAX:
            raise bad_field(
                "size", request.size, f"from 1 to {POOL_SIZE_MAX}; to have none, remove"
            )
        if request.limits.cu:
            raise bad_field("limits.cu", request.limits.cu, "sandboxes that wait have no GPU")
        sandbox = CreateSandbox(
            base=request.base,
            workspace=request.workspace,
            toolkits=request.toolkits,
            limits=request.limits,
        )
        admission.check(sandbox, sandbox.timeout_s)
        spec = PoolSpec(
            cause_id=request.message_id,
            project=project,
            base=request.base,
            workspace=request.workspace,
            toolkits=request.toolkits,
            size=request.size,
            limits=request.limits,
        )
        name = f"{project}.{spec.key}"
        await self._known.wait()
        if name not in self._specs and len(self._of(project)) >= POOLS_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"a project has at most {POOLS_MAX} pools: remove one first",
                retryable=False,
            )
        await self._bucket.put(name, spec)
        self._specs[name] = spec
        await self.push()
        return self._info(spec)

    async def list_pools(self, asked: Request[ListPools]) -> PoolList:
        """Return the project's pools, and what there is of each now."""
        await self._known.wait()
        await self.push(again=True)
        found = [self._info(spec) for spec in self._of(asked.project)]
        found.sort(key=lambda info: (info.base, info.workspace, info.toolkits, info.key))
        return PoolList(cause_id=asked.message.message_id, pools=tuple(found))

    async def remove(self, asked: Request[RemovePool]) -> PoolRemoved:
        """Forget a pool and have the nodes drop what waits.

        Raises:
            DsecError: ``not_found``.
        """
        key = asked.message.key
        name = f"{asked.project}.{key}"
        await self._known.wait()
        if name not in self._specs:
            raise not_found(
                f"this project has no pool {key[:40]!r}; `dsec pool list` shows which there are",
                what="pool",
            )
        await self._bucket.delete(name)
        self._specs.pop(name, None)
        await self.push()
        return PoolRemoved(cause_id=asked.message.message_id, key=key)

    def _of(self, project: str) -> Sequence[PoolSpec]:
        return [spec for spec in self._specs.values() if spec.project == project]

    def _info(self, spec: PoolSpec) -> PoolInfo:
        nodes: list[PoolOnNode] = []
        for node, told in sorted(self._told.items()):
            wanted = next((pool.wanted for pool in told.pools if pool.key == spec.key), 0)
            state = next(
                (it for it in told.answer.pools if it.key == spec.key), NodePoolState(key="")
            )
            if wanted:
                nodes.append(
                    PoolOnNode(node=node, wanted=wanted, ready=state.ready, note=state.note)
                )
        return PoolInfo(
            key=spec.key,
            base=spec.base,
            workspace=spec.workspace,
            toolkits=spec.toolkits,
            size=spec.size,
            limits=spec.limits,
            ready=sum(node.ready for node in nodes),
            nodes=tuple(nodes),
        )
