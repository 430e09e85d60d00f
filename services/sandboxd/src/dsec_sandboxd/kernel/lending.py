"""What a living sandbox is lent for a while: what sandboxd asks of the kernel for its actions.

What is lent is seen by all of the sandbox. When it is taken back it is out of sight first, then
whatever still has it open or mapped is killed, so that nothing of it is in use when that returns.
A descriptor that is on its way in a socket at that moment has no process that it could be found
by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from dsec_sandboxd.kernel.interface import DeviceNode


@dataclass(frozen=True, slots=True, kw_only=True)
class LentMount:
    """Something to be mounted: a held layer, a directory of the host, or new and empty.

    Attributes:
        place: an empty directory of the host, below the sandbox's run directory.
        path: the same, as it is seen inside.
        layer: digest of a held layer.
        given: a directory of the host, seen read-only.
        size_bytes: of a new volume; it is in memory, which counts for the sandbox.
        inodes: how many files and directories a new volume may have.
    """

    place: Path
    path: str
    layer: str = ""
    given: Path | None = None
    size_bytes: int = 0
    inodes: int = 0


class LendingKernel(Protocol):
    """The part of the kernel seam that lends things to living sandboxes."""

    async def lend_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Have devices in a sandbox's ``/dev``; those that are there already are fine.

        Raises:
            DsecError: ``not_found``; ``exhausted`` when the sandbox has no inodes left.
        """
        ...

    async def take_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Have them there no more, and kill what has one open. Idempotent.

        Raises:
            DsecError: ``timeout`` when a process does not die.
        """
        ...

    async def lend_mount(self, local: str, mount: LentMount) -> None:
        """Mount something in a sandbox's run directory.

        Raises:
            DsecError: ``not_found``; ``layer_error`` for a layer that is not held; ``internal``
                when the place is not to be found inside, which its root can bring about.
        """
        ...

    async def volumes(self, local: str, places: Sequence[Path]) -> frozenset[int]:
        """Return the device numbers of the volumes that are mounted on places.

        They are not to be had any more once the places are removed; so that whoever takes mounts
        can do it again, they are to be written down before.
        """
        ...

    async def take_mounts(
        self, local: str, places: Sequence[Path], volumes: Collection[int] = ()
    ) -> None:
        """Remove places with what is mounted on them, and kill what uses a volume. Idempotent.

        Args:
            local: the sandbox.
            places: as they were lent.
            volumes: their device numbers, of volumes whose places may be gone already.

        Raises:
            DsecError: ``timeout`` when a process does not die.
        """
        ...
