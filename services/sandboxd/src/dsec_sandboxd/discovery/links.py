"""How fast cards talk: PCI Express to the host, NVLink among themselves. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Bytes a second and lane, in one direction: 2.5 and 5 GT/s with 8b/10b, then 128b/130b, and from
#: generation 6 on frames of 256 bytes that carry 242 (PCI Express Base Specification).
_LANE_BYTES_PER_S: Final[Mapping[int, float]] = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
    7: 128e9 / 8 * 242 / 256,
}


def pcie_bytes_per_s(generation: int, width: int) -> int:
    """Return what a link carries in one direction; 0 for one that nobody knows."""
    return int(_LANE_BYTES_PER_S.get(generation, 0.0) * max(0, width))


def islands(indices: Mapping[str, int], peers: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return the island of each card that is joined to another, by uuid.

    Args:
        indices: the driver's number of each card, by uuid; an island bears the lowest in it.
        peers: by uuid, what its links lead to: uuids, or the name of a switch.
    """
    leader = {name: name for name in indices}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for name, others in peers.items():
        for other in others:
            leader[find(other)] = find(name)
    members: dict[str, list[str]] = {}
    for uuid in indices:
        members.setdefault(find(uuid), []).append(uuid)
    return {
        uuid: f"nvlink-{min(indices[one] for one in joined)}"
        for joined in members.values()
        if len(joined) > 1
        for uuid in joined
    }
