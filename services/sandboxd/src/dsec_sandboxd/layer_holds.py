"""Which layers are mounted on this node: counted by sandboxes, kept ready for a while after."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
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


class LayerFiles(Protocol):
    """The part of the layer store that keeps the images of layers on this node."""

    async def local_image(self, digest: str, image_path: Path) -> Path:
        """Return the image as a checked file of this node, fetched if need be."""
        ...

    async def declare(self, held: Collection[str]) -> None:
        """Tell the other nodes which digests this one uses."""
        ...


class LayerHolds:
    """Counts who uses which layer; mounts at the first use, unmounts the least recent idle ones.

    A digest's mount and unmount never overlap: both run under its lock, and an unmount looks again
    whether the layer is still idle. Before a layer is mounted, the other nodes that share its store
    are told that it is in use, so that none of them deletes its image.
    """

    def __init__(
        self, kernel: LayerMounter, idle_max: int, files: LayerFiles | None = None
    ) -> None:
        self._kernel = kernel
        self._idle_max = idle_max
        self._files = files
        self._declared: frozenset[str] = frozenset()
        self._declaring = asyncio.Lock()
        self._users: dict[str, int] = {}
        self._mounted: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def mounted(self) -> frozenset[str]:
        """The digests that are mounted."""
        return frozenset(self._mounted)

    @property
    def in_use(self) -> frozenset[str]:
        """The digests that are mounted, or about to be, or that an adopted sandbox has mounted."""
        return frozenset(self._mounted.union(self._users, self._idle))

    async def declare(self) -> None:
        """Tell the other nodes what is in use now, and for another hour.

        Raises:
            DsecError: when the store cannot be told.
        """
        if self._files is None:
            return
        async with self._declaring:
            held = self.in_use
            await self._files.declare(held)
            self._declared = held

    def users(self, digest: str) -> int:
        """Return how many sandboxes use a layer."""
        return self._users.get(digest, 0)

    async def hold(
        self, layers: Sequence[tuple[str, Path]], *, unmounted: Collection[str] = ()
    ) -> None:
        """Count one more user of each layer and have all of them mounted.

        Args:
            layers: digests and images.
            unmounted: digests that are counted, and told to the other nodes, without a mount:
                something else stands for them.

        Raises:
            DsecError: ``layer_error``; then none of them is counted.
        """
        counted = [*(digest for digest, _ in layers), *unmounted]
        self.adopt(counted)
        try:
            if self._files is not None and not self._declared.issuperset(unmounted):
                await self.declare()
            for digest, image_path in layers:
                lock = self._locks.get(digest)
                if digest not in self._mounted or (lock is not None and lock.locked()):
                    await self._mount(digest, image_path)
        except BaseException:
            self.release(counted)
            raise

    def adopt(self, digests: Sequence[str]) -> None:
        """Count one more user of each layer, a sandbox that has them mounted already.

        They are mounted here when the next sandbox wants them.
        """
        for digest in digests:
            self._users[digest] = self._users.get(digest, 0) + 1
            self._idle.pop(digest, None)

    def doubt(self, digests: Sequence[str]) -> None:
        """Have layers mounted again at their next use: the kernel said that it lacks one.

        It does when the spawner died and an image was gone by then.
        """
        self._mounted.difference_update(digests)

    async def _mount(self, digest: str, image_path: Path) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._mounted:
                if self._files is not None:
                    if digest not in self._declared:
                        await self.declare()
                    image_path = await self._files.local_image(digest, image_path)
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
            lock = self._locks.get(digest)
            if digest in self._mounted or (lock is not None and lock.locked()):
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
            except Exception as error:  # noqa: BLE001  what stays mounted, the reconciler finds
                _log.warning("layer_not_released", digest=digest, error=str(error))

    async def close(self) -> None:
        """Return when no unmount runs any more; the kernel lets go of the rest by itself.

        The other nodes are told which layers this node's sandboxes, if any live on, still use.
        """
        while self._releasing:
            await asyncio.wait(set(self._releasing))
        if self._files is not None and self._declared:
            try:
                await self._files.declare(frozenset(self._users))
            except DsecError as error:
                _log.info("layers_still_declared", error=str(error))  # it expires
