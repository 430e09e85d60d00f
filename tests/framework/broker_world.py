"""Several broker cores around one bucket, with every message between them in the test's hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dsec_broker.config import BrokerConfig
from dsec_broker.effects import (
    Alarm,
    Answer,
    DeleteRecord,
    Effect,
    ReadRecord,
    Refuse,
    Resize,
    Revoke,
    TellSegments,
    WriteRecord,
)
from dsec_broker.events import (
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
from dsec_broker.record import Lease, NodeRecord
from dsec_broker.state import BrokerState
from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError, unavailable
from dsec_common.metering import LeaseSegment
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.lease import GrantLease
from dsec_common.wire.node import Gpu, NodeHeartbeat

START_S = 1_000_000.0


def heartbeat(
    node: str = "node-1",
    *models: str,
    sent_at: float = START_S,
    lease_ids: tuple[str, ...] = (),
    draining: bool = False,
) -> NodeHeartbeat:
    """Return a heartbeat of a node with GPUs of these models: ``GPU-0``, ``GPU-1`` on node-1."""
    prefix = "GPU" if node == "node-1" else f"GPU-{node}"
    gpus = tuple(Gpu(uuid=f"{prefix}-{number}", model=model) for number, model in enumerate(models))
    return NodeHeartbeat(
        node=node,
        epoch="1",
        gpus=gpus,
        sent_at=sent_at,
        lease_ids=lease_ids,
        draining=draining,
    )


@dataclass
class Bucket:
    """A bucket with compare-and-swap, as JetStream keeps it.

    Attributes:
        granted: what each lease that was ever written got first, by its id and token.
    """

    records: dict[str, tuple[NodeRecord, int]] = field(default_factory=dict)
    granted: dict[tuple[str, int], tuple[Slice, ...]] = field(default_factory=dict)
    revision: int = 0

    def write(self, node: str, record: NodeRecord, expected: int) -> bool:
        """Set the record if ``expected`` is its last revision; return whether it was."""
        if self.records.get(node, (None, 0))[1] != expected:
            return False
        self.revision += 1
        self.records[node] = (record, self.revision)
        for lease in record.leases:
            self.granted.setdefault((lease.lease_id, lease.token), lease.slices)
        return True

    def read(self, node: str) -> tuple[NodeRecord | None, int]:
        """Return the record and its revision; None and 0 when nothing is there."""
        return self.records.get(node, (None, 0))


class Broker:
    """One core.

    Its reads and writes wait in ``store`` until the test lets them happen at the bucket, and what
    that says waits in ``words``.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.core = BrokerState(world.config)
        self.store: list[WriteRecord | ReadRecord] = []
        self.words: list[Callable[[Moment], Event]] = []
        self.answers: dict[int, Message] = {}
        self.refusals: dict[int, DsecError] = {}
        self.revoked: list[Revoke] = []
        self.alarms: list[Alarm] = []
        self.ahead_s = 0.0
        self.resized: list[Lease] = []
        self.log_refuses = False

    @property
    def at(self) -> Moment:
        """Now, by this broker's clocks."""
        return Moment(self.world.now + self.ahead_s, self.world.now - START_S)

    def handle(self, event: Event) -> None:
        """Feed one event and check the core's invariants."""
        effects = self.core.handle(event)
        self.core.validate_state()
        for effect in effects:
            self._take(effect)

    def _take(self, effect: Effect) -> None:  # noqa: C901  one case per kind of effect
        match effect:
            case Answer():
                self.answers[effect.request_id] = effect.reply
            case Refuse():
                self.refusals[effect.request_id] = effect.error
            case DeleteRecord():
                if self.world.bucket.read(effect.node)[1] == effect.revision:
                    del self.world.bucket.records[effect.node]
            case Revoke():
                self.revoked.append(effect)
            case Alarm():
                self.alarms.append(effect)
            case Resize():
                self.resized.append(effect.lease)
            case TellSegments():
                if not self.log_refuses:
                    self.world.told += effect.segments
                    keys = tuple((it.lease_id, it.number) for it in effect.segments)
                    self.handle(SegmentsTold(node=effect.node, keys=keys))
            case WriteRecord() | ReadRecord():
                self.store.append(effect)

    def grant(
        self, cu: float, *, node: str = "", ttl_s: float = 100.0, project: str = "default"
    ) -> int:
        """Ask for units; return the request's id."""
        return self.ask(GrantLease(project=project, holder="", cu=cu, node=node, ttl_s=ttl_s))

    def ask(self, asked: GrantLease) -> int:
        """Ask for what a message says; return the request's id."""
        request_id = self.world.next_id()
        asked = msgspec.structs.replace(asked, holder=asked.holder or f"holder-{request_id}")
        self.handle(
            GrantAsked(request_id=request_id, asked=asked, local=asked.message_id, at=self.at)
        )
        return request_id

    def transfer(
        self, lease_id: str, holder: str = "another", local: str = "", agent: str = ""
    ) -> int:
        """Hand a lease to another holder; return the request's id."""
        request_id = self.world.next_id()
        self.handle(
            TransferAsked(
                request_id=request_id,
                lease_id=lease_id,
                holder=holder,
                agent=agent,
                ttl_s=100.0,
                local=local or f"moved-{request_id}",
                at=self.at,
            )
        )
        return request_id

    def unlock(
        self,
        node: str = "node-1",
        lease_id: str = "",
        project: str = "default",
        reason: str = "stuck",
    ) -> int:
        """End leases by force; return the request's id."""
        request_id = self.world.next_id()
        self.handle(
            UnlockAsked(
                request_id=request_id,
                project=project,
                node=node,
                lease_id=lease_id,
                reason=reason,
                at=self.at,
            )
        )
        return request_id

    def resize(self, targets: dict[str, float], node: str = "node-1") -> None:
        """Have leases get so many units."""
        self.handle(ResizeAsked(node=node, targets=targets, reason="full", at=self.at))

    def renew(self, lease_id: str, ttl_s: float = 100.0) -> int:
        """Ask for a lease to live on; return the request's id."""
        request_id = self.world.next_id()
        self.handle(RenewAsked(request_id=request_id, lease_id=lease_id, ttl_s=ttl_s, at=self.at))
        return request_id

    def release(self, lease_id: str) -> int:
        """Give a lease back; return the request's id."""
        request_id = self.world.next_id()
        self.handle(ReleaseAsked(request_id=request_id, lease_id=lease_id, at=self.at))
        return request_id

    def see(self, beat: NodeHeartbeat) -> None:
        """Receive a heartbeat."""
        self.handle(HeartbeatSeen(heartbeat=beat, at=self.at))

    def sweep(self) -> None:
        """Let the sweep fall due."""
        self.handle(SweepDue(at=self.at))

    def watch(self, node: str) -> None:
        """Let the bucket's watch tell of the node's record."""
        record, revision = self.world.bucket.read(node)
        if revision:
            self.handle(RecordSeen(node=node, record=record, revision=revision, at=self.at))

    def store_step(self, *, fail: bool = False) -> None:
        """Let the oldest read or write happen; with ``fail`` its acknowledgement is lost."""
        self.serve(fail=fail)
        self.hear()

    def serve(self, *, fail: bool = False) -> None:
        """Let the oldest read or write happen at the bucket; its word is still on its way."""
        effect = self.store.pop(0)
        node, bucket = effect.node, self.world.bucket
        if isinstance(effect, WriteRecord) and bucket.write(node, effect.record, effect.revision):
            revision = bucket.read(node)[1]
            if fail:
                lost = unavailable("lost")
                self.words.append(lambda at: StoreFailed(node=node, error=lost, at=at))
            else:
                self.words.append(lambda at: RecordWritten(node=node, revision=revision, at=at))
            return
        record, revision = bucket.read(node)
        self.words.append(lambda at: RecordRead(node=node, record=record, revision=revision, at=at))

    def hear(self) -> None:
        """Let the oldest word of the bucket arrive."""
        self.handle(self.words.pop(0)(self.at))

    def settle(self) -> None:
        """Let reads and writes happen until none is left."""
        while self.words or self.store:
            if self.words:
                self.hear()
            else:
                self.serve()


