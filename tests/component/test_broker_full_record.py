"""A node with as many leases as its record holds, on a real NATS server with its own bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request, until
from dsec_broker.record import NodeRecord
from dsec_broker.room import GRANT_BYTES_MAX, RECORD_BYTES_MAX, bytes_of_lease
from dsec_broker.service import BUCKET, BrokerService
from dsec_common import subjects
from dsec_common.bus import Bus, KeyValue, Request
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.streams import EVENTS
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.base import CONTENT_TYPE_HEADER, JSON, MSGPACK, decode, encode, new_id
from dsec_common.wire.lease import (
    HOLDER_CHARACTERS_MAX,
    UNLOCK_REASON_MAX,
    ForceUnlock,
    GrantLease,
    LeaseGranted,
    LeaseList,
    LeaseReleased,
    LeaseRenewed,
    LeasesUnlocked,
    ListLeases,
    ReleaseLease,
    RenewLease,
    TransferLease,
)
from dsec_common.wire.node import Gpu, InspectNode, NodeInfo
from dsec_common.wire.sandbox import SandboxCreated

CARDS = 32
#: More than the record holds, fewer than the cards have room for: 2 % of an L40 are 1.3 units.
ASKED = 50 * CARDS
#: What docs/services/broker.md tells.
LEASE_BYTES, COUNTED_BYTES, SLICE_BYTES, LEASES = 480, 545, 106, 1_400


def gpus(count: int, model: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"GPU-8f4b2c6e-{at:04}-4c1d-9a7e", model=model, memory_bytes=48 << 30)
        for at in range(count)
    )


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        yield plane


class Cluster:
    """A node whose record is full, and whatever else a test starts."""

    def __init__(
        self,
        node: NodePeer,
        broker: BrokerService,
        bus: Bus,
        records: KeyValue[NodeRecord],
    ) -> None:
        self.node = node
        self.broker = broker
        self.bus = bus
        self.records = records
        self.leases: list[LeaseGranted] = []
        self.refusals: list[DsecError] = []

    async def grant(self, node: str = "node-0") -> LeaseGranted:
        asked = GrantLease(project="default", holder=new_id(), agent="coder", cu=1.0, node=node)
        return await self.bus.request(subjects.lease("grant"), asked, LeaseGranted, timeout_s=20)

    async def fill(self) -> None:
        async def one() -> None:
            try:
                self.leases.append(await self.grant())
            except DsecError as error:
                self.refusals.append(error)

        for _ in range(0, ASKED, 100):
            await asyncio.gather(*(one() for _ in range(100)))

    async def record(self) -> NodeRecord:
        found = (await self.records.get("node-0")).value
        assert found is not None
        assert len(msgspec.msgpack.encode(found)) <= RECORD_BYTES_MAX
        return found


async def full(plane: ControlPlane, **changes: object) -> Cluster:
    node = await plane.node("node-0", gpus=gpus(CARDS, "NVIDIA L40"))
    broker = await plane.broker(**changes)
    bus = await plane._stack.enter_async_context(plane.nats.service("scheduler"))
    await bus.ensure_stream(EVENTS)
    await until(lambda: broker._core.names == ["node-0"])
    brokers_bus = await plane._stack.enter_async_context(plane.nats.service("broker"))
    cluster = Cluster(node, broker, bus, await brokers_bus.kv(BUCKET, NodeRecord))
    await cluster.fill()
    return cluster


async def test_what_a_record_cannot_hold_is_refused_and_goes_to_another_node(
    plane: ControlPlane,
) -> None:
    cluster = await full(plane)
    assert len(cluster.leases) >= LEASES
    assert {error.code for error in cluster.refusals} == {ErrorCode.EXHAUSTED}
    error = cluster.refusals[0]
    assert error.retryable
    assert error.details["record_bytes_max"] == GRANT_BYTES_MAX
    for word in ("node node-0 keeps no more", str(GRANT_BYTES_MAX), "let some end"):
        assert word in error.message
    with pytest.raises(DsecError, match="of 1 nodes 1 hold so many leases"):
        await cluster.grant("")
    # Units are free on the first node, and cheaper.
    other = await plane.node("node-1", gpus=gpus(2, "NVIDIA A100"))
    await until(lambda: cluster.broker._core.names == ["node-0", "node-1"])
    assert {(await cluster.grant("")).node for _ in range(3)} == {"node-1"}
    await plane.scheduler(realtime_share=0.0)
    user = await plane.project()
    asked = request(gpu=GpuDemand(min_cu=1.0, max_cu=1.0))
    created = await user.request(
        subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=10
    )
    assert created.node == "node-1"
    listed = await cluster.bus.request(subjects.lease("list"), ListLeases(), LeaseList)
    assert listed.nodes[0].full
    seen = await user.request(
        subjects.node("default", "inspect"), InspectNode(node="node-0"), NodeInfo
    )
    assert "its record holds no more of them" in seen.notes[-1]
    assert not other.sandboxes.keys() - {created.sandbox_id.partition(".")[2]}


async def test_leases_live_on_move_and_end_on_a_node_whose_record_is_full(
    plane: ControlPlane,
) -> None:
    cluster = await full(plane)
    bus, leases = cluster.bus, cluster.leases
    record = await cluster.record()
    assert max(len(msgspec.msgpack.encode(it)) for it in record.leases) <= LEASE_BYTES
    (slice_,) = record.leases[0].slices
    assert len(msgspec.msgpack.encode(slice_)) <= SLICE_BYTES
    assert max(map(bytes_of_lease, record.leases)) <= COUNTED_BYTES
    # Heartbeats name all of them.
    cluster.node.lease_ids = tuple(lease.lease_id for lease in leases)
    async with asyncio.timeout(20):
        while not all(it.confirmed_at for it in (await cluster.record()).leases):
            await asyncio.sleep(0.05)
    # New of the node itself.
    cluster.node.labels = {"rack": "r" * 2000}
    async with asyncio.timeout(20):
        while (await cluster.record()).heartbeat.labels != cluster.node.labels:
            await asyncio.sleep(0.05)
    renewals = (
        bus.request(
            subjects.lease("renew"),
            RenewLease(lease_id=lease.lease_id, ttl_s=7200.0),
            LeaseRenewed,
            timeout_s=20,
        )
        for lease in leases[:200]
    )
    assert len(await asyncio.gather(*renewals)) == 200
    await cluster.node.stop_beating()
    # Without a heartbeat what is left of the old ones stays.
    moves = (
        bus.request(
            subjects.lease("transfer"),
            TransferLease(lease_id=lease.lease_id, holder="h" * HOLDER_CHARACTERS_MAX),
            LeaseGranted,
            timeout_s=20,
        )
        for lease in leases[:200]
    )
    moved = await asyncio.gather(*moves)
    record = await cluster.record()
    assert {it.lease_id for it in moved} <= {it.lease_id for it in record.leases}
    assert len(record.revoked) == 200
    for lease in (*moved[:2], *leases[200:202]):
        asked = ReleaseLease(lease_id=lease.lease_id)
        await bus.request(subjects.lease("release"), asked, LeaseReleased)
    assert len((await cluster.record()).leases) == len(leases) - 4


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_force_ends_all_leases_of_a_node_whose_record_is_full(
    plane: ControlPlane, content_type: str
) -> None:
    cluster = await full(plane)
    heard: list[LeasesUnlocked] = []

    async def on_event(event: Request[LeasesUnlocked]) -> None:
        heard.append(event.message)

    filter_subject = subjects.lease_event("default", "node-0", "unlocked")
    await cluster.bus.consume(
        EVENTS.name, "test", LeasesUnlocked, on_event, filter_subject=filter_subject
    )
    cluster.node.lease_ids = tuple(lease.lease_id for lease in cluster.leases)
    async with asyncio.timeout(20):
        while not all(it.confirmed_at for it in (await cluster.record()).leases):
            await asyncio.sleep(0.05)
    await cluster.node.stop_beating()
    user = await plane.project()
    asked = ForceUnlock(node="node-0", reason="漢" * UNLOCK_REASON_MAX)
    subject = subjects.force_unlock("default")
    headers = {CONTENT_TYPE_HEADER: content_type}
    reply = await user._inbox.request(subject, encode(asked, content_type), headers, 20.0)
    ended = decode(reply.data, LeasesUnlocked, content_type)
    assert {it.lease_id for it in ended.leases} == {it.lease_id for it in cluster.leases}
    await until(lambda: bool(heard))
    assert (len(heard[0].leases), heard[0].reason) == (len(ended.leases), asked.reason)
    record = await cluster.record()
    assert not record.leases
    assert len(record.revoked) == len(ended.leases)
    assert all(it.reason.startswith("its lease was unlocked by force") for it in record.revoked)
    cluster.node.lease_ids = ()
    await cluster.node.beat()
    await until(lambda: not cluster.broker._core._nodes["node-0"].record.revoked)  # type: ignore[union-attr]
    await cluster.node.beat()
    assert (await cluster.grant()).node == "node-0"


async def test_what_is_held_is_metered_on_a_node_whose_record_is_full(
    plane: ControlPlane, tmp_path: Path
) -> None:
    # What is told goes into the spool of the broker's log: Kafka need not be there for it.
    cluster = await full(
        plane,
        kafka_bootstrap="127.0.0.1:1",
        state_directory=str(tmp_path),
        metering_interval_s=2.0,
        sweep_interval_s=0.1,
    )
    async with asyncio.timeout(20):
        while not all(it.segments for it in (await cluster.record()).leases):
            await asyncio.sleep(0.1)
    user = await plane.project()
    ended = await user.request(
        subjects.force_unlock("default"), ForceUnlock(node="node-0"), LeasesUnlocked, timeout_s=20
    )
    assert len(ended.leases) == len(cluster.leases)
    assert not (await cluster.record()).leases
    assert (await cluster.grant()).node == "node-0"
