"""What changes of a sandbox while it goes on: its labels, its share of GPUs. No I/O.

The variables of a command are made of the record when it starts, so commands that start from now on
have the new share; MPS lets those that run keep theirs until they end.
"""

from __future__ import annotations

import math

import msgspec

from dsec_sandboxd.effects import AnnounceResized, Effect, SaveRecord
from dsec_sandboxd.events import LabelsAsked, SlicesChanged
from dsec_sandboxd.living import Living


def changed(living: Living | None, event: LabelsAsked | SlicesChanged) -> list[Effect]:
    """Take over what its owner or the broker changed; one that is over stays as it was.

    Of slices an older change than the last one, or the same again, is none.
    """
    if living is None:
        return []
    record = living.record
    if isinstance(event, LabelsAsked):
        living.record = msgspec.structs.replace(record, labels=event.labels)
        return [SaveRecord(living.record)]
    if event.resizes <= record.lease_resizes:
        return []
    living.record = msgspec.structs.replace(
        record, slices=event.slices, lease_resizes=event.resizes
    )
    cu_before = math.fsum(slice_.cu for slice_ in record.slices)
    return [SaveRecord(living.record), AnnounceResized(living.record, cu_before, event.reason)]
