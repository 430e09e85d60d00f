"""How much a node's record takes, and what may still be written into it. Pure.

A record travels as one message, so NATS bounds it. What ends a lease must work in the fullest
record all the same: a lease is counted by the most that it can ever take there, which is no less
than what is left of it when it has ended (a segment for the bill, why it was ended). So renewals,
releases, force and time never make a record larger than it was counted. What does is bounded by one
line after the other: new leases, then what can wait, then what cannot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

import msgspec

from dsec_broker.record import Lease, NodeRecord, Revoked
from dsec_common.compute.model import (
    MODEL_CHARACTERS_MAX,
    MODELS_MAX,
    Card,
    CardMode,
    GpuDemand,
    ServiceClass,
    Slice,
)
from dsec_common.metering import LeaseSegment
from dsec_common.wire.lease import HOLDER_CHARACTERS_MAX
from dsec_common.wire.node import NodeHeartbeat
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX

_KIB: Final = 1024

RECORD_BYTES_MAX: Final = 1020 * _KIB
"""Of a record: the 1 MiB of a message that NATS takes unless told otherwise, less its headers."""

LATER_BYTES_MAX: Final = 896 * _KIB
"""Up to here what can wait is written: segments of leases that go on, resizing, long reasons. The
rest is for transfers, and for what heartbeats bring."""

GRANT_BYTES_MAX: Final = 768 * _KIB
"""Up to here leases are granted: some 1,400 on one slice each, which count 545 bytes."""

SHORT_REASON: Final = "its lease ran out: the broker did not hear of it in time"
"""The longest reason that there is always room for."""

_ENVELOPE_BYTES: Final = 256
"""Of a record without its parts."""
_LOCAL_CHARACTERS_MAX: Final = 63
_PROJECT_CHARACTERS_MAX: Final = 63
_UTF8_BYTES_MAX: Final = 4
_LARGE: Final = 1 << 60
"""A number that takes as much as any."""
_COUNT: Final = 1 << 31
"""As large as anything that is counted one by one."""
_RESIZE_REASON: Final = "-" * 48
"""As long as any reason to resize a lease."""

_encode: Final = msgspec.msgpack.Encoder().encode


def bytes_of(part: Revoked | LeaseSegment) -> int:
    """Return what a part of a record takes there, now and later."""
    return len(_encode(part))


def bytes_of_lease(lease: Lease) -> int:
    """Return the most that a lease takes with these slices, whatever becomes of it."""
    widest = msgspec.structs.replace(
        lease,
        resizes=_COUNT,
        resize_reason=_RESIZE_REASON,
        segments=_COUNT,
        metered_to_ms=_LARGE,
    )
    return max(len(_encode(widest)), bytes_of_segment(lease) + _bytes_of_end(lease))


def bytes_of_segment(lease: Lease) -> int:
    """Return the most that a segment of a lease takes."""
    return _SEGMENT_BYTES + sum(
        len(text.encode()) for text in (lease.project, lease.agent, lease.lease_id, lease.lease_id)
    )


def _bytes_of_end(lease: Lease) -> int:
    return _END_BYTES + len(lease.lease_id)


#: Texts up to 31 bytes have one byte of length, longer ones up to two more.
_LENGTHS_BYTES: Final = 8
_SEGMENT_BYTES: Final = _LENGTHS_BYTES + bytes_of(
    LeaseSegment(
        project="",
        node="",
        number=_COUNT,
        from_ms=_LARGE,
        to_ms=_LARGE,
        lease_id="",
        cu_micro=_LARGE,
        cost_micro_per_hour=_LARGE,
    )
)
_END_BYTES: Final = _LENGTHS_BYTES + bytes_of(
    Revoked(lease_id="", confirmed_at=0.0, reason=SHORT_REASON)
)


def largest_lease_bytes(node: str, cards: Iterable[Card]) -> int:
    """Return what the largest lease takes that could be found free on a node's cards."""
    longest = Slice(card="", memory_bytes=_LARGE, kind=CardMode.WHOLE)
    slices = [
        msgspec.structs.replace(
            longest,
            card=card.uuid,
            mig_uuid=max((instance.uuid for instance in card.mig), key=len, default=""),
        )
        for card in cards
    ]
    model = "-" * (_UTF8_BYTES_MAX * MODEL_CHARACTERS_MAX)
    return bytes_of_lease(
        Lease(
            lease_id=f"{node}.{'-' * _LOCAL_CHARACTERS_MAX}",
            project="-" * _PROJECT_CHARACTERS_MAX,
            holder="-" * (_UTF8_BYTES_MAX * HOLDER_CHARACTERS_MAX),
            agent="-" * (_UTF8_BYTES_MAX * AGENT_CHARACTERS_MAX),
            demand=GpuDemand(
                min_cu=0.0,
                max_cu=0.0,
                memory_bytes=_LARGE,
                count=_LARGE,
                models=(model,) * MODELS_MAX,
            ),
            slices=tuple(slices),
            granted_at=0.0,
            expires_at=0.0,
            token=_LARGE,
            service_class=ServiceClass.STANDARD,
            priority=_LARGE,
        )
    )


