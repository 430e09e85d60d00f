"""Id ranges: every sandbox has 65,536 ids of the host to itself, and gives them back."""

from __future__ import annotations

import socket
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import IDS_PER_SANDBOX
from dsec_sandboxd.kernel.protocol import SLOTS_MAX

#: Below this the host and other tools (useradd, container engines) keep their ids.
FIRST_ID: Final = 0x0100_0000
#: As many blocks as fit below 2^32: as many daemons may share one host.
BLOCKS: Final = 14


class SlotPool:
    """Numbers for the living sandboxes of one daemon, the last one freed first.

    A slot's helper namespaces are kept by the spawner, so reusing the latest keeps their number
    small. Two daemons on one host take different blocks: each holds an abstract Unix socket whose
    name the kernel gives to one process only and takes back when it dies.
    """

    def __init__(self) -> None:
        self._claim, self.block = _claim_block()
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

    def give_back(self, slot: int) -> None:
        """Free a slot whose sandbox is dead."""
        self._free.append(slot)

    def base_id(self, slot: int) -> int:
        """Return the first host id of a slot."""
        return FIRST_ID + (self.block * SLOTS_MAX + slot) * IDS_PER_SANDBOX

    def close(self) -> None:
        """Let another daemon have the block."""
        self._claim.close()


def _claim_block() -> tuple[socket.socket, int]:
    for block in range(BLOCKS):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0dsec-id-block-{block}")
        except OSError:
            claim.close()
            continue
        return claim, block
    raise DsecError(
        ErrorCode.EXHAUSTED,
        f"{BLOCKS} sandbox daemons run on this host already: stop one",
    )
