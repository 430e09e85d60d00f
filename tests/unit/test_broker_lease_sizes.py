"""A lease is counted by the most that it, and what is left of it, can ever take."""

from __future__ import annotations

import msgspec
import pytest

from broker_world import START_S, heartbeat
from dsec_broker.record import Lease, NodeRecord, Revoked
from dsec_broker.room import SHORT_REASON, bytes_of, bytes_of_lease, largest_lease_bytes
from dsec_common.compute.model import (
    MODEL_CHARACTERS_MAX,
    MODELS_MAX,
    Card,
    GpuDemand,
    Slice,
)
from dsec_common.metering import LeaseSegment
from dsec_common.wire.lease import (
    HOLDER_CHARACTERS_MAX,
)
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX

A100 = "NVIDIA A100-SXM4-40GB"

NODE = "node-1"
CARDS = 4


def lease_of(**changes: object) -> Lease:
    lease = Lease(
        lease_id="node-1.a",
        project="p",
        holder="",
        demand=GpuDemand(min_cu=1.0, max_cu=1.0),
        slices=(Slice(card="G"),),
        granted_at=START_S,
        expires_at=START_S,
        token=1,
    )
    return msgspec.structs.replace(lease, **changes)


@pytest.mark.parametrize("length", [1, 30, 31, 32, 63])
def test_what_is_left_of_a_lease_is_no_larger_than_it_was_counted(length: int) -> None:
    node, local = "n" * length, "l" * length
    lease = lease_of(lease_id=f"{node}.{local}", project="p" * length, agent="é" * length)
    left = Revoked(lease_id=lease.lease_id, confirmed_at=1.5, reason=SHORT_REASON, expires_at=1.5)
    segment = LeaseSegment(
        project=lease.project,
        agent=lease.agent,
        node=node,
        number=1 << 31,
        from_ms=1 << 60,
        to_ms=1 << 60,
        last=True,
        lease_id=lease.lease_id,
        cu_micro=1 << 60,
        cost_micro_per_hour=1 << 60,
    )
    assert bytes_of(left) + bytes_of(segment) <= bytes_of_lease(lease)
    later = msgspec.structs.replace(
        lease,
        confirmed_at=1.5,
        expires_at=1e300,
        resizes=1 << 30,
        resize_reason="100% of all Compute Units were handed out",
        segments=1 << 30,
        metered_to_ms=1 << 50,
    )
    assert len(msgspec.msgpack.encode(later)) <= bytes_of_lease(lease) == bytes_of_lease(later)


def test_no_lease_that_is_granted_is_larger_than_the_largest() -> None:
    cards = tuple(Card(uuid=f"GPU-{at}", model="A100", cu=100.0) for at in range(CARDS))
    record = NodeRecord(heartbeat=heartbeat(NODE), cards=cards)
    model = "é" * MODEL_CHARACTERS_MAX
    lease = lease_of(
        lease_id=f"{NODE}.{'l' * 63}",
        project="p" * 63,
        holder="é" * HOLDER_CHARACTERS_MAX,
        agent="é" * AGENT_CHARACTERS_MAX,
        demand=GpuDemand(
            min_cu=1.0, max_cu=400.0, memory_bytes=1 << 44, count=4, models=(model,) * MODELS_MAX
        ),
        slices=tuple(Slice(card=card.uuid, memory_bytes=1 << 44) for card in cards),
        token=1 << 50,
        priority=-(1 << 31),
    )
    assert bytes_of_lease(lease) <= largest_lease_bytes(record.node, cards)