def bytes_of_node(heartbeat: NodeHeartbeat, cards: tuple[Card, ...], notes: tuple[str, ...]) -> int:
    """Return what a record takes that has no leases."""
    return _ENVELOPE_BYTES + sum(len(_encode(part)) for part in (heartbeat, cards, notes))


class Room:
    """What a record takes, part by part, kept up to date while it is being changed.

    Attributes:
        taken: bytes, those of what is expected included.
    """

    def __init__(self, record: NodeRecord) -> None:
        self.taken = 0
        self._expected = 0
        self._parts: dict[Hashable, int] = {}
        self.put_node(record.heartbeat, record.cards, record.notes)
        for lease in record.leases:
            self.put_lease(lease)
        for revoked in record.revoked:
            self.put_revoked(revoked)
        for segment in record.untold:
            self.put_segment(segment)

    # --- What is in it ------------------------------------------------------------------------

    def put_node(
        self, heartbeat: NodeHeartbeat, cards: tuple[Card, ...], notes: tuple[str, ...]
    ) -> None:
        """Count what the record says of the node itself."""
        self._put("", bytes_of_node(heartbeat, cards, notes))

    def put_lease(self, lease: Lease) -> None:
        """Count a lease, in place of what it was."""
        self._put(lease.lease_id, bytes_of_lease(lease))

    def put_revoked(self, revoked: Revoked) -> None:
        """Count what is remembered of a lease that was ended."""
        self._put(("revoked", revoked.lease_id), bytes_of(revoked))

    def put_segment(self, segment: LeaseSegment) -> None:
        """Count a segment that the log has not been told of."""
        self._put((segment.lease_id, segment.number), bytes_of(segment))

    def drop_lease(self, lease_id: str) -> None:
        """Count a lease no longer."""
        self._drop(lease_id)

    def drop_revoked(self, lease_id: str) -> None:
        """Count no longer what was remembered of it."""
        self._drop(("revoked", lease_id))

    def drop_segment(self, key: tuple[str, int]) -> None:
        """Count a segment no longer."""
        self._drop(key)

    def expect_segment(self, lease: Lease) -> None:
        """Count a segment that the next write ends."""
        self._expected += bytes_of_segment(lease)
        self.taken += bytes_of_segment(lease)

    def expect_no_more(self) -> None:
        """Count what was expected no longer: it is there now."""
        self.taken -= self._expected
        self._expected = 0

    def _put(self, key: Hashable, size: int) -> None:
        self._drop(key)
        self._parts[key] = size
        self.taken += size

    def _drop(self, key: Hashable) -> None:
        self.taken -= self._parts.pop(key, 0)

    # --- What may be --------------------------------------------------------------------------

    @property
    def for_grants(self) -> int:
        """Bytes that new leases may take."""
        return GRANT_BYTES_MAX - self.taken

    @property
    def for_later(self) -> int:
        """Bytes that may be taken by what can wait."""
        return LATER_BYTES_MAX - self.taken

    def holds_node(
        self, heartbeat: NodeHeartbeat, cards: tuple[Card, ...], notes: tuple[str, ...]
    ) -> bool:
        """Return whether there is room for this to be said of the node."""
        more = bytes_of_node(heartbeat, cards, notes) - self._parts[""]
        return self.taken + more <= RECORD_BYTES_MAX

    def holds_transfer(self, old: Lease, new: Lease) -> bool:
        """Return whether there is room for a lease beside what is left of another."""
        left = bytes_of_segment(old) + _bytes_of_end(old)
        more = bytes_of_lease(new) + left - bytes_of_lease(old)
        return self.taken + more <= RECORD_BYTES_MAX
