"""What can happen to the broker."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_broker.record import NodeRecord
from dsec_common.errors import DsecError
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
    """Someone asks for units; on any node when ``node`` is empty.

    ``local`` is fresh, and becomes the second token of the lease's id.
    """

    request_id: int
    project: str
    holder: str
    cu: float
    node: str
    ttl_s: float
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


Ask: TypeAlias = GrantAsked | RenewAsked | ReleaseAsked
"""What is answered."""

Event: TypeAlias = (
    HeartbeatSeen | Ask | RecordSeen | RecordWritten | RecordRead | StoreFailed | SweepDue
)
