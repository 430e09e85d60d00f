"""One node's record while it is being changed.

The record itself is a value that is compared, written and sent about. Working on it means looking
up leases and free slices, which is done in an index that is kept here from one change to the next:
a grant costs the same on a node with one card as on one with a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from dsec_broker.errors import (
    bad_demand,
    lease_gone,
    lease_of_another,
    lease_revoked,
    no_room,
    slices_taken,
    units_taken,
)
from dsec_broker.events import TransferAsked
from dsec_broker.metering import PriceOf, between, is_any_due, key_of
from dsec_broker.record import Lease, NodeRecord, Revoked, cu_total, lasting
from dsec_broker.room import (
    SHORT_REASON,
    Room,
    bytes_of,
    bytes_of_lease,
    bytes_of_segment,
    largest_lease_bytes,
)
from dsec_broker.shares import make_room
from dsec_common.compute.model import Card, GpuDemand, Slice
from dsec_common.compute.slice_pool import SlicePool
from dsec_common.errors import DsecError
from dsec_common.wire.lease import GrantLease
from dsec_common.wire.node import NodeHeartbeat

CardsOf: TypeAlias = Callable[
    [NodeHeartbeat, Mapping[str, str]], tuple[tuple[Card, ...], tuple[str, ...]]
]
"""Makes of a heartbeat, without those of its cards that are counted elsewhere, cards and notes."""


class Books:
    """A record taken apart. Changes raise before they have changed anything.

    Attributes:
        dirty: whether :meth:`record` differs from the record that it was made of.
    """

    def __init__(self, record: NodeRecord, clock_skew_s: float = 0.0) -> None:
        self._skew_s = clock_skew_s
        self._record = record
        self._heartbeat = record.heartbeat
        self._cards = record.cards
        self._notes = record.notes
        self._leases = {lease.lease_id: lease for lease in record.leases}
        self._revoked = {revoked.lease_id: revoked for revoked in record.revoked}
        self._untold = {key_of(segment): segment for segment in record.untold}
        self._was_told = False
        self._last_token = record.last_token
        self._next_end = min((lease.expires_at for lease in record.leases), default=math.inf)
        self._pool = SlicePool(record.cards, _slices(record.leases))
        self._room = Room(record)
        self._largest_bytes = largest_lease_bytes(record.node, record.cards)
        self._count()
        self._empty: SlicePool | None = None
        # None: another broker, or an earlier life, may have had another table of units.
        self._elsewhere: Mapping[str, str] | None = None
        self.dirty = False

    @property
    def node(self) -> str:
        """The node's name."""
        return self._record.node

    @property
    def pool(self) -> SlicePool:
        """What is free; closed while the record has no room for any lease that might be asked."""
        return self._pool

    @property
    def is_full(self) -> bool:
        """Whether the record takes no further lease, whatever is free."""
        return self._pool.closed

    @property
    def cu_total(self) -> float:
        """What there is."""
        return cu_total(self._cards)

    def record(self) -> NodeRecord:
        """Return the record as it is now."""
        if self.dirty:
            self._record = msgspec.structs.replace(
                self._record,
                heartbeat=self._heartbeat,
                cards=self._cards,
                notes=self._notes,
                leases=tuple(self._leases.values()),
                last_token=self._last_token,
                revoked=tuple(self._revoked.values()),
                untold=tuple(self._untold.values()),
            )
            self.dirty = self._was_told = False
            self._room.expect_no_more()
            self._count()
        return self._record

    def lease(self, lease_id: str) -> Lease | None:
        """Return the lease, or None when there is none."""
        return self._leases.get(lease_id)

    def fits_when_empty(self, demand: GpuDemand) -> bool:
        """Return whether the demand could be served if nothing were held."""
        if self._empty is None:
            self._empty = SlicePool(self._cards)
        return self._empty.find(demand) is not None

    @property
    def cards(self) -> tuple[Card, ...]:
        """What the node has."""
        return self._cards

    def leases(self) -> tuple[Lease, ...]:
        """Return the leases in the order of their tokens."""
        return tuple(self._leases.values())

    # --- What is metered ----------------------------------------------------------------------

    def meter(self, now: float, interval_s: float, price_of: PriceOf) -> None:
        """Note what has been held up to now by leases that are about to be written otherwise."""
        segments, begun = between(
            self._record.leases,
            self._leases,
            untold=self._untold,
            now=now,
            interval_s=interval_s,
            price_of=price_of,
            room_bytes=self._room.for_later,
        )
        for segment in segments:
            self._untold[key_of(segment)] = segment
            self._room.put_segment(segment)
        self._leases.update((lease.lease_id, lease) for lease in begun)

    def told(self, keys: Iterable[tuple[str, int]]) -> None:
        """Drop segments that the log has, from the next record that is written for any reason."""
        for key in keys:
            if self._untold.pop(key, None) is not None:
                self._room.drop_segment(key)
                self._was_told = True
        self._count()

    def tidy(self, now: float, interval_s: float) -> None:
        """Have a record written if leases are to be metered, or segments to be dropped from it."""
        if self._was_told or is_any_due(self._leases.values(), self._untold, now, interval_s):
            self.dirty = True

    # --- What is asked for --------------------------------------------------------------------

    def grant(self, lease_id: str, asked: GrantLease, now: float) -> Lease:
        """Return a lease on slices that were free, or the one that was granted under this id.

        The token is a fence: larger than any before it on this node. It starts from the clock's
        milliseconds, so that it grows even past a bucket that was lost.

        Raises:
            DsecError: ``invalid`` for what makes no sense, ``exhausted`` when less is free or the
                record holds no further lease, ``conflict`` when the id is another project's,
                ``expired`` when the lease has been granted under this id and was ended, as a
                sandbox may live on it.
        """
        # What has run out is free, whether or not it has been swept.
        self.sweep(now)
        known = self._leases.get(lease_id)
        if known is not None:
            if known.project != asked.project:
                raise lease_of_another(lease_id)
            return known
        if revoked := self._revoked.get(lease_id):
            raise lease_revoked(lease_id, revoked.reason)
        demand = asked.wanted
        if demand.flaw:
            raise bad_demand(demand)
        if self.is_full:
            raise self._full()
        slices: tuple[Slice, ...] | None = asked.slices
        if not slices:
            slices = self._pool.find(demand) or make_room(self, asked)
        elif not self._pool.has(slices):
            raise slices_taken(self.node, slices)
        if slices is None:
            possible = self.fits_when_empty(demand)
            free_cu = self._pool.free_cu
            raise units_taken(self.node, demand, free_cu, self.cu_total, possible=possible)
        lease = Lease(
            lease_id=lease_id,
            project=asked.project,
            holder=asked.holder,
            demand=demand,
            slices=slices,
            granted_at=now,
            expires_at=now + asked.ttl_s,
            token=self._next_token(now),
            service_class=asked.service_class,
            priority=asked.priority,
            agent=asked.agent,
            ends_at=now + asked.holds_s if 0 < asked.holds_s < math.inf else 0.0,
        )
        if bytes_of_lease(lease) > self._room.for_grants:
            raise self._full()
        self._pool.take(slices)
        self._put(lease)
        return lease

    def renew(self, lease_id: str, now: float, ttl_s: float) -> Lease:
        """Have the lease live until ``now + ttl_s``, never shorter than before, and return it.

        Raises:
            DsecError: ``expired`` when the lease has ended.
        """
        old = self._living(lease_id, now)
        new = msgspec.structs.replace(old, expires_at=max(old.expires_at, now + ttl_s))
        if new != old:
            self._put(new)
        return new

    def release(self, lease_id: str) -> None:
        """End the lease; one that is not there is fine."""
        if lease_id in self._leases:
            self._end(lease_id)

    def transfer(self, asked: TransferAsked, new_id: str, now: float) -> Lease:
        """Return a new lease on the slices of an old one, which ends; asked again, the same.

        Raises:
            DsecError: ``expired`` when the lease has ended; ``exhausted`` when so many have been
                transferred since the node's last heartbeat that the record holds no more of it.
        """
        known = self._leases.get(new_id)
        if known is not None:
            return known
        old = self._living(asked.lease_id, now)
        new = msgspec.structs.replace(
            old,
            lease_id=new_id,
            holder=asked.holder,
            agent=asked.agent or old.agent,
            granted_at=now,
            expires_at=now + asked.ttl_s,
            token=self._next_token(now),
            confirmed_at=0.0,
            ends_at=0.0,
            segments=0,
            metered_to_ms=0,
        )
        if not self._room.holds_transfer(old, new):
            raise self._full()
        self._revoke(old, "its lease was transferred", f" to {asked.holder}")
        self._pool.take(new.slices)
        self._put(new)
        return new

    def unlock(self, project: str, lease_id: str, reason: str) -> tuple[Lease, ...]:
        """End one lease of the project, or all when no id is given; return those that ended."""
        ended = tuple(
            lease
            for lease in self._leases.values()
            if lease.project == project and lease_id in ("", lease.lease_id)
        )
        for lease in ended:
            why = f": {reason or 'no reason given'}"
            self._revoke(lease, "its lease was unlocked by force", why)
        return ended

    def sweep(self, now: float) -> None:
        """End the leases that have run out, by a clock that may be ahead of others'."""
        if self._next_end + self._skew_s > now:
            return
        for lease in list(self._leases.values()):
            if lease.expires_at + self._skew_s <= now:
                self._run_out(lease)
        self._next_end = min(
            (lease.expires_at for lease in self._leases.values()), default=math.inf
        )

    def resize(self, lease_id: str, slices: tuple[Slice, ...], reason: str) -> bool:
        """Give a lease other slices of its cards; return whether there was room for that."""
        lease = self._leases[lease_id]
        if bytes_of_segment(lease) > self._room.for_later:
            return False
        self._pool.give(lease.slices)
        if not self._pool.has_free(slices):
            self._pool.take(lease.slices)
            return False
        self._pool.take(slices)
        self._room.expect_segment(lease)
        self._put(
            msgspec.structs.replace(
                lease, slices=slices, resizes=lease.resizes + 1, resize_reason=reason
            )
        )
        return True

    def has_room_beside(self, resized: Iterable[Lease]) -> bool:
        """Return whether the record takes one more lease when these have been resized for it."""
        left = self._room.for_grants - sum(map(bytes_of_segment, resized))
        return left >= self._largest_bytes

    # --- What the node says -------------------------------------------------------------------

    def observe(
        self,
        heartbeat: NodeHeartbeat,
        elsewhere: Mapping[str, str],
        cards_of: CardsOf,
        now: float,
        ttl_s: float,
    ) -> None:
        """Take a heartbeat in, and which of its cards are counted for which other nodes.

        A lease that the heartbeat names belongs to a living sandbox: it is confirmed, and prolonged
        when less than half of ``ttl_s`` is left, so that a quiet cluster writes twice per lifetime.
        A confirmed lease that a later heartbeat does not name belonged to a sandbox that has ended.
        One broker may see heartbeats later than another, hence the comparison by the node's clock.
        What is new of the node itself stays out of a record that has no room for it.
        """
        stays = lasting(heartbeat)
        if stays != self._heartbeat or elsewhere != self._elsewhere:
            self._elsewhere = elsewhere
            cards, notes = cards_of(heartbeat, elsewhere)
            is_new = (stays, cards, notes) != (self._heartbeat, self._cards, self._notes)
            if is_new and self._room.holds_node(stays, cards, notes):
                self._heartbeat = stays
                self._have(cards, notes)
        named = frozenset(heartbeat.lease_ids)
        if not named and not self._leases and not self._revoked:
            return
        for lease in list(self._leases.values()):
            if lease.lease_id in named:
                self._keep_alive(lease, heartbeat.sent_at, now, ttl_s)
            elif lease.confirmed_at and heartbeat.sent_at > lease.confirmed_at:
                self._end(lease.lease_id)
        for revoked in list(self._revoked.values()):
            if revoked.lease_id not in named and self._is_over(revoked, heartbeat.sent_at, now):
                del self._revoked[revoked.lease_id]
                self._room.drop_revoked(revoked.lease_id)
                self._count()
                self.dirty = True

    def leave(self, cards: Iterable[str], node: str) -> None:
        """Count cards no longer, but for those under lease: another node has them now."""
        held = {slice_.card for slice_ in _slices(self._leases.values())}
        left = {uuid for uuid in cards if uuid not in held}
        stay = tuple(card for card in self._cards if card.uuid not in left)
        if len(stay) < len(self._cards):
            self._elsewhere = None
            self._have(stay, (*self._notes, f"while it was silent, cards went to node {node}"))

    def _have(self, cards: tuple[Card, ...], notes: tuple[str, ...]) -> None:
        if cards != self._cards:
            self._pool = SlicePool(cards, _slices(self._leases.values()))
            self._empty = None
            self._largest_bytes = largest_lease_bytes(self.node, cards)
        self._cards, self._notes = cards, notes
        self._room.put_node(self._heartbeat, cards, notes)
        self._count()
        self.dirty = True

    def _keep_alive(self, lease: Lease, seen_at: float, now: float, ttl_s: float) -> None:
        if not lease.confirmed_at:
            expires_at = max(lease.expires_at, now + ttl_s)
            self._put(msgspec.structs.replace(lease, confirmed_at=seen_at, expires_at=expires_at))
        elif lease.expires_at < now + ttl_s / 2:
            self._put(msgspec.structs.replace(lease, expires_at=now + ttl_s))

    # --- Parts --------------------------------------------------------------------------------

    def _living(self, lease_id: str, now: float) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at + self._skew_s <= now:
            raise lease_gone(lease_id)
        return lease

    def _next_token(self, now: float) -> int:
        self._last_token = max(self._last_token + 1, int(now * 1000))
        return self._last_token

    def _put(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease
        self._next_end = min(self._next_end, lease.expires_at)
        self._room.put_lease(lease)
        self._count()
        self.dirty = True

    def _end(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id)
        self._pool.give(lease.slices)
        self._room.drop_lease(lease_id)
        self._room.expect_segment(lease)
        self._count()
        self.dirty = True

    def _revoke(self, lease: Lease, reason: str, more: str = "") -> None:
        """End a lease on which a sandbox may live, or may be about to.

        Args:
            lease: which.
            reason: why, no longer than :data:`~dsec_broker.room.SHORT_REASON`.
            more: the rest of the reason, for which there may be no room.
        """
        self._end(lease.lease_id)
        revoked = Revoked(
            lease_id=lease.lease_id,
            confirmed_at=lease.confirmed_at,
            reason=reason + more,
            expires_at=lease.expires_at,
        )
        if bytes_of(revoked) > self._room.for_later:
            revoked = msgspec.structs.replace(revoked, reason=reason)
        self._revoked[lease.lease_id] = revoked
        self._room.put_revoked(revoked)
        self._count()

    def _count(self) -> None:
        """Have the index give nothing while there is no room for a lease."""
        self._pool.closed = self._room.for_grants < self._largest_bytes

    def _full(self) -> DsecError:
        return no_room(self.node, len(self._leases), len(self._untold))

    def _run_out(self, lease: Lease) -> None:
        """End a lease whose time is over; what was never named is no longer expected either."""
        if lease.confirmed_at:
            self._revoke(lease, SHORT_REASON)
        else:
            self._end(lease.lease_id)

    def _is_over(self, revoked: Revoked, sent_at: float, now: float) -> bool:
        """Return whether a heartbeat without the lease means that none will name it."""
        if revoked.confirmed_at:
            return sent_at > revoked.confirmed_at
        return revoked.expires_at + self._skew_s <= now


def _slices(leases: Iterable[Lease]) -> list[Slice]:
    return [slice_ for lease in leases for slice_ in lease.slices]
