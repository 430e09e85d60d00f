"""What a snapshot means for the record of the sandbox that it was taken of, or put back to. No I/O.

While a sandbox is put back its record says that it is ``inheriting``, from the moment in which the
new one is whole: a daemon that finds that gives it what the dead one had not got to.
"""

from __future__ import annotations

import msgspec

from dsec_sandboxd.effects import Effect, SaveRecord
from dsec_sandboxd.events import SandboxPutBack, SandboxRebased
from dsec_sandboxd.living import Living


def rebased(living: Living | None, event: SandboxRebased | SandboxPutBack) -> list[Effect]:
    """Note where a living sandbox is in the tree of snapshots, and what it has mounted."""
    if living is None:
        return []
    if isinstance(event, SandboxPutBack):
        living.record = msgspec.structs.replace(living.record, inheriting=False)
    elif event.layers is None:
        living.record = msgspec.structs.replace(living.record, snapshot=event.snapshot)
    else:
        living.record = msgspec.structs.replace(
            living.record,
            snapshot=event.snapshot,
            snapshot_layers=event.layers,
            identity=event.identity,
            inheriting=True,
            put_back_by=event.asked_by,
        )
    return [SaveRecord(living.record)]
