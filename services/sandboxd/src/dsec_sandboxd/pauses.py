"""Pausing a sandbox and having it run again: what each event means for one sandbox. No I/O.

A pause stops it, whatever runs in it; the next request has it go on. A request that comes while it
is being stopped waits for that and then has it go on (``wake``), so that no request is lost between
the two. Each of the functions takes what happened to one living sandbox and returns what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dsec_common.wire.sandbox import SandboxState
from dsec_sandboxd.effects import (
    AnnouncePaused,
    AnnounceResumed,
    Effect,
    PauseSandbox,
    ResumeSandbox,
    SaveRecord,
    TellTurn,
)
from dsec_sandboxd.events import (
    PauseAsked,
    PauseFailed,
    PauseSucceeded,
    ResumeAsked,
    ResumeFailed,
    ResumeSucceeded,
    TurnEvent,
)

if TYPE_CHECKING:
    from dsec_common.errors import DsecError
    from dsec_sandboxd.living import Living


def turn(living: Living, event: TurnEvent) -> list[Effect]:
    """Return what is to be done about one event of a sandbox's pausing."""
    match event:
        case PauseAsked(reason=reason):
            return begin_pause(living, reason)
        case PauseSucceeded(now=now):
            return paused(living, now)
        case PauseFailed(error=error, monotonic_s=now_s):
            return not_paused(living, error, now_s)
        case ResumeAsked():
            return wake(living)
        case ResumeSucceeded(now=now, monotonic_s=now_s):
            return resumed(living, now, now_s)
        case ResumeFailed(error=error):
            return not_resumed(living, error)
        case _:
            assert_never(event)


def begin_pause(living: Living, reason: str) -> list[Effect]:
    """Stop a sandbox. The intent is kept first: a crash on the way leaves it known as stopped."""
    if living.record.state is SandboxState.PAUSING:
        return []
    if living.record.state is not SandboxState.RUNNING:
        return [TellTurn(living.record.local, None)]
    living.wake = False
    record = living.move_to(SandboxState.PAUSING, pause_reason=reason)
    return [SaveRecord(record), PauseSandbox(record)]


def paused(living: Living, now: float) -> list[Effect]:
    """Note that it stands still; let it go on at once when somebody waits for that."""
    if living.record.state is not SandboxState.PAUSING:
        return []
    record = living.move_to(SandboxState.PAUSED, paused_at=now)
    effects: list[Effect] = [
        SaveRecord(record),
        AnnouncePaused(record),
        TellTurn(record.local, None),
    ]
    return effects + wake(living) if living.wake else effects


def not_paused(living: Living, error: DsecError, now_s: float) -> list[Effect]:
    """Note that it could not be stopped and runs on."""
    if living.record.state is not SandboxState.PAUSING:
        return []
    living.wake = False
    living.used_s = now_s
    record = living.move_to(SandboxState.RUNNING, pause_reason="")
    return [SaveRecord(record), TellTurn(record.local, error)]


def wake(living: Living) -> list[Effect]:
    """Have it run, if it does not."""
    match living.record.state:
        case SandboxState.PAUSED:
            living.wake = False
            record = living.move_to(SandboxState.RESUMING)
            return [SaveRecord(record), ResumeSandbox(record)]
        case SandboxState.PAUSING:
            living.wake = True
            return []
        case SandboxState.RUNNING:
            return [TellTurn(living.record.local, None)]
        case _:
            return []


def resumed(living: Living, now: float, now_s: float) -> list[Effect]:
    """Note that it runs again; its idle time begins anew."""
    if living.record.state is not SandboxState.RESUMING:
        return []
    living.used_s = now_s
    record = living.move_to(
        SandboxState.RUNNING,
        pause_reason="",
        paused_at=0.0,
        paused_s=living.record.stood_still_s(now),
    )
    # Whoever waits goes in first; a crash before the record finds it resuming, and lets it run.
    return [TellTurn(record.local, None), SaveRecord(record), AnnounceResumed(record)]


def not_resumed(living: Living, error: DsecError) -> list[Effect]:
    """Note that it stands still as before."""
    if living.record.state is not SandboxState.RESUMING:
        return []
    record = living.move_to(SandboxState.PAUSED)
    return [SaveRecord(record), TellTurn(record.local, error)]
