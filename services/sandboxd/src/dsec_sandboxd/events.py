"""What can happen to a node, as its core sees it.

``now`` is Unix time in seconds, which may jump: it goes into records. ``monotonic_s`` are seconds
of a clock that does not: by it the core measures how long anything took.
"""

from __future__ import annotations

import msgspec

from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError
from dsec_common.wire.sandbox import EndCause
from dsec_sandboxd.kernel.interface import SandboxIdentity
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
    monotonic_s: float
    local: str
    create_ms: float
    identity: SandboxIdentity | None = None


class SandboxNotMade(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox could not be made; nothing of it is left."""

    now: float
    local: str
    error: DsecError


class NotHandedOut(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that had waited is of no use, and is dropped.

    Attributes:
        local: its id.
        instead: the sandbox as it is to be now: another one that waits, or a new one.
    """

    now: float
    local: str
    instead: SandboxRecord


class SandboxDied(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox ended without being asked to; nothing of it is left."""

    now: float
    local: str
    cause: EndCause
    detail: str


class DeletionAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Its owner wants the sandbox gone, or the platform does for a reason of its own."""

    now: float
    local: str
    cause: EndCause = EndCause.DELETED
    detail: str = ""


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
    monotonic_s: float


class VisitBegan(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox is in use until as many uses have ended as began.

    Attributes:
        wakes: it is to run for it. What asks from inside does not undo its owner's pause.
    """

    monotonic_s: float
    local: str
    wakes: bool = True


class VisitEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody is out of a sandbox again, or has given up getting in."""

    monotonic_s: float
    local: str


class PauseAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Its owner wants the sandbox to stand still."""

    local: str
    reason: str = "asked"


class PauseSucceeded(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a sandbox stand still."""

    now: float
    local: str


class PauseFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel could not stop a sandbox, which runs on."""

    monotonic_s: float
    local: str
    error: DsecError


class ResumeAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants the sandbox to run."""

    local: str


class ResumeSucceeded(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a sandbox go on."""

    now: float
    monotonic_s: float
    local: str


class ResumeFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel could not let a sandbox go on, which stands still."""

    local: str
    error: DsecError


class DrainAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox is to leave: once nobody has used it for a while, or when its time is over.

    Attributes:
        idle_s: for so long; a shorter idle time of its own stays.
        timeout_s: it ends after so long in any case, or sooner by itself; 0 for no such end.
    """

    now: float
    monotonic_s: float
    local: str
    idle_s: float
    timeout_s: float


class TouchAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Its owner wants the sandbox for longer: both its times begin anew.

    Attributes:
        ttl_s: a new time to live, 0 for no end; None keeps its own.
        idle_ttl_s: a new idle time, 0 for none; None keeps its own.
    """

    now: float
    monotonic_s: float
    local: str
    ttl_s: float | None = None
    idle_ttl_s: float | None = None


class LabelsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Its owner wants the sandbox to carry these labels, and no others."""

    local: str
    labels: dict[str, str]


class SlicesChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The lease of the sandbox has other slices now, of the same cards.

    Attributes:
        resizes: how often it has been changed; an older change than the last one is none.
    """

    local: str
    slices: tuple[Slice, ...]
    resizes: int
    reason: str


class NodeRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon has started again and read its records.

    ``adopted`` are the sandboxes that live on; of all others nothing is left in the kernel, and
    ``lost`` says of some why.
    """

    now: float
    monotonic_s: float
    records: tuple[SandboxRecord, ...]
    adopted: frozenset[str] = frozenset()
    lost: dict[str, str] = msgspec.field(default_factory=dict)


class SandboxRebased(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot was taken of a running sandbox, or it is being put back to one.

    Attributes:
        snapshot: where it is in the tree from now on.
        layers: what it has mounted now if it is being put back, else None.
        identity: its new one if it is being put back.
        asked_by: the message that asked for it to be put back.
    """

    local: str
    snapshot: str
    layers: tuple[str, ...] | None = None
    identity: SandboxIdentity | None = None
    asked_by: str = ""


class SandboxPutBack(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that was being put back has all that is its own."""

    local: str


class DrainBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The node takes no new sandboxes from now on."""

    now: float


class EvacuationBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon stops: every sandbox that is left ends."""

    now: float
    detail: str


TurnEvent = PauseAsked | PauseSucceeded | PauseFailed | ResumeAsked | ResumeSucceeded | ResumeFailed
"""What belongs to pausing one sandbox and to letting it go on."""

Event = (
    PlacementAsked
    | SandboxMade
    | SandboxNotMade
    | NotHandedOut
    | SandboxDied
    | DeletionAsked
    | SandboxUnmade
    | SandboxNotUnmade
    | ClockTicked
    | VisitBegan
    | VisitEnded
    | TurnEvent
    | TouchAsked
    | DrainAsked
    | LabelsAsked
    | SlicesChanged
    | SandboxRebased
    | SandboxPutBack
    | NodeRestarted
    | DrainBegan
    | EvacuationBegan
)
