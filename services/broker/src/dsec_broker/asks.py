"""What is asked about one node's leases: worked into its books, and answered. Pure."""

from __future__ import annotations

from typing import assert_never

from dsec_broker.books import Books
from dsec_broker.effects import Answer, Outcome, Refuse
from dsec_broker.errors import bad_holder, lease_gone, node_not_ready
from dsec_broker.events import (
    Ask,
    GrantAsked,
    HeartbeatSeen,
    Moment,
    ReleaseAsked,
    RenewAsked,
    TransferAsked,
    UnlockAsked,
)
from dsec_broker.record import Lease
from dsec_common.errors import DsecError
from dsec_common.wire.lease import (
    HOLDER_CHARACTERS_MAX,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    LeasesUnlocked,
    UnlockedLease,
)
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX


def refuse(request_id: int, error: DsecError) -> Outcome:
    """Return the answer that is an error."""
    return Refuse(request_id=request_id, error=error)


def apply_ask(books: Books, ask: Ask, at: Moment) -> Outcome:
    """Change the books as asked and return the answer, which is true once they are written.

    Raises:
        DsecError: why not; the books are as they were.
    """
    match ask:
        case GrantAsked():
            lease = books.grant(f"{books.node}.{ask.local}", ask.asked, at.unix_s)
            return Answer(request_id=ask.request_id, reply=_granted(books.node, lease))
        case RenewAsked():
            lease = books.renew(ask.lease_id, at.unix_s, ask.ttl_s)
            renewed = LeaseRenewed(lease_id=lease.lease_id, expires_at=lease.expires_at)
            return Answer(request_id=ask.request_id, reply=renewed)
        case TransferAsked():
            lease = books.transfer(ask, f"{books.node}.{ask.local}", at.unix_s)
            return Answer(request_id=ask.request_id, reply=_granted(books.node, lease))
        case ReleaseAsked():
            books.release(ask.lease_id)
            released = LeaseReleased(lease_id=ask.lease_id)
            return Answer(request_id=ask.request_id, reply=released)
        case UnlockAsked():
            ended = books.unlock(ask.project, ask.lease_id, ask.reason)
            unlocked = LeasesUnlocked(leases=tuple(map(_unlocked, ended)), reason=ask.reason)
            return Answer(request_id=ask.request_id, reply=unlocked)
        case _:
            assert_never(ask)


def _granted(node: str, lease: Lease) -> LeaseGranted:
    return LeaseGranted(
        lease_id=lease.lease_id,
        node=node,
        cu=lease.cu,
        expires_at=lease.expires_at,
        token=lease.token,
        slices=lease.slices,
    )


def _unlocked(lease: Lease) -> UnlockedLease:
    return UnlockedLease(
        lease_id=lease.lease_id,
        holder=lease.holder,
        cu=lease.cu,
        token=lease.token,
        granted_at=lease.granted_at,
        slices=lease.slices,
    )


def flaw_of_names(holder: str, agent: str) -> DsecError | None:
    """Return why a lease cannot be held for these, or None when it can."""
    for name, most in ((holder, HOLDER_CHARACTERS_MAX), (agent, AGENT_CHARACTERS_MAX)):
        if len(name) > most or not name.isprintable():
            return bad_holder(len(name))
    return None


def is_doubtful(books: Books | None, change: object) -> bool:
    """Return whether a change is about a lease that this broker may not have heard of yet."""
    if isinstance(change, UnlockAsked):
        return True
    if isinstance(change, HeartbeatSeen):
        named = change.heartbeat.lease_ids
        return bool(named) if books is None else None in map(books.lease, named)
    if not isinstance(change, ReleaseAsked):
        return False
    return books is None or books.lease(change.lease_id) is None


def outcome_without_record(node: str, ask: Ask) -> Outcome:
    """Return what a request about a node without a record gets."""
    match ask:
        case GrantAsked():
            return refuse(ask.request_id, node_not_ready(node, "it is not known yet"))
        case RenewAsked() | TransferAsked():
            return refuse(ask.request_id, lease_gone(ask.lease_id))
        case UnlockAsked():
            return Answer(request_id=ask.request_id, reply=LeasesUnlocked(reason=ask.reason))
        case ReleaseAsked():
            # Nothing holds the units: what was asked for is so.
            return Answer(request_id=ask.request_id, reply=LeaseReleased(lease_id=ask.lease_id))
        case _:
            assert_never(ask)
