"""Snapshots of a shard in its journal: the same records, as few as there are now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dsec_chronus.effects import WriteFrame
from dsec_chronus.records import Record, size_of

FRAME_BYTES: Final = 256 * 1024
"""A frame takes no further change from here on; with the last one it fits a NATS message."""

FRAME_RECORDS: Final = 1024


def snapshot_parts(facts: Iterable[Record]) -> Iterator[WriteFrame]:
    """Yield the frames of a snapshot of all that is durable now."""
    records: list[Record] = []
    size, part = 0, 0
    for record in facts:
        if size >= FRAME_BYTES or len(records) >= FRAME_RECORDS:
            part += 1
            yield WriteFrame(records=tuple(records), snapshot_part=part)
            records, size = [], 0
        records.append(record)
        size += size_of(record)
    yield WriteFrame(records=tuple(records), snapshot_part=part + 1, snapshot_complete=True)
