"""What the scheduler's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError
from dsec_common.wire.sandbox import SandboxCreated


class TakeUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Lease units, waiting for them if need be, on a node that ``SchedulerState.may_take`` allows.

    ``UnitsTaken`` or ``UnitsRefused`` must follow. The same nodes are allowed for equal ``needs``.
    """

    create_id: int
    needs: tuple[object, ...]
    timeout_s: float


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the node for the sandbox; it counts only if it is ready by ``valid_until`` (Unix time).

    ``PlaceSucceeded``, ``PlaceRefused`` or ``PlaceUnanswered`` must follow.
    """

    create_id: int
    node: str
    local: str
    lease_id: str
    valid_until: float
    slices: tuple[Slice, ...] = ()


class Resolve(msgspec.Struct, frozen=True, kw_only=True):
    """Find out whether the node has the sandbox; ``PlaceResolved`` must follow.

    After ``valid_until``, Unix time, the node will not make it any more.
    """

    create_id: int
    node: str
    local: str
    lease_id: str
    valid_until: float


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True):
    """Give units back; should it fail, the lease runs out by itself."""

    lease_id: str


class Succeed(msgspec.Struct, frozen=True, kw_only=True):
    """The request is done. ``told`` says whether the node has answered the caller."""

    create_id: int
    created: SandboxCreated
    told: bool


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """The request is done: there will be no sandbox."""

    create_id: int
    error: DsecError


Step: TypeAlias = TakeUnits | Place | Resolve | ReleaseLease
"""What a creation goes through."""

Effect: TypeAlias = Step | Succeed | Refuse
