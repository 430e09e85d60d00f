"""What the core wants done; the shell does it, in the order given."""

from __future__ import annotations

import msgspec

from dsec_common.errors import DsecError
from dsec_sandboxd.records import SandboxRecord


class SaveRecord(msgspec.Struct, frozen=True):
    """Keep the record in the StateDB, before any effect that follows."""

    record: SandboxRecord


class ForgetRecord(msgspec.Struct, frozen=True):
    """Drop the record of a sandbox that ended long ago."""

    local: str


class MakeSandbox(msgspec.Struct, frozen=True):
    """Have the kernel make it; then tell ``SandboxMade`` or ``SandboxNotMade``."""

    record: SandboxRecord


class HandOut(msgspec.Struct, frozen=True):
    """Give the record the sandbox of its id, which waits; then tell that it is made, or not."""

    record: SandboxRecord


class UnmakeSandbox(msgspec.Struct, frozen=True):
    """Have the kernel end it, ``delay_s`` seconds from now; then tell how that went."""

    record: SandboxRecord
    delay_s: float = 0.0


class PauseSandbox(msgspec.Struct, frozen=True):
    """Have the kernel stop its processes; then tell how that went."""

    record: SandboxRecord


class ResumeSandbox(msgspec.Struct, frozen=True):
    """Have the kernel let its processes go on; then tell how that went."""

    record: SandboxRecord


class TellTurn(msgspec.Struct, frozen=True):
    """Wake all who wait for a sandbox to stop, to run or to end; with the error, if it failed."""

    local: str
    error: DsecError | None


class ConfirmPlacement(msgspec.Struct, frozen=True):
    """Answer the caller and the scheduler: the sandbox runs."""

    placement_id: str
    record: SandboxRecord


class RefusePlacement(msgspec.Struct, frozen=True):
    """Answer the scheduler: no sandbox came of it."""

    placement_id: str
    error: DsecError


class ConfirmDeletion(msgspec.Struct, frozen=True):
    """Answer all who asked for the end: nothing is held any more."""

    record: SandboxRecord


class FailDeletion(msgspec.Struct, frozen=True):
    """Answer all who asked for the end: it has not succeeded yet and goes on."""

    local: str
    error: DsecError


class AnnounceRunning(msgspec.Struct, frozen=True):
    """Publish the event that it runs, and write its first step into the behaviour log."""

    record: SandboxRecord


class AnnouncePaused(msgspec.Struct, frozen=True):
    """Publish the event that it stands still, and write that into the behaviour log."""

    record: SandboxRecord


class AnnounceResumed(msgspec.Struct, frozen=True):
    """Publish the event that it runs again, and write that into the behaviour log."""

    record: SandboxRecord


class AnnounceResized(msgspec.Struct, frozen=True):
    """Publish the event that it has another share of its GPUs, and write that into its log."""

    record: SandboxRecord
    cu_before: float
    reason: str


class AnnounceEnded(msgspec.Struct, frozen=True):
    """Publish the event of its end, and write its last step into the behaviour log."""

    record: SandboxRecord


Effect = (
    SaveRecord
    | ForgetRecord
    | MakeSandbox
    | HandOut
    | UnmakeSandbox
    | PauseSandbox
    | ResumeSandbox
    | TellTurn
    | ConfirmPlacement
    | RefusePlacement
    | ConfirmDeletion
    | FailDeletion
    | AnnounceRunning
    | AnnouncePaused
    | AnnounceResumed
    | AnnounceResized
    | AnnounceEnded
)
