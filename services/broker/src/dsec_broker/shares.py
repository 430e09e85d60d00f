"""Giving leases of one node more or less of their cards: worked into its books. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dsec_common.compute.conservation import Rank, rank_of
from dsec_common.compute.model import Slice
from dsec_common.compute.resizing import least_of, resized

if TYPE_CHECKING:
    from dsec_broker.books import Books
    from dsec_broker.record import Lease, NodeRecord
    from dsec_common.wire.lease import GrantLease
    from dsec_common.wire.node import NodeHeartbeat


def resize(books: Books, targets: Mapping[str, float], reason: str) -> None:
    """Give leases as many units as are said, within what was promised and what is free.

    Leases that are gone, and targets that change nothing, are fine. Those that shrink go first, so
    that the others find what they give.
    """
    cards = {card.uuid: card for card in books.cards}
    found = [books.lease(lease_id) for lease_id in targets]
    leases = [lease for lease in found if lease is not None]
    for lease in sorted(leases, key=lambda lease: targets[lease.lease_id] - lease.cu):
        slices = resized(lease.slices, cards, lease.demand, targets[lease.lease_id])
        if slices != lease.slices:
            books.resize(lease.lease_id, slices, reason)


class _Shrunk(NamedTuple):
    lease: Lease
    slices: tuple[Slice, ...]


def make_room(books: Books, asked: GrantLease) -> tuple[Slice, ...] | None:
    """Return slices for a request that finds none free, by shrinking less important leases.

    None below what was promised to it, the least important first, and no more of them than are
    needed. When all of them do not make enough room, nothing has changed.
    """
    chosen = _shrink_for(books, asked)
    if not chosen or not books.has_room_beside(shrunk.lease for shrunk in chosen):
        return None
    reason = f"room for {asked.service_class} work"
    for shrunk in chosen:
        books.resize(shrunk.lease.lease_id, shrunk.slices, reason)
    return books.pool.find(asked.wanted)


def room_for(books: Books, asked: GrantLease) -> bool:
    """Return whether :func:`make_room` would make it; the books stay as they are."""
    return bool(_shrink_for(books, asked))


def _shrink_for(books: Books, asked: GrantLease) -> list[_Shrunk]:
    """Return which leases to shrink for the request, and to what; none when it cannot be."""
    if books.is_full:
        return []
    rank, demand, pool = rank_of(asked.service_class, asked.priority), asked.wanted, books.pool
    shrunk: list[_Shrunk] = []
    fits = False
    for candidate in _shrinkable(books, rank):
        pool.give(candidate.lease.slices)
        pool.take(candidate.slices)
        shrunk.append(candidate)
        if pool.find(demand) is not None:
            fits = True
            break
    needed: list[_Shrunk] = []
    # The last one made the difference; of those before it, some may have helped nothing.
    for candidate in shrunk[:-1] if fits else shrunk:
        pool.give(candidate.slices)
        pool.take(candidate.lease.slices)
        if fits and pool.find(demand) is None:
            pool.give(candidate.lease.slices)
            pool.take(candidate.slices)
            needed.append(candidate)
    if not fits:
        return []
    needed.append(shrunk[-1])
    for candidate in needed:
        pool.give(candidate.slices)
        pool.take(candidate.lease.slices)
    return needed


def _shrinkable(books: Books, rank: Rank) -> list[_Shrunk]:
    """Return the less important leases at their minimum, in the order in which they shrink."""
    cards = {card.uuid: card for card in books.cards}
    found = []
    for lease in books.leases():
        lease_rank = rank_of(lease.service_class, lease.priority)
        if lease_rank >= rank:
            continue
        slices = least_of(lease.slices, cards, lease.demand)
        if slices is not None:
            found.append((lease_rank, lease.slices[0].card, lease.token, _Shrunk(lease, slices)))
    return [candidate for *_, candidate in sorted(found, key=lambda it: it[:3])]


# --- Telling the node -------------------------------------------------------------------------


def newly_resized(before: NodeRecord | None, after: NodeRecord | None) -> list[Lease]:
    """Return the leases that a write gave other slices, as far as a sandbox lives on them."""
    if before is None or after is None or before.leases == after.leases:
        return []
    known = {lease.lease_id: lease.resizes for lease in before.leases}
    return [
        lease
        for lease in after.leases
        if lease.confirmed_at and lease.resizes > known.get(lease.lease_id, lease.resizes)
    ]


def unheard(record: NodeRecord, heartbeat: NodeHeartbeat) -> list[Lease]:
    """Return the leases whose present slices the node has not heard of."""
    named = frozenset(heartbeat.lease_ids)
    return [
        lease
        for lease in record.leases
        if lease.resizes > heartbeat.lease_resizes.get(lease.lease_id, 0)
        and lease.lease_id in named
    ]
