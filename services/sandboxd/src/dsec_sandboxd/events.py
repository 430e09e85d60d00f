"""What can happen to a node, as its core sees it. All times are Unix seconds."""

from __future__ import annotations

import msgspec

from dsec_common.errors import DsecError
from dsec_common.wire.sandbox import EndCause
from dsec_sandboxd.records import SandboxRecord


class PlacementAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler wants a sandbox here; the request is valid and its layers are known.

    Attributes:
        record: the sandbox as it would be.
        valid_until: after this the scheduler no longer counts on the answer.
        memory_bytes_available: what the kernel could hand out now.
    """

    now: float
    record: SandboxRecord
    valid_until: float
    memory_bytes_available: int


class SandboxMade(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel has made a sandbox; it answers commands."""

    now: float
    local: str
    create_ms: float


class SandboxNotMade(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox could not be made; nothing of it is left."""

    now: float
    local: str
    error: DsecError


class SandboxDied(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox ended without being asked to; nothing of it is left."""

    now: float
    local: str
    cause: EndCause
    detail: str


class DeletionAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Its owner wants the sandbox gone."""

    now: float
    local: str


class SandboxUnmade(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of a sandbox is left."""

    now: float
    local: str


class SandboxNotUnmade(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel could not end a sandbox; something of it is left."""

    now: float
    local: str
    error: DsecError


class ClockTicked(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed."""

    now: float


class NodeRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon has started again and read its records; the kernel holds none of them."""

    now: float
    records: tuple[SandboxRecord, ...]


class DrainBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The node takes no new sandboxes from now on."""

    now: float


class EvacuationBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon stops: every sandbox that is left ends."""

    now: float
    detail: str


Event = (
    PlacementAsked
    | SandboxMade
    | SandboxNotMade
    | SandboxDied
    | DeletionAsked
    | SandboxUnmade
    | SandboxNotUnmade
    | ClockTicked
    | NodeRestarted
    | DrainBegan
    | EvacuationBegan
)
