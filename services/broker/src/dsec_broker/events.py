"""What can happen to the broker."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_broker.record import NodeRecord
from dsec_common.errors import DsecError
from dsec_common.wire.lease import GrantLease
from dsec_common.wire.node import NodeHeartbeat


class Moment(msgspec.Struct, frozen=True):
    """When something happened: Unix time for records, monotonic time for silences."""

    unix_s: float
    monotonic_s: float


class HeartbeatSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A node lives and has this."""

    heartbeat: NodeHeartbeat
    at: Moment


class GrantAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Someone asks for slices; on any node when ``asked.node`` is empty.

    ``local`` becomes the second token of the lease's id: the same whenever the same is asked again.
    """

    request_id: int
    asked: GrantLease
    local: str
    at: Moment


class RenewAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Someone asks for a lease to live on."""

    request_id: int
    lease_id: str
    ttl_s: float
    at: Moment


class ReleaseAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Someone gives a lease back."""

    request_id: int
    lease_id: str
    at: Moment


class TransferAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Someone hands a lease to another holder, under a new id that ends in ``local``."""

    request_id: int
    lease_id: str
    holder: str
    agent: str
    ttl_s: float
    local: str
    at: Moment


class UnlockAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Someone ends a project's leases on one node by force: one, or all with an empty id."""

    request_id: int
    project: str
    node: str
    lease_id: str
    reason: str
    at: Moment


class RecordSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The bucket's watch tells of a record at a revision; ``record`` is None when deleted."""

    node: str
    record: NodeRecord | None
    revision: int
    at: Moment


class RecordWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The outstanding write of the node's record took effect as ``revision``."""

    node: str
    revision: int
    at: Moment


class RecordRead(msgspec.Struct, frozen=True, kw_only=True):
    """What the bucket holds now: asked for, or because the outstanding write came second."""

    node: str
    record: NodeRecord | None
    revision: int
    at: Moment


class StoreFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The outstanding read or write failed; a write may have taken effect all the same."""

    node: str
    error: DsecError
    at: Moment


class SweepDue(msgspec.Struct, frozen=True, kw_only=True):
    """Time to look for ended leases and forgotten nodes."""

    at: Moment


class ResizeAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's balance wants leases of one node to have so many units, by their ids."""

    node: str
    targets: dict[str, float]
    reason: str
    at: Moment


class SegmentsTold(msgspec.Struct, frozen=True, kw_only=True):
    """The log keeps these segments of a node's leases now."""

    node: str
    keys: tuple[tuple[str, int], ...]


Ask: TypeAlias = GrantAsked | RenewAsked | ReleaseAsked | TransferAsked | UnlockAsked
"""What is answered."""

Event: TypeAlias = (
    HeartbeatSeen
    | Ask
    | ResizeAsked
    | RecordSeen
    | RecordWritten
    | RecordRead
    | StoreFailed
    | SweepDue
    | SegmentsTold
)
