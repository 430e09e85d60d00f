"""Telling a node which leases that its sandboxes live on are gone. Pure."""

from __future__ import annotations

from typing import Final

from dsec_broker.effects import Revoke
from dsec_broker.record import NodeRecord
from dsec_common.wire.node import NodeHeartbeat

REVOKES_MAX: Final = 100
"""So many leases are revoked for one heartbeat at most: it may name whatever it likes."""

_UNKNOWN: Final = "its lease had ended before the broker heard of its sandbox"


def gone(record: NodeRecord, heartbeat: NodeHeartbeat) -> list[Revoke]:
    """Return what the node has to hear of leases that it names and its record does not hold.

    A lease is written before any sandbox can live on it. One that a heartbeat names and that is not
    in a record which was read after that heartbeat had come has therefore ended. Nothing that a
    node names is kept; what is beyond :data:`REVOKES_MAX` waits for a later heartbeat.

    Args:
        record: what the bucket held after the heartbeat had come.
        heartbeat: what the node says.
    """
    held = {lease.lease_id for lease in record.leases}
    unheld = [lease_id for lease_id in heartbeat.lease_ids if lease_id not in held]
    reasons = {revoked.lease_id: revoked.reason for revoked in record.revoked}
    return [
        Revoke(node=heartbeat.node, lease_id=lease_id, reason=reasons.get(lease_id) or _UNKNOWN)
        for lease_id in unheld[:REVOKES_MAX]
    ]
