"""One node's shared record: what it has and the leases on it, in one document.

All of a node's leases live in one value of the bucket, so that one compare-and-swap decides: two
brokers cannot both grant the last unit. Every function here returns a new record; a record that
comes back equal need not be written.
"""

from __future__ import annotations

import math

import msgspec

from dsec_broker.errors import bad_amount, lease_gone, units_taken
from dsec_common.wire.base import Message
from dsec_common.wire.node import NodeHeartbeat, Resources

_TOLERANCE = 1e-9
"""Sums of units such as 0.1 are not exact."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Units held for someone.

    Attributes:
        lease_id: ``<node>.<local>``, so that any broker finds its record.
        confirmed_at: ``sent_at`` of the first heartbeat that named it, by the node's clock; 0
            before. From then on the node decides: a later heartbeat without it ends it.
    """

    lease_id: str
    project: str
    holder: str
    cu: float
    granted_at: float
    expires_at: float
    token: int
    confirmed_at: float = 0.0


class NodeRecord(Message, frozen=True, kw_only=True):
    """What all brokers agree on about one node.

    Attributes:
        heartbeat: the last one whose lasting part differed from the one before.
        cu_total: Compute Units of its GPUs.
        notes: what an operator should know about them.
        leases: those that have not ended, in the order of their tokens.
        last_token: of the last grant; it only grows.
    """

    # A record is a value, not a message of its own: equal records must compare equal.
    message_id: str = ""
    sent_at: float = 0.0
    heartbeat: NodeHeartbeat
    cu_total: float = 0.0
    notes: tuple[str, ...] = ()
    leases: tuple[Lease, ...] = ()
    last_token: int = 0

    @property
    def node(self) -> str:
        """The node's name."""
        return self.heartbeat.node

    @property
    def cu_allocated(self) -> float:
        """Units under lease."""
        return math.fsum(lease.cu for lease in self.leases)

    @property
    def cu_free(self) -> float:
        """Units not under lease; 0 when GPUs vanished from under their leases."""
        return max(0.0, self.cu_total - self.cu_allocated)

    def lease(self, lease_id: str) -> Lease:
        """Return the lease.

        Raises:
            DsecError: ``expired`` when it is not there.
        """
        for lease in self.leases:
            if lease.lease_id == lease_id:
                return lease
        raise lease_gone(lease_id)


def lasting(heartbeat: NodeHeartbeat) -> NodeHeartbeat:
    """Return the heartbeat without what changes from second to second: worth one write a change."""
    return msgspec.structs.replace(
        heartbeat,
        message_id="",
        cause_id="",
        sent_at=0.0,
        allocated=Resources(),
        memory_bytes_available=0,
        lease_ids=(),
    )


def grant(
    record: NodeRecord,
    *,
    lease_id: str,
    project: str,
    holder: str,
    cu: float,
    now: float,
    ttl_s: float,
) -> tuple[NodeRecord, Lease]:
    """Return the record with one more lease on it.

    The token is a fence: larger than any before it on this node. It starts from the clock's
    milliseconds, so that it grows even past a bucket that was lost.

    Raises:
        DsecError: ``invalid`` for no amount, ``exhausted`` when fewer units are free.
    """
    if not 0 < cu < math.inf:
        raise bad_amount(cu)
    if cu > record.cu_free + _TOLERANCE:
        raise units_taken(record.node, cu, record.cu_free, record.cu_total)
    lease = Lease(
        lease_id=lease_id,
        project=project,
        holder=holder,
        cu=cu,
        granted_at=now,
        expires_at=now + ttl_s,
        token=max(record.last_token + 1, int(now * 1000)),
    )
    granted = msgspec.structs.replace(
        record, leases=(*record.leases, lease), last_token=lease.token
    )
    return granted, lease


def renew(record: NodeRecord, lease_id: str, now: float, ttl_s: float) -> tuple[NodeRecord, Lease]:
    """Return the record with the lease living until ``now + ttl_s``, never shorter than before.

    Raises:
        DsecError: ``expired`` when the lease has ended.
    """
    old = record.lease(lease_id)
    if old.expires_at <= now:
        raise lease_gone(lease_id)
    new = msgspec.structs.replace(old, expires_at=max(old.expires_at, now + ttl_s))
    return _replace(record, new), new


def release(record: NodeRecord, lease_id: str) -> NodeRecord:
    """Return the record without the lease; a lease that is not there is fine."""
    leases = tuple(lease for lease in record.leases if lease.lease_id != lease_id)
    return msgspec.structs.replace(record, leases=leases)


def sweep(record: NodeRecord, now: float) -> NodeRecord:
    """Return the record without the leases that have run out."""
    leases = tuple(lease for lease in record.leases if lease.expires_at > now)
    return msgspec.structs.replace(record, leases=leases)


def observe(
    record: NodeRecord,
    heartbeat: NodeHeartbeat,
    units: tuple[float, tuple[str, ...]],
    now: float,
    ttl_s: float,
) -> NodeRecord:
    """Return the record after a heartbeat.

    A lease that the heartbeat names belongs to a living sandbox: it is confirmed, and prolonged
    when less than half of ``ttl_s`` is left, so that a quiet cluster writes twice per lifetime. A
    confirmed lease that a later heartbeat does not name belonged to a sandbox that has ended. One
    broker may see heartbeats later than another, hence the comparison by the node's own clock.
    """
    named = set(heartbeat.lease_ids)
    leases = []
    for lease in record.leases:
        if lease.lease_id in named:
            leases.append(_keep_alive(lease, heartbeat.sent_at, now, ttl_s))
        elif not lease.confirmed_at or heartbeat.sent_at <= lease.confirmed_at:
            leases.append(lease)
    total, notes = units
    return msgspec.structs.replace(
        record, heartbeat=lasting(heartbeat), cu_total=total, notes=notes, leases=tuple(leases)
    )


def _keep_alive(lease: Lease, seen_at: float, now: float, ttl_s: float) -> Lease:
    if not lease.confirmed_at:
        return msgspec.structs.replace(
            lease, confirmed_at=seen_at, expires_at=max(lease.expires_at, now + ttl_s)
        )
    if lease.expires_at < now + ttl_s / 2:
        return msgspec.structs.replace(lease, expires_at=now + ttl_s)
    return lease


def _replace(record: NodeRecord, new: Lease) -> NodeRecord:
    leases = tuple(new if lease.lease_id == new.lease_id else lease for lease in record.leases)
    return msgspec.structs.replace(record, leases=leases)
