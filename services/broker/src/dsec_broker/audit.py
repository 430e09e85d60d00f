"""Conservation: on every node, at every moment, allocated + free = all there is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dsec_broker.record import NodeRecord
from dsec_broker.room import RECORD_BYTES_MAX
from dsec_common.compute.model import WHOLE_PERCENT, CardMode
from dsec_common.subjects import ScopedId

_ALL_FREE = 0


def violations(record: NodeRecord, free: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """Return what does not add up, in sentences; nothing when all is well.

    What leases hold is counted here from the record alone, without the index that grants use, so
    that a mistake in either shows. A slice of a card that the node no longer has counts nowhere.

    Args:
        record: as it was written.
        free: percent and bytes of each card or MIG instance, as the index of free slices has it.
    """
    totals = _totals(record)
    held_percent = dict.fromkeys(totals, _ALL_FREE)
    held_bytes = dict.fromkeys(totals, _ALL_FREE)
    found = []
    ids: set[str] = set()
    for lease in record.leases:
        if lease.lease_id in ids:
            found.append(f"lease {lease.lease_id} is there twice")
        ids.add(lease.lease_id)
        for slice_ in lease.slices:
            place = slice_.place
            if slice_.percent < 1 or slice_.memory_bytes < 0:
                found.append(f"lease {lease.lease_id} holds less than nothing of {place}")
            if place in totals:
                held_percent[place] += slice_.percent
                held_bytes[place] += slice_.memory_bytes
    for place, total_bytes in totals.items():
        free_percent, free_bytes = free.get(place, (_ALL_FREE, _ALL_FREE))
        found += _off(place, "percent", held_percent[place], free_percent, WHOLE_PERCENT)
        found += _off(place, "bytes", held_bytes[place], free_bytes, total_bytes)
    return tuple(found)


def check_record(node: str, record: NodeRecord) -> None:
    """Raise ``AssertionError`` when a node's record is not what every broker's writes make it."""
    ids = [lease.lease_id for lease in record.leases]
    tokens = [lease.token for lease in record.leases]
    assert record.node == node  # noqa: S101  invariant
    assert len(set(ids)) == len(ids)  # noqa: S101  invariant
    assert all(ScopedId.parse(lease_id).owner == node for lease_id in ids)  # noqa: S101  invariant
    assert tokens == sorted(set(tokens))  # noqa: S101  invariant
    assert all(token <= record.last_token for token in tokens)  # noqa: S101  invariant
    assert len(msgspec.msgpack.encode(record)) <= RECORD_BYTES_MAX  # noqa: S101  invariant


def _totals(record: NodeRecord) -> dict[str, int]:
    totals: dict[str, int] = {}
    for card in record.cards:
        if card.mode is CardMode.MIG:
            totals |= {instance.uuid: instance.memory_bytes for instance in card.mig}
        else:
            totals[card.uuid] = card.memory_bytes
    return totals


def _off(place: str, unit: str, held: int, free: int, total: int) -> list[str]:
    if held + free != total or free < 0:
        return [f"{place}: {held} {unit} allocated + {free} free is not {total}"]
    return []
