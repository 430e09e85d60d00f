"""What can happen to the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError
from dsec_common.wire.node import NodeHeartbeat
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_scheduler.units import Granted


class Moment(msgspec.Struct, frozen=True):
    """When something happened: Unix time for other machines, monotonic time for waiting."""

    unix_s: float
    monotonic_s: float


class HeartbeatSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A node lives and has this."""

    heartbeat: NodeHeartbeat
    at: Moment


class CreateAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request wants a node within ``timeout_s``.

    ``local`` is fresh, and becomes the second token of the sandbox's id. With ``units`` it is made
    on their node or not at all.
    """

    create_id: int
    project: str
    request: CreateSandbox
    local: str
    timeout_s: float
    at: Moment
    units: Granted | None = None


class UnitsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """Units are leased on a node."""

    create_id: int
    node: str
    lease_id: str
    at: Moment
    slices: tuple[Slice, ...] = ()


class UnitsRefused(msgspec.Struct, frozen=True, kw_only=True):
    """There are none for it, however long it waits: its time is over, or it was given up."""

    create_id: int
    error: DsecError
    at: Moment


class PlaceSucceeded(msgspec.Struct, frozen=True, kw_only=True):
    """The node made the sandbox, and has told the caller."""

    create_id: int
    created: SandboxCreated
    at: Moment


class PlaceRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The node said no; it holds nothing."""

    create_id: int
    error: DsecError
    at: Moment


class PlaceUnanswered(msgspec.Struct, frozen=True, kw_only=True):
    """The node did not answer.

    ``maybe_made`` says that it may have made the sandbox all the same; otherwise the request never
    reached it.
    """

    create_id: int
    error: DsecError
    at: Moment
    maybe_made: bool = True


class PlaceResolved(msgspec.Struct, frozen=True, kw_only=True):
    """Asked again, the node has the sandbox running, or (None) has not."""

    create_id: int
    created: SandboxCreated | None
    at: Moment


class CreateAbandoned(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody wants the answer any more; no attempt is outstanding."""

    create_id: int
    at: Moment


class ForgetDue(msgspec.Struct, frozen=True, kw_only=True):
    """Time to drop nodes that have been silent for very long."""

    at: Moment


Event: TypeAlias = (
    HeartbeatSeen
    | CreateAsked
    | UnitsTaken
    | UnitsRefused
    | PlaceSucceeded
    | PlaceRefused
    | PlaceUnanswered
    | PlaceResolved
    | CreateAbandoned
    | ForgetDue
)
