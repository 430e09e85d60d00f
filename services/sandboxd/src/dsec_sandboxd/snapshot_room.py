"""What the snapshots of a node may take, and do take: memory for copies, disk for images."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd import metrics

_WAIT_S: Final = 2.0


@dataclass(slots=True, kw_only=True)
class SnapshotLimits:
    """What the snapshots of a node may take."""

    memory_bytes: int
    disk_bytes: int
    disk_reserve_bytes: int
    per_project: int


class SnapshotRoom:
    """The books of it; the metrics show them."""

    def __init__(
        self, limits: SnapshotLimits, directory: Path, free_some: Callable[[], None]
    ) -> None:
        """Take the parts.

        Args:
            limits: what all of it may take.
            directory: where the images are.
            free_some: called when there is no memory left: has some freed soon.
        """
        self._limits = limits
        self._directory = directory
        self._free_some = free_some
        self._reserved_bytes = 0
        self._copies_bytes = 0
        self._images_bytes = 0
        self._freed = asyncio.Event()

    @property
    def memory_bytes(self) -> int:
        """The memory that copies take, with what is set aside for those on their way."""
        return self._reserved_bytes + self._copies_bytes

    @property
    def disk_bytes(self) -> int:
        """The disk that images take."""
        return self._images_bytes

    @contextlib.asynccontextmanager
    async def for_copy(self, wanted_bytes: int) -> AsyncIterator[int]:
        """Set memory aside for a copy, at most ``wanted_bytes``; yield how much there is.

        Raises:
            DsecError: ``exhausted`` when there is none, even after those on their way are done.
        """
        free = self._limits.memory_bytes - self.memory_bytes
        if free < wanted_bytes and self._reserved_bytes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    while free < wanted_bytes and self._reserved_bytes:
                        self._freed.clear()
                        await self._freed.wait()
                        free = self._limits.memory_bytes - self.memory_bytes
        if free <= 0:
            self._free_some()
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the node's snapshots take {self.memory_bytes} bytes of memory, all they may; it "
                "is freed when they are packed and what was forked from them has ended",
                retry_after_s=1.0,
                details={"reason": "snapshot_memory"},
            )
        reserved = min(free, wanted_bytes)
        self._reserve(reserved)
        try:
            yield reserved
        finally:
            self._reserve(-reserved)
            self._freed.set()

    def _reserve(self, size_bytes: int) -> None:
        self._reserved_bytes += size_bytes
        metrics.SNAPSHOT_MEMORY_BYTES.set(self.memory_bytes)

    def check_image(self, size_bytes: int) -> None:
        """Return if there is disk for an image.

        Raises:
            DsecError: ``exhausted`` when there is not.
        """
        free = os.statvfs(self._directory)
        if (
            self.disk_bytes + size_bytes > self._limits.disk_bytes
            or free.f_bavail * free.f_frsize < size_bytes + self._limits.disk_reserve_bytes
        ):
            raise DsecError(
                ErrorCode.EXHAUSTED,
                "the disk of the node's snapshots is full: delete some, or give them more room",
                details={"reason": "snapshot_disk"},
            )

    def copy_kept(self, size_bytes: int) -> None:
        """Count a copy."""
        self._copies_bytes += size_bytes
        metrics.SNAPSHOT_MEMORY_BYTES.set(self.memory_bytes)

    def copy_gone(self, size_bytes: int) -> None:
        """Count a copy no more."""
        self.copy_kept(-size_bytes)
        self._freed.set()

    def image_kept(self, size_bytes: int) -> None:
        """Count an image."""
        self._images_bytes += size_bytes
        metrics.SNAPSHOT_DISK_BYTES.set(self.disk_bytes)

    def image_gone(self, size_bytes: int) -> None:
        """Count an image no more."""
        self.image_kept(-size_bytes)
