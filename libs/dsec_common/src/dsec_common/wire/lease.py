"""Leases on Compute Units: services only, but for a project's own ``force_unlock``."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_common.compute.model import Card, GpuDemand, ServiceClass, Slice
from dsec_common.wire.base import Message

LEASE_TTL_S = 1800.0
"""A lease that nobody renews ends after 30 minutes."""

UNLOCK_REASON_MAX: Final = 256
"""Characters of a reason: it stands in the node's record until its sandbox has heard of it."""

HOLDER_CHARACTERS_MAX: Final = 256
"""Of a holder, all printable: it stands in the node's record as long as its lease."""


class GrantLease(Message, frozen=True, kw_only=True):
    """Ask the broker for slices of the GPUs of one node, or of any when ``node`` is empty.

    The same message sent again gets the same lease: its ``message_id`` becomes part of the lease's
    id.

    Attributes:
        holder: what the units are for, normally the create request's message id.
        cu: just so many units: the short form of ``demand``.
        ttl_s: the lease ends by itself unless renewed.
        slices: just these, as they were found free; none for the broker's own choice.
        agent: the kind of agent that the units are for, if any; for the bill.
        holds_s: the holder is expected to need them no longer than this; 0 when nobody knows.
    """

    project: str
    holder: str
    cu: float = 0.0
    node: str = ""
    ttl_s: float = LEASE_TTL_S
    demand: GpuDemand | None = None
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    slices: tuple[Slice, ...] = ()
    agent: str = ""
    holds_s: float = 0.0

    @property
    def wanted(self) -> GpuDemand:
        """What is asked for, in either form."""
        return self.demand or GpuDemand(min_cu=self.cu, max_cu=self.cu)


class LeaseGranted(Message, frozen=True, kw_only=True):
    """Slices held until ``expires_at``; ``token`` grows with every grant on the node, as a fence.

    Attributes:
        cu: what the slices are worth together: at least what was asked for.
    """

    lease_id: str
    node: str
    cu: float
    expires_at: float
    token: int
    slices: tuple[Slice, ...] = ()


class RenewLease(Message, frozen=True, kw_only=True):
    """Prolong a lease by ``ttl_s`` from now."""

    lease_id: str
    ttl_s: float = LEASE_TTL_S


class LeaseRenewed(Message, frozen=True, kw_only=True):
    """The lease lives until ``expires_at``."""

    lease_id: str
    expires_at: float


class ReleaseLease(Message, frozen=True, kw_only=True):
    """Give a lease's units back; a lease that is gone already is fine."""

    lease_id: str


class LeaseReleased(Message, frozen=True, kw_only=True):
    """The units are free."""

    lease_id: str


class TransferLease(Message, frozen=True, kw_only=True):
    """Hand a lease's slices to another holder; :class:`LeaseGranted` answers.

    They are never free in between. The lease becomes a new one with an id and a larger token of its
    own, so whatever the old holder still does with the old id touches nothing. A sandbox that lives
    on the old one ends.

    Attributes:
        agent: the kind of agent that it is held for from now on; empty: the same as before.
    """

    lease_id: str
    holder: str
    ttl_s: float = LEASE_TTL_S
    agent: str = ""


class RevokeLease(Message, frozen=True, kw_only=True):
    """Broker to node: a lease that a sandbox there lives on is its own no more; the sandbox ends.

    Sent again with each heartbeat that still names the lease.
    """

    lease_id: str
    reason: str


class LeaseRevoked(Message, frozen=True, kw_only=True):
    """No sandbox of the node lives on the lease, or the one that did is ending."""

    lease_id: str


class ForceUnlock(Message, frozen=True, kw_only=True):
    """End leases of the asking project, whoever holds them: one, all of a node, or all.

    Attributes:
        lease_id: just this one.
        node: all on this node; with neither, all there are.
        reason: for the audit event, at most :data:`UNLOCK_REASON_MAX` characters.
        after: of all there are, those on nodes after this one: the last of an answer with ``more``.
    """

    lease_id: str = ""
    node: str = ""
    reason: str = ""
    after: str = ""


class UnlockedLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was ended by force, as it was."""

    lease_id: str
    holder: str
    cu: float
    token: int
    granted_at: float
    slices: tuple[Slice, ...] = ()


class LeasesUnlocked(Message, frozen=True, kw_only=True):
    """What was ended; also the audit event, which names the request as its cause.

    Nodes come in the order of their names. ``more`` says that no further one was looked at: the
    answer holds no more. Ask again.
    """

    leases: tuple[UnlockedLease, ...] = ()
    reason: str = ""
    more: bool = False


class ListLeases(Message, frozen=True, kw_only=True):
    """Ask the broker for what there is and who holds it, by node.

    Attributes:
        after: the last node of the page before.
    """

    after: str = ""


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, to other services.

    Attributes:
        agent: the kind of agent that it is held for; empty when nobody said.
        ends_at: Unix time by which its holder is expected to be gone; 0 when nobody knows. Of a
            sandbox whose time to live was changed since it is what was said first.
    """

    lease_id: str
    project: str
    holder: str
    cu: float
    granted_at: float
    expires_at: float
    token: int
    demand: GpuDemand
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    slices: tuple[Slice, ...] = ()
    agent: str = ""
    ends_at: float = 0.0


class NodeLeases(msgspec.Struct, frozen=True, kw_only=True):
    """One node's cards and the leases on them; ``ready`` nodes take new ones.

    Attributes:
        full: it takes none until some have ended: its record holds no more.
    """

    node: str
    ready: bool
    cards: tuple[Card, ...] = ()
    leases: tuple[HeldLease, ...] = ()
    full: bool = False


class LeaseList(Message, frozen=True, kw_only=True):
    """Nodes in the order of their names; ``more`` says that a further page exists."""

    nodes: tuple[NodeLeases, ...] = ()
    more: bool = False


class ConservationBroken(Message, frozen=True, kw_only=True):
    """Event: on some node allocated and free units do not add up to all there are."""

    node: str
    violations: tuple[str, ...]
