"""Which layers are mounted on this node: counted by sandboxes, kept ready for a while after."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from dsec_common.errors import DsecError

_log: Final = structlog.get_logger(__name__)


class LayerMounter(Protocol):
    """The part of the kernel seam that mounts layers."""

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        """Mount an image once."""
        ...

    async def release_layer(self, digest: str) -> None:
        """Let go of it."""
        ...


class LayerHolds:
    """Counts who uses which layer; mounts at the first use, unmounts the least recent idle ones.

    A digest's mount and unmount never overlap: both run under its lock, and an unmount looks again
    whether the layer is still idle.
    """

    def __init__(self, kernel: LayerMounter, idle_max: int) -> None:
        self._kernel = kernel
        self._idle_max = idle_max
        self._users: dict[str, int] = {}
        self._mounted: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def mounted(self) -> frozenset[str]:
        """The digests that are mounted."""
        return frozenset(self._mounted)

    def users(self, digest: str) -> int:
        """Return how many sandboxes use a layer."""
        return self._users.get(digest, 0)

    async def hold(self, layers: Sequence[tuple[str, Path]]) -> None:
        """Count one more user of each layer and have all of them mounted.

        Raises:
            DsecError: ``layer_error``; then none of them is counted.
        """
        for digest, _ in layers:
            self._users[digest] = self._users.get(digest, 0) + 1
            self._idle.pop(digest, None)
        try:
            for digest, image_path in layers:
                lock = self._locks.get(digest)
                if digest not in self._mounted or (lock is not None and lock.locked()):
                    await self._mount(digest, image_path)
        except BaseException:
            self.release([digest for digest, _ in layers])
            raise

    async def _mount(self, digest: str, image_path: Path) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._mounted:
                await self._kernel.hold_layer(digest, image_path)
                self._mounted.add(digest)

    def release(self, digests: Sequence[str]) -> None:
        """Count one user less of each layer; unmounting, where due, goes on in the background."""
        for digest in digests:
            left = self._users.get(digest, 0) - 1
            if left > 0:
                self._users[digest] = left
                continue
            self._users.pop(digest, None)
            self._idle[digest] = None
            self._idle.move_to_end(digest)
        while len(self._idle) > self._idle_max:
            digest, _ = self._idle.popitem(last=False)
            task = asyncio.create_task(self._unmount(digest), name=f"release layer {digest}")
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def _unmount(self, digest: str) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest in self._users or digest in self._idle or digest not in self._mounted:
                return
            self._mounted.discard(digest)
            try:
                await self._kernel.release_layer(digest)
            except DsecError as error:
                _log.warning("layer_not_released", digest=digest, error=str(error))

    async def close(self) -> None:
        """Return when no unmount runs any more; the kernel lets go of the rest by itself."""
        while self._releasing:
            await asyncio.wait(set(self._releasing))
