"""One node's shared record: what it has and the leases on it, in one document.

All of a node's leases live in one value of the bucket, so that one compare-and-swap decides: two
brokers cannot both grant the same slice. :mod:`dsec_broker.books` works changes into it.
"""

from __future__ import annotations

import math

import msgspec

from dsec_common.compute.model import Card, GpuDemand, ServiceClass, Slice
from dsec_common.metering import LeaseSegment
from dsec_common.wire.base import Message
from dsec_common.wire.node import NodeHeartbeat, Resources


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Slices held for someone.

    Attributes:
        lease_id: ``<node>.<local>``, so that any broker finds its record.
        demand: what was asked for.
        slices: what was given for it.
        token: larger than that of any lease granted on the node before it.
        confirmed_at: ``sent_at`` of the first heartbeat that named it, by the node's clock; 0
            before. From then on the node decides: a later heartbeat without it ends it.
        resizes: how often it has got other slices of its cards.
        resize_reason: why it did the last time.
        agent: the kind of agent that it is held for.
        ends_at: Unix time by which its holder is expected to be gone; 0 when nobody knows.
        segments: how many segments of it have been metered.
        metered_to_ms: the end of the last of them.
    """

    lease_id: str
    project: str
    holder: str
    demand: GpuDemand
    slices: tuple[Slice, ...]
    granted_at: float
    expires_at: float
    token: int
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    confirmed_at: float = 0.0
    resizes: int = 0
    resize_reason: str = ""
    agent: str = ""
    ends_at: float = 0.0
    segments: int = 0
    metered_to_ms: int = 0

    @property
    def cu(self) -> float:
        """What its slices are worth."""
        return math.fsum(slice_.cu for slice_ in self.slices)


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that ended although a sandbox may live on it: the node is told when it names it.

    Attributes:
        confirmed_at: as it was in the lease. Kept until a later heartbeat does not name it.
        expires_at: as it was in the lease. One that no heartbeat had named is kept until then: its
            sandbox may be on its way.
    """

    lease_id: str
    confirmed_at: float
    reason: str
    expires_at: float = 0.0


class NodeRecord(Message, frozen=True, kw_only=True):
    """What all brokers agree on about one node.

    Attributes:
        heartbeat: the last one whose lasting part differed from the one before.
        cards: its GPUs as what leases are cut from.
        notes: what an operator should know about them.
        leases: those that have not ended, in the order of their tokens.
        last_token: of the last grant; it only grows.
        revoked: what its sandboxes still have to hear of.
        untold: what leases held that the log has not been told of yet, as far as is known.
    """

    # A record is a value, not a message of its own: equal records must compare equal.
    message_id: str = ""
    sent_at: float = 0.0
    heartbeat: NodeHeartbeat
    cards: tuple[Card, ...] = ()
    notes: tuple[str, ...] = ()
    leases: tuple[Lease, ...] = ()
    last_token: int = 0
    revoked: tuple[Revoked, ...] = ()
    untold: tuple[LeaseSegment, ...] = ()

    @property
    def node(self) -> str:
        """The node's name."""
        return self.heartbeat.node

    @property
    def cu_total(self) -> float:
        """Compute Units of the cards that take something."""
        return cu_total(self.cards)

    @property
    def cu_allocated(self) -> float:
        """Units under lease."""
        return math.fsum(lease.cu for lease in self.leases)


def cu_total(cards: tuple[Card, ...]) -> float:
    """Return the Compute Units of the cards that take something."""
    return math.fsum(card.cu_total for card in cards)


def lasting(heartbeat: NodeHeartbeat) -> NodeHeartbeat:
    """Return the heartbeat without what changes from second to second: worth one write a change."""
    return msgspec.structs.replace(
        heartbeat,
        message_id="",
        cause_id="",
        sent_at=0.0,
        allocated=Resources(),
        memory_bytes_available=0,
        disk_bytes_available=0,
        gpu_readings=(),
        lease_ids=(),
        lease_resizes={},
    )
