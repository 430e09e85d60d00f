"""Waiting for Compute Units: gangs, why a request waits, giving one up, what schedulers tell."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.wire.base import Message
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated

GANG_MAX: Final = 256
"""Sandboxes of one gang."""


class CreateGang(Message, frozen=True, kw_only=True):
    """Ask for several sandboxes, all or none.

    None is made before the units of all are held, and when one cannot be made the others are
    removed again.

    Attributes:
        requests: what each is to be, at most :data:`GANG_MAX`. Class and priority are the first
            one's; none has a command or a key of its own.
        timeout_s: how long the caller waits for all of them.
        idempotency_key: the same key with the same arguments is the same gang; with others it is a
            ``conflict``. Empty means no key: then what a scheduler that dies had made is left.
    """

    requests: tuple[CreateSandbox, ...]
    timeout_s: float = 30.0
    idempotency_key: str = ""


class GangCreated(Message, frozen=True, kw_only=True):
    """All run, in the order of the requests."""

    sandboxes: tuple[SandboxCreated, ...]


class ExplainWaiting(Message, frozen=True, kw_only=True):
    """Ask why a request waits for Compute Units.

    Attributes:
        request_id: the ``message_id`` of its ``CreateSandbox`` or ``CreateGang``.
    """

    request_id: str


class WaitingExplained(Message, frozen=True, kw_only=True):
    """Why a request waits, and what would change that.

    Attributes:
        waited_s: since it was asked for.
        ahead: how many of its class go before it.
        constraint: what stands in its way: ``turn`` (others go first), ``capacity`` (not free now),
            ``price`` (batch work waits for cheaper cards for a while),
            ``quota``, or what no node could give even when empty: ``nodes``, ``model``, ``count``,
            ``island``, ``too_many_cu``, ``too_much_memory``.
        reason: for people.
        would_change: for people, what the caller or an operator can do, the easiest first.
        startable_cu: with so many as ``max_cu`` (and ``min_cu``) it would fit now; 0 for none.
        quota: the quota that it waits for.
        expected_at: Unix time by which enough units for it are expected to come back, by what was
            said of the sandboxes that hold them; 0 when that is not known. Who goes before it may
            take them.
    """

    request_id: str
    service_class: ServiceClass
    priority: int
    waited_s: float
    ahead: int
    constraint: str
    reason: str
    would_change: tuple[str, ...] = ()
    startable_cu: float = 0.0
    quota: str = ""
    expected_at: float = 0.0


class CancelWaiting(Message, frozen=True, kw_only=True):
    """Give up a request that waits for Compute Units or in the queue.

    Its caller is told ``conflict``. So is who asks for this when a node has been asked for the
    request already, with the ``sandbox_id`` in the details.
    """

    request_id: str


class WaitingCancelled(Message, frozen=True, kw_only=True):
    """It waits no more: nothing is made of it, whoever takes it from the queue."""

    request_id: str


class FindWaiting(Message, frozen=True, kw_only=True):
    """Scheduler to schedulers: whoever has this request explains it, or gives it up."""

    project: str
    request_id: str
    cancel: bool = False


class WaitingHead(msgspec.Struct, frozen=True, kw_only=True):
    """One of those that go first at a scheduler."""

    project: str
    demands: tuple[GpuDemand, ...]
    service_class: ServiceClass
    priority: int
    waited_s: float
    duration_s: float


class WaitingReport(Message, frozen=True, kw_only=True):
    """Event: what goes first at a scheduler, after each of its rounds while something waits.

    Attributes:
        waiting: how many wait there.
        waiting_cu: what they want at least, by class.
    """

    scheduler: str
    waiting: int = 0
    waiting_cu: dict[str, float] = msgspec.field(default_factory=dict)
    heads: tuple[WaitingHead, ...] = ()
