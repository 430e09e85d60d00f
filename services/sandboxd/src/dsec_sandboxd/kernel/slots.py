"""Id ranges: every sandbox has 65,536 ids of the host to itself, and gives them back."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.adoption import base_ids
from dsec_sandboxd.kernel.interface import IDS_PER_SANDBOX
from dsec_sandboxd.kernel.protocol import SLOTS_MAX

if TYPE_CHECKING:
    from pathlib import Path

#: Below this the host and other tools (useradd, container engines) keep their ids.
FIRST_ID: Final = 0x0100_0000
#: As many blocks as fit below 2^32: as many daemons may share one host.
BLOCKS: Final = 14
_OWN_TIMEOUT_S: Final = 3.0
_OWN_PAUSE_S: Final = 0.01


class SlotPool:
    """Numbers for the living sandboxes of one daemon, the last one freed first.

    A slot's helper namespaces are kept by the spawner, so reusing the latest keeps their number
    small. Two daemons on one host take different blocks: each holds an abstract Unix socket whose
    name the kernel gives to one process only and takes back when it dies.
    """

    def __init__(self, node: str, unified: Path) -> None:
        """Claim a block: the one that living sandboxes of ``node`` are in, else a free one.

        A claim ends with its daemon, but sandboxes may outlive that: a block in which another
        node's sandboxes live is as taken as one with a daemon.

        Args:
            node: this node's name.
            unified: the root of the cgroup v2 tree, which shows who lives on this host.

        Raises:
            DsecError: ``exhausted`` when no block is free.
        """
        self._claim, self.block = _claim_block(node, unified)
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        """Return a free slot.

        Raises:
            DsecError: ``exhausted`` when all are in use.
        """
        if self._free:
            return self._free.pop()
        if self._next == SLOTS_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"all {SLOTS_MAX} id ranges of this node are in use: delete a sandbox first",
            )
        self._next += 1
        return self._next - 1

    def claim(self, slot: int, base_id: int) -> None:
        """Take the slot that a living sandbox of an earlier daemon is in.

        Raises:
            DsecError: ``conflict`` when the id range is not this daemon's to give, or in use.
        """
        free = slot in self._free or slot >= self._next
        if not 0 <= slot < SLOTS_MAX or base_id != self.base_id(slot) or not free:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"the ids from {base_id} on, which are the sandbox's, belong to another sandbox or "
                "daemon now",
            )
        if slot < self._next:
            self._free.remove(slot)
        else:
            self._free.extend(range(self._next, slot))
            self._next = slot + 1

    def taken(self) -> set[int]:
        """Return the slots that are in use."""
        return set(range(self._next)).difference(self._free)

    def give_back(self, slot: int) -> None:
        """Free a slot whose sandbox is dead."""
        self._free.append(slot)

    def base_id(self, slot: int) -> int:
        """Return the first host id of a slot."""
        return FIRST_ID + (self.block * SLOTS_MAX + slot) * IDS_PER_SANDBOX

    def close(self) -> None:
        """Let another daemon have the block."""
        self._claim.close()


def block_of(base_id: int) -> int:
    """Return the block that an id range belongs to."""
    return (base_id - FIRST_ID) // (SLOTS_MAX * IDS_PER_SANDBOX)


def _claim_block(node: str, unified: Path) -> tuple[socket.socket, int]:
    own = {block_of(base_id) for name, base_id in base_ids(unified) if name == node}
    for block in sorted(own):
        # Another daemon may hold it for the moment that it takes to see that we live in it.
        deadline = time.monotonic() + _OWN_TIMEOUT_S
        while (claim := _claim(block)) is None and time.monotonic() < deadline:
            time.sleep(_OWN_PAUSE_S)
        if claim is not None:
            return claim, block
    for block in range(BLOCKS):
        if _is_lived_in(block, node, unified):
            continue
        claim = _claim(block)
        # Looked at again: from now on nobody else can start a sandbox in the block.
        if claim is not None and not _is_lived_in(block, node, unified):
            return claim, block
        if claim is not None:
            claim.close()
    raise DsecError(
        ErrorCode.EXHAUSTED,
        f"{BLOCKS} sandbox daemons run on this host already: stop one",
    )


def _claim(block: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dsec-id-block-{block}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_lived_in(block: int, node: str, unified: Path) -> bool:
    """Return whether sandboxes of another node have ids of the block."""
    return any(block_of(base_id) == block for name, base_id in base_ids(unified) if name != node)
