"""Leases on Compute Units: services only."""

from __future__ import annotations

from dsec_common.wire.base import Message


class GrantLease(Message, frozen=True, kw_only=True):
    """Ask the broker for Compute Units on one node, or on any when ``node`` is empty.

    Attributes:
        holder: what the units are for, normally the create request's message id.
        ttl_s: the lease ends by itself unless renewed; 30 minutes by default.
    """

    project: str
    holder: str
    cu: float
    node: str = ""
    ttl_s: float = 1800.0


class LeaseGranted(Message, frozen=True, kw_only=True):
    """Units held until ``expires_at``; ``token`` grows with every grant, as a fence."""

    lease_id: str
    node: str
    cu: float
    expires_at: float
    token: int


class RenewLease(Message, frozen=True, kw_only=True):
    """Prolong a lease by ``ttl_s`` from now."""

    lease_id: str
    ttl_s: float = 1800.0


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
