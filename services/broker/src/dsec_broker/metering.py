"""What leases held, told in segments on ``dsec-metering``, exactly once whatever dies.

A segment is worked out from what a write changes: a lease that goes ends one, and one that gets
other slices ends one and begins the next. It is written into the node's record by that very write,
so there is a segment for each change that happened and none for one that did not. It stays there
until a broker has handed it to the log; any broker may, since what is told twice counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final

import msgspec

from dsec_broker.events import Moment
from dsec_broker.record import Lease, NodeRecord
from dsec_broker.room import bytes_of
from dsec_common.compute.model import Slice
from dsec_common.metering import MICRO, LeaseSegment

PriceOf = Callable[[Slice], float]
"""The price of one Compute Unit of a slice for an hour."""

#: A segment that still stands in a record after so long was not told by who wrote it.
TELL_AGAIN_S: Final = 10.0


def between(
    before: Iterable[Lease],
    after: Mapping[str, Lease],
    *,
    untold: Container[tuple[str, int]],
    now: float,
    interval_s: float,
    price_of: PriceOf,
    room_bytes: int,
) -> tuple[list[LeaseSegment], list[Lease]]:
    """Return the segments that end with a change, and the leases that begin another.

    Args:
        before: the leases as they were written last.
        after: as they are to be written, by id.
        untold: keys of the segments that the log has not been told of. A lease that does not change
            gets no other while it has one of these: a log that takes nothing for long would fill
            the record.
        now: Unix seconds.
        interval_s: a lease that does not change is told of at least so often.
        price_of: see :data:`PriceOf`.
        room_bytes: what segments of leases that do not change may take together. The others are
            told of by a later write, in a segment that is longer by so much.
    """
    now_ms = round(now * 1000)
    segments: list[LeaseSegment] = []
    begun: list[Lease] = []
    for old in before:
        new = after.get(old.lease_id)
        changes = new is None or new.slices != old.slices
        if not changes and not _is_due(old, untold, now, interval_s):
            continue
        segment = _segment(old, now_ms, price_of, last=new is None)
        if not changes:
            size = bytes_of(segment)
            if size > room_bytes:
                continue
            room_bytes -= size
        segments.append(segment)
        if new is not None:
            begun.append(
                msgspec.structs.replace(new, segments=segment.number, metered_to_ms=segment.to_ms)
            )
    return segments, begun


def since_ms(lease: Lease) -> int:
    """Return up to when a lease has been told of."""
    return lease.metered_to_ms or round(lease.granted_at * 1000)


def is_any_due(
    leases: Iterable[Lease], untold: Container[tuple[str, int]], now: float, interval_s: float
) -> bool:
    """Return whether a lease that does not change is to be told of."""
    return any(_is_due(lease, untold, now, interval_s) for lease in leases)


def _is_due(
    lease: Lease, untold: Container[tuple[str, int]], now: float, interval_s: float
) -> bool:
    if round(now * 1000) - since_ms(lease) < interval_s * 1000:
        return False
    return (lease.lease_id, lease.segments) not in untold


def key_of(segment: LeaseSegment) -> tuple[str, int]:
    """Return by what a segment is known."""
    return segment.lease_id, segment.number


def newly_untold(before: NodeRecord | None, after: NodeRecord | None) -> tuple[LeaseSegment, ...]:
    """Return the segments that a write has put into a record."""
    known = {key_of(segment) for segment in before.untold} if before else frozenset()
    return tuple(it for it in (after.untold if after else ()) if key_of(it) not in known)


def left_untold(record: NodeRecord | None, at: Moment) -> tuple[LeaseSegment, ...]:
    """Return the segments of a record that whoever wrote them has not told in time."""
    before_ms = (at.unix_s - TELL_AGAIN_S) * 1000
    return tuple(it for it in (record.untold if record else ()) if it.to_ms < before_ms)


def _segment(lease: Lease, now_ms: int, price_of: PriceOf, *, last: bool) -> LeaseSegment:
    from_ms = since_ms(lease)
    per_hour = math.fsum(slice_.cu * price_of(slice_) for slice_ in lease.slices)
    return LeaseSegment(
        project=lease.project,
        agent=lease.agent,
        node=lease.lease_id.partition(".")[0],
        number=lease.segments + 1,
        from_ms=from_ms,
        to_ms=max(now_ms, from_ms),  # clocks of brokers differ a little
        last=last,
        lease_id=lease.lease_id,
        cu_micro=round(lease.cu * MICRO),
        cost_micro_per_hour=round(per_hour * MICRO),
    )
