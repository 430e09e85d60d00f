"""What a restart of the daemon means for each sandbox of the earlier one. No I/O.

One whose caller was answered and that the kernel still has lives on as it was. Any other has ended:
it was half-made or half-removed, or its processes are gone.
"""

from __future__ import annotations

import msgspec

from dsec_common.wire.sandbox import EndCause, SandboxState
from dsec_sandboxd.effects import Effect, ResumeSandbox, SaveRecord
from dsec_sandboxd.events import NodeRestarted
from dsec_sandboxd.living import Living
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.states import AWAKE_OR_ASLEEP

_RESTARTED = "the node's daemon was started again"


def may_live_on(record: SandboxRecord) -> bool:
    """Return whether somebody counts on the sandbox: it ran, and its end was not decided."""
    return record.state in AWAKE_OR_ASLEEP and record.end_cause is None


def after_restart(record: SandboxRecord, event: NodeRestarted) -> Living:
    """Return a sandbox of an earlier daemon; it has a cause of its end unless it lives on."""
    living = Living(record, 0.0)
    if may_live_on(record) and record.local in event.adopted:
        return living
    if record.end_cause is not None:  # its end was on the way, and is finished off
        living.end_cause, living.end_detail = record.end_cause, record.end_detail
        return living
    living.end_cause = EndCause.NODE_RESTARTED
    if record.state is SandboxState.CREATING:
        living.end_detail = f"{_RESTARTED} while it was being made"
    else:
        why = event.lost.get(record.local)
        living.end_detail = f"{_RESTARTED}: {why}" if why else _RESTARTED
    return living


def live_on(living: Living, now: float) -> list[Effect]:
    """Return what an adopted sandbox needs: one that was between two states runs again."""
    if living.record.state not in {SandboxState.PAUSING, SandboxState.RESUMING}:
        return []
    living.record = msgspec.structs.replace(
        living.record, state=SandboxState.RESUMING, paused_at=living.record.paused_at or now
    )
    return [SaveRecord(living.record), ResumeSandbox(living.record)]
