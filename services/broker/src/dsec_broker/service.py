"""The broker's shell: messages become events, effects become writes and answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from importlib.metadata import version
from typing import ClassVar, Final, assert_never

import msgspec
import structlog

from dsec_broker import metrics
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import Answer, DeleteRecord, ReadRecord, Refuse, WriteRecord
from dsec_broker.events import (
    Ask,
    Event,
    GrantAsked,
    HeartbeatSeen,
    Moment,
    RecordRead,
    RecordSeen,
    RecordWritten,
    ReleaseAsked,
    RenewAsked,
    StoreFailed,
    SweepDue,
)
from dsec_broker.record import NodeRecord
from dsec_broker.state import BrokerState
from dsec_common import subjects
from dsec_common.bus import KeyValue, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.retry import until_available
from dsec_common.service import Service
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.lease import GrantLease, ReleaseLease, RenewLease
from dsec_common.wire.node import InspectNode, ListNodes, NodeHeartbeat, NodeInfo, NodeList

log = structlog.get_logger()

BUCKET: Final = "dsec-nodes"
QUEUE: Final = "broker"


class BrokerService(Service[BrokerConfig]):
    """Any number of these share one bucket of node records; each may answer any request."""

    name: ClassVar[str] = "broker"

    def __init__(self, config: BrokerConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self._core = BrokerState(config)
        self._ids = itertools.count(1)
        self._asking: dict[int, asyncio.Future[Message]] = {}
        self._loaded = asyncio.Event()
        self._records: KeyValue[NodeRecord]

    # --- The life cycle -----------------------------------------------------------------------

    async def open(self) -> None:
        """Open the bucket of node records, waiting for JetStream."""
        self._records = await until_available(
            f"the bucket {BUCKET}",
            lambda: self.bus.kv(BUCKET, NodeRecord, replicas=self.config.replicas),
            self.clock,
        )
        await self.bus.register(
            "dsec-broker", version("dsec"), "Nodes, Compute Units and leases on them"
        )

    async def recover(self) -> None:
        """Load every record, so that no lease of an earlier life is granted again."""
        self.spawn(self._watch(), "watch node records")
        await self._loaded.wait()

    async def subscribe(self) -> None:
        """Take heartbeats (each broker all of them) and requests (each broker its share)."""
        bus = self.bus
        await bus.subscribe(subjects.HEARTBEATS, NodeHeartbeat, self._on_heartbeat)
        await bus.serve(subjects.lease("grant"), GrantLease, self._grant, queue=QUEUE)
        await bus.serve(subjects.lease("renew"), RenewLease, self._renew, queue=QUEUE)
        await bus.serve(subjects.lease("release"), ReleaseLease, self._release, queue=QUEUE)
        await bus.serve(subjects.any_project("node.list"), ListNodes, self._list, queue=QUEUE)
        await bus.serve(
            subjects.any_project("node.inspect"), InspectNode, self._inspect, queue=QUEUE
        )
        self.spawn(self._sweep(), "sweep")

    async def close(self) -> None:
        """Tell those who still wait; the records themselves are in the bucket."""
        for asking in self._asking.values():
            if not asking.done():
                asking.set_exception(unavailable("the broker is stopping; ask again"))

    # --- What comes in ------------------------------------------------------------------------

    async def _on_heartbeat(self, request: Request[NodeHeartbeat]) -> None:
        heartbeat = request.message
        if request.tokens[-1] != heartbeat.node:
            log.warning("dropped a heartbeat that names another node", subject=request.subject)
            return
        self._handle(HeartbeatSeen(heartbeat=heartbeat, at=self._now()))

    async def _grant(self, request: Request[GrantLease]) -> Message:
        asked = request.message
        project = subjects.validate_project(asked.project)
        return await self._ask(
            "grant",
            lambda request_id: GrantAsked(
                request_id=request_id,
                project=project,
                holder=asked.holder,
                cu=asked.cu,
                node=asked.node,
                ttl_s=asked.ttl_s,
                local=new_id(),
                at=self._now(),
            ),
        )

    async def _renew(self, request: Request[RenewLease]) -> Message:
        asked = request.message
        return await self._ask(
            "renew",
            lambda request_id: RenewAsked(
                request_id=request_id, lease_id=asked.lease_id, ttl_s=asked.ttl_s, at=self._now()
            ),
        )

    async def _release(self, request: Request[ReleaseLease]) -> Message:
        lease_id = request.message.lease_id
        return await self._ask(
            "release",
            lambda request_id: ReleaseAsked(
                request_id=request_id, lease_id=lease_id, at=self._now()
            ),
        )

    async def _list(self, _: Request[ListNodes]) -> NodeList:
        found = self._core.nodes(self._now())
        return msgspec.structs.replace(
            found, nodes=tuple(_for_projects(info) for info in found.nodes)
        )

    async def _inspect(self, request: Request[InspectNode]) -> NodeInfo:
        return _for_projects(self._core.node(request.message.node, self._now()))

    async def _watch(self) -> None:
        async for entry in self._records.watch():
            if entry is None:
                self._loaded.set()
                continue
            self._handle(
                RecordSeen(
                    node=entry.key, record=entry.value, revision=entry.revision, at=self._now()
                )
            )

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(self.config.sweep_interval_s)
            self._handle(SweepDue(at=self._now()))
            self._measure()

    # --- Through the core ---------------------------------------------------------------------

    def _now(self) -> Moment:
        return Moment(self.clock.now(), self.clock.monotonic())

    async def _ask(self, verb: str, event_of: Callable[[int], Ask]) -> Message:
        request_id = next(self._ids)
        asking: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asking[request_id] = asking
        outcome = "ok"
        try:
            self._handle(event_of(request_id))
            return await asking
        except DsecError as error:
            outcome = str(error.code)
            raise
        finally:
            del self._asking[request_id]
            metrics.REQUESTS.labels(verb, outcome).inc()

    def _handle(self, event: Event) -> None:
        for effect in self._core.handle(event):
            match effect:
                case Answer() | Refuse():
                    self._answer(effect)
                case WriteRecord():
                    self.spawn(self._write(effect), f"write {effect.node}")
                case ReadRecord():
                    self.spawn(self._read(effect.node), f"read {effect.node}")
                case DeleteRecord():
                    self.spawn(self._forget(effect), f"forget {effect.node}")
                case _:
                    assert_never(effect)

    def _answer(self, effect: Answer | Refuse) -> None:
        asking = self._asking.get(effect.request_id)
        if asking is None or asking.done():
            return
        if isinstance(effect, Answer):
            asking.set_result(effect.reply)
        else:
            asking.set_exception(effect.error)

    async def _write(self, effect: WriteRecord) -> None:
        try:
            if effect.revision:
                revision = await self._records.update(effect.node, effect.record, effect.revision)
            else:
                revision = await self._records.create(effect.node, effect.record)
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT:
                metrics.WRITES.labels("lost").inc()
                await self._read(effect.node)
                return
            metrics.WRITES.labels("failed").inc()
            self._store_failed(effect.node, error)
            return
        metrics.WRITES.labels("written").inc()
        self._handle(RecordWritten(node=effect.node, revision=revision, at=self._now()))

    async def _read(self, node: str) -> None:
        try:
            entry = await self._records.get(node)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                self._store_failed(node, error)
                return
            self._handle(RecordRead(node=node, record=None, revision=0, at=self._now()))
            return
        self._handle(
            RecordRead(node=node, record=entry.value, revision=entry.revision, at=self._now())
        )

    def _store_failed(self, node: str, error: DsecError) -> None:
        log.warning("the bucket of node records failed", node=node, error=str(error))
        told = unavailable(f"the record of node {node} cannot be kept now: {error.message}")
        self._handle(StoreFailed(node=node, error=told, at=self._now()))

    async def _forget(self, effect: DeleteRecord) -> None:
        try:
            await self._records.delete(effect.node, revision=effect.revision)
        except DsecError as error:
            log.info("another broker changed a node first", node=effect.node, error=str(error))
            return
        log.info("forgot a silent node", node=effect.node)

    def _measure(self) -> None:
        found = self._core.nodes(self._now())
        ready = sum(info.ready for info in found.nodes)
        metrics.NODES.labels("true").set(ready)
        metrics.NODES.labels("false").set(len(found.nodes) - ready)
        metrics.CU_TOTAL.set(found.cu_total)
        metrics.CU_ALLOCATED.set(found.cu_allocated)


def _for_projects(info: NodeInfo) -> NodeInfo:
    """Return what a project may see of a node: not which leases others hold there."""
    heartbeat = msgspec.structs.replace(info.heartbeat, lease_ids=())
    return msgspec.structs.replace(info, heartbeat=heartbeat)