class World:
    """A bucket, a clock and some brokers."""

    def __init__(self, brokers: int = 1, config: BrokerConfig | None = None) -> None:
        self.config = config or BrokerConfig(clock_skew_s=0.0)
        self.bucket = Bucket()
        self.now = START_S
        self.told: list[LeaseSegment] = []
        self._ids = 0
        self.brokers = [Broker(self) for _ in range(brokers)]

    @property
    def at(self) -> Moment:
        """Now, on both clocks."""
        return Moment(self.now, self.now - START_S)

    def next_id(self) -> int:
        """Return a fresh request id."""
        self._ids += 1
        return self._ids

    def restart(self, number: int) -> Broker:
        """Replace a broker by a fresh one that has loaded the bucket."""
        fresh = self.brokers[number] = Broker(self)
        for node in list(self.bucket.records):
            fresh.watch(node)
        return fresh

    def see(self, beat: NodeHeartbeat) -> None:
        """Have every broker receive a heartbeat and settle."""
        for broker in self.brokers:
            broker.see(beat)
            broker.settle()

    def record(self, node: str = "node-1") -> NodeRecord:
        """Return what the bucket holds."""
        record, _ = self.bucket.read(node)
        assert record is not None
        return record

    def lease(self, lease_id: str) -> Lease:
        """Return the lease as the bucket holds it."""
        record = self.record(ScopedId.parse(lease_id).owner)
        return next(lease for lease in record.leases if lease.lease_id == lease_id)

    def lose_bucket(self) -> None:
        """Forget everything, as a server without a memory does."""
        self.bucket.records.clear()


def as_json(message: Message) -> dict[str, object]:
    """Return the message's fields, for comparing in tests."""
    fields: dict[str, object] = msgspec.to_builtins(message)
    return fields
