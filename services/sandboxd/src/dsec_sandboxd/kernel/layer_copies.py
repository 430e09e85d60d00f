"""Copies of writable layers: what sandboxd asks of the kernel for its snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCopy:
    """A finished copy: a read-only mount that lives for as long as someone holds it.

    Attributes:
        mount_fd: the mount; the caller closes it.
        size_bytes: the memory that it takes.
        inodes: files, directories and links in it.
        hole_bytes: by which its files are larger than what they take.
        frozen_s: how long the sandbox stood still.
    """

    mount_fd: int
    size_bytes: int
    inodes: int
    hole_bytes: int
    frozen_s: float


class SnapshotKernel(Protocol):
    """The part of the kernel seam that copies and folds layers."""

    async def snapshot(
        self, local: str, *, fold: Sequence[str] = (), size_bytes: int, inodes: int
    ) -> LayerCopy:
        """Copy a sandbox's writable layer; it stands still meanwhile and runs on after, always.

        Args:
            local: the sandbox.
            fold: held layers right below it, topmost first, that become part of the copy.
            size_bytes: the most memory that the copy may take.
            inodes: the most files, directories and links.

        Raises:
            DsecError: ``not_found``; ``exhausted`` with reason ``snapshot_room`` when the copy
                does not fit; ``invalid`` for a tree so deep that its paths cannot be named;
                ``timeout``; ``unavailable`` when the helper or the spawner was killed.
        """
        ...

    async def fold(self, layers: Sequence[str], *, size_bytes: int, inodes: int) -> LayerCopy:
        """Fold held layers, topmost first, into one that hides what they hid; see `snapshot`."""
        ...

    async def hold_mount(self, digest: str, mount_fd: int) -> None:
        """Hold a copy as a layer of that name; the descriptor stays the caller's. Idempotent."""
        ...
