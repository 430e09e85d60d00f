"""The broker's shell: messages become events, effects become writes and answers."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Final, assert_never

import msgspec
import structlog

from dsec_broker import metrics
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import (
    Alarm,
    Answer,
    DeleteRecord,
    ReadRecord,
    Refuse,
    Resize,
    Revoke,
    TellSegments,
    WriteRecord,
)
from dsec_broker.elastic import ProvidedNode
from dsec_broker.elastic_keeper import ElasticKeeper
from dsec_broker.errors import bad_reason, not_the_nodes
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
    ResizeAsked,
    SegmentsTold,
    StoreFailed,
    SweepDue,
    TransferAsked,
    UnlockAsked,
)
from dsec_broker.lease_events import LeaseEvents
from dsec_broker.listing import for_projects, held_bytes, leases_page, page_of
from dsec_broker.metering import key_of
from dsec_broker.record import NodeRecord
from dsec_broker.state import BrokerState
from dsec_broker.turns import Turns
from dsec_common import subjects
from dsec_common.bus import KeyValue, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.log import KafkaConfig, LogConfig, LogProducer
from dsec_common.metering import encode_segment
from dsec_common.retry import until_available
from dsec_common.service import Service
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.lease import (
    UNLOCK_REASON_MAX,
    ForceUnlock,
    GrantLease,
    LeaseList,
    LeaseRevoked,
    LeasesUnlocked,
    ListLeases,
    ReleaseLease,
    RenewLease,
    RevokeLease,
    TransferLease,
    UnlockedLease,
)
from dsec_common.wire.node import InspectNode, ListNodes, NodeHeartbeat, NodeInfo, NodeList
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES

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
        self._turns = Turns()
        self._records: KeyValue[NodeRecord]
        self._events: LeaseEvents
        self._elastic: ElasticKeeper
        self._log: LogProducer | None = None

    # --- The life cycle -----------------------------------------------------------------------

    async def open(self) -> None:
        """Open the bucket of node records, waiting for JetStream."""
        self._records = await until_available(
            f"the bucket {BUCKET}",
            lambda: self.bus.kv(BUCKET, NodeRecord, replicas=self.config.replicas),
            self.clock,
        )
        self._events = LeaseEvents(self.bus)
        await self._open_log()
        self._elastic = ElasticKeeper(
            self.config, self.bus, self.clock, cluster=self, spawn=self.spawn
        )
        await self._elastic.open()
        await self.bus.register(
            "dsec-broker", version("dsec"), "Nodes, Compute Units and leases on them"
        )

    async def _open_log(self) -> None:
        if not self.config.meters:
            log.warning("what leases hold is not metered: kafka_bootstrap is not set")
            return
        self._log = LogProducer(
            LogConfig(
                kafka=KafkaConfig(bootstrap_servers=self.config.kafka_bootstrap),
                spool_directory=str(Path(self.config.state_directory) / "log-spool"),
            ),
            f"broker-{os.getpid()}",
        )
        await self._log.start()

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
        await bus.serve(subjects.lease("transfer"), TransferLease, self._transfer, queue=QUEUE)
        await bus.serve(subjects.lease("list"), ListLeases, self._list_leases, queue=QUEUE)
        grant, release = self._grant_to_node, self._release_of_node
        await bus.serve(subjects.any_node_lease("grant"), GrantLease, grant, queue=QUEUE)
        await bus.serve(subjects.any_node_lease("release"), ReleaseLease, release, queue=QUEUE)
        await bus.serve(
            subjects.any_project("lease.force_unlock"), ForceUnlock, self._unlock, queue=QUEUE
        )
        await bus.serve(subjects.any_project("node.list"), ListNodes, self._list, queue=QUEUE)
        await bus.serve(
            subjects.any_project("node.inspect"), InspectNode, self._inspect, queue=QUEUE
        )
        self.spawn(self._sweep(), "sweep")
        self.spawn(self._elastic.run(), "balance the cluster")
        self._measure()

    async def quiesce(self) -> None:
        """Let another broker balance the cluster."""
        if hasattr(self, "_elastic"):
            await self._elastic.close()

    async def close(self) -> None:
        """Tell those who still wait; the records themselves are in the bucket."""
        if self._log is not None:
            await self._log.stop()
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
        subjects.validate_project(asked.project)
        # Sent again, it is the same lease.
        local = subjects.validate_local(asked.message_id)
        return await self._ask(
            "grant",
            lambda request_id: GrantAsked(
                request_id=request_id, asked=asked, local=local, at=self._now()
            ),
        )

    async def _grant_to_node(self, request: Request[GrantLease]) -> Message:
        """Grant slices of the asking node's own GPUs, whatever node the message names."""
        asked = msgspec.structs.replace(request.message, node=request.tokens[-2])
        return await self._grant(msgspec.structs.replace(request, message=asked))

    async def _release_of_node(self, request: Request[ReleaseLease]) -> Message:
        """Give back a lease of the asking node, and of no other."""
        lease_id = request.message.lease_id
        if ScopedId.parse(lease_id, "lease id").owner != request.tokens[-2]:
            raise not_the_nodes(lease_id, request.tokens[-2])
        return await self._release(request)

    async def _transfer(self, request: Request[TransferLease]) -> Message:
        asked = request.message
        local = subjects.validate_local(asked.message_id)
        return await self._ask(
            "transfer",
            lambda request_id: TransferAsked(
                request_id=request_id,
                lease_id=asked.lease_id,
                holder=asked.holder,
                agent=asked.agent,
                ttl_s=asked.ttl_s,
                local=local,
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

    async def _unlock(self, request: Request[ForceUnlock]) -> LeasesUnlocked:
        """End leases of the asking project: those of its own connection, never another's."""
        asked, project = request.message, subjects.project_of(request.subject)
        if len(asked.reason) > UNLOCK_REASON_MAX:
            raise bad_reason(len(asked.reason))
        if asked.lease_id:
            names = [ScopedId.parse(asked.lease_id, "lease id").owner]
        elif asked.node:
            names = [asked.node]
        else:
            names = sorted(name for name in self._core.names if name > asked.after)
        unlocked = LeasesUnlocked(cause_id=asked.message_id, reason=asked.reason)
        held, left_bytes = held_bytes(self._core.leases(self._now()), project), LISTING_PAGE_BYTES
        for node in names:
            left_bytes -= held.get(node, 0)
            if unlocked.leases and left_bytes < 0:
                return msgspec.structs.replace(unlocked, more=True)
            ended = await self._unlock_on(node, project, asked)
            unlocked = msgspec.structs.replace(unlocked, leases=unlocked.leases + ended)
        return unlocked

    async def _unlock_on(
        self, node: str, project: str, asked: ForceUnlock
    ) -> tuple[UnlockedLease, ...]:
        reply = await self._ask(
            "force_unlock",
            lambda request_id: UnlockAsked(
                request_id=request_id,
                project=project,
                node=node,
                lease_id=asked.lease_id,
                reason=asked.reason,
                at=self._now(),
            ),
        )
        if not isinstance(reply, LeasesUnlocked) or not reply.leases:
            return ()
        event = msgspec.structs.replace(reply, cause_id=asked.message_id)
        await self._events.unlocked(project, node, event)
        return reply.leases

    async def _list_leases(self, request: Request[ListLeases]) -> LeaseList:
        return leases_page(self._core.leases(self._now()), request.message)

    async def _list(self, request: Request[ListNodes]) -> NodeList:
        found = self._core.nodes(self._now())
        shown = tuple(for_projects(info) for info in found.nodes)
        return page_of(msgspec.structs.replace(found, nodes=shown), request.message)

    async def _inspect(self, request: Request[InspectNode]) -> NodeInfo:
        return for_projects(self._core.node(request.message.node, self._now()))

    async def _watch(self) -> None:
        async for entry in self._records.watch():
            if entry is None:
                self._loaded.set()
                continue
            self._turns.saw(entry.key, entry.revision, self.clock.monotonic())
            self._handle(
                RecordSeen(
                    node=entry.key, record=entry.value, revision=entry.revision, at=self._now()
                )
            )

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(self.config.sweep_interval_s)
            self._handle(SweepDue(at=self._now()))

    # --- For the elastic engine ---------------------------------------------------------------

    def ready_records(self) -> list[NodeRecord]:
        """Return the records of the nodes that take leases."""
        return list(self._core.ready_records(self._now()))

    def provided(self, provider: str) -> list[ProvidedNode]:
        """Return the living nodes of a node provider."""
        return list(self._core.provided(provider, self._now()))

    def resize(self, node: str, targets: dict[str, float], reason: str) -> None:
        """Have leases of a node get so many units."""
        self._handle(ResizeAsked(node=node, targets=targets, reason=reason, at=self._now()))

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

    def _handle(self, event: Event) -> None:  # noqa: C901  one case per kind of effect
        if isinstance(event, RecordSeen | RecordWritten | RecordRead):
            self._elastic.wake()
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
                case Revoke():
                    self.spawn(self._revoke(effect), f"revoke {effect.lease_id}")
                case Resize():
                    self.spawn(self._elastic.tell(effect), f"resize {effect.lease.lease_id}")
                case Alarm():
                    self.spawn(self._events.alarm(effect), f"alarm {effect.node}")
                case TellSegments():
                    self.spawn(self._tell(effect), f"tell of {effect.node}")
                case _:
                    assert_never(effect)

    async def _tell(self, effect: TellSegments) -> None:
        if self._log is None:
            return
        try:
            for segment in effect.segments:
                self._log.append_raw(*encode_segment(segment))
            await self._log.durable()
        except DsecError as error:
            # They stay in the record, and are told of at a later sweep.
            log.warning("the log does not take what was held", error=str(error))
            return
        keys = tuple(map(key_of, effect.segments))
        self._handle(SegmentsTold(node=effect.node, keys=keys))

    def _answer(self, effect: Answer | Refuse) -> None:
        asking = self._asking.get(effect.request_id)
        if asking is None or asking.done():
            return
        if isinstance(effect, Answer):
            asking.set_result(effect.reply)
        else:
            asking.set_exception(effect.error)

    async def _write(self, effect: WriteRecord) -> None:
        if wait_s := self._turns.begin(effect.node, self.clock.monotonic()):
            await self.clock.sleep(wait_s)
        try:
            if effect.revision:
                revision = await self._records.update(effect.node, effect.record, effect.revision)
            else:
                revision = await self._records.create(effect.node, effect.record)
        except DsecError as error:
            conflict = error.code is ErrorCode.CONFLICT
            self._turns.lost(effect.node, self.clock.monotonic(), conflict=conflict)
            if conflict:
                metrics.WRITES.labels("lost").inc()
                await self._read(effect.node)
                return
            metrics.WRITES.labels("failed").inc()
            self._store_failed(effect.node, error)
            return
        metrics.WRITES.labels("written").inc()
        self._turns.won(effect.node, revision, self.clock.monotonic())
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

    async def _revoke(self, effect: Revoke) -> None:
        message = RevokeLease(lease_id=effect.lease_id, reason=effect.reason)
        try:
            await self.bus.request(
                subjects.node_request(effect.node, "revoke"), message, LeaseRevoked
            )
        except DsecError as error:
            # The node's next heartbeat that names the lease brings it up again.
            log.warning("a node did not hear of a lease's end", node=effect.node, error=str(error))

    def _measure(self) -> None:
        """Have the gauges count when they are read."""

        def nodes() -> NodeList:
            return self._core.nodes(self._now())

        metrics.NODES.labels("true").set_function(lambda: sum(it.ready for it in nodes().nodes))
        metrics.NODES.labels("false").set_function(
            lambda: sum(not it.ready for it in nodes().nodes)
        )
        metrics.CU_TOTAL.set_function(lambda: nodes().cu_total)
        metrics.CU_ALLOCATED.set_function(lambda: nodes().cu_allocated)
