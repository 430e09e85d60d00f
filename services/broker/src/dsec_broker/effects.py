"""What the broker's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_broker.record import Lease, NodeRecord
from dsec_common.errors import DsecError
from dsec_common.metering import LeaseSegment
from dsec_common.wire.base import Message


class WriteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Write the record if ``revision`` is still the last (0: nothing is there).

    Exactly one of ``RecordWritten``, ``RecordRead`` (another broker was faster) and ``StoreFailed``
    must follow.
    """

    node: str
    record: NodeRecord
    revision: int


class ReadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Read the node's record; ``RecordRead`` or ``StoreFailed`` must follow."""

    node: str


class DeleteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the node if ``revision`` is still the last; another broker may have been faster."""

    node: str
    revision: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request."""

    request_id: int
    reply: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request with an error."""

    request_id: int
    error: DsecError


class Revoke(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the node that a lease which it still names is gone; it will be told again if need be."""

    node: str
    lease_id: str
    reason: str


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Tell operators that a record which was just written breaks conservation."""

    node: str
    violations: tuple[str, ...]


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the node which slices a lease has now; it will be told again if need be."""

    node: str
    lease: Lease


class TellSegments(msgspec.Struct, frozen=True, kw_only=True):
    """Have the log keep what leases held; ``SegmentsTold`` follows once it does."""

    node: str
    segments: tuple[LeaseSegment, ...]


Outcome: TypeAlias = Answer | Refuse
Effect: TypeAlias = (
    WriteRecord | ReadRecord | DeleteRecord | Revoke | Resize | Alarm | TellSegments | Outcome
)
