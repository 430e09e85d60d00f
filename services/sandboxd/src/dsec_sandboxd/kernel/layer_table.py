"""Held layers: one detached EROFS mount each, kept by the spawner under a number."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.kernel.protocol import (
    HOLD_IS_MOUNT,
    LAYER_HANDLES,
    SpawnerKind,
    SpawnerRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dsec_sandboxd.kernel.spawner import Spawner


@dataclass(slots=True)
class _Layer:
    handle: int
    image_path: Path | None = None
    mount_fd: int = -1
    """Of a layer that has no image: our own hold on it, with which a new spawner gets it again."""


class LayerTable:
    """Which layers are held, and under which number the spawner knows them."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}
        self._free_handles = list(range(LAYER_HANDLES - 1, -1, -1))
        self._lock = asyncio.Lock()
        self._told: Spawner | None = None
        """The spawner that holds them. It may not be everyone's yet: it is still being told."""

    def handle(self, digest: str) -> int:
        """Return a held layer's number.

        Raises:
            DsecError: ``layer_error`` when it is not held.
        """
        layer = self._layers.get(digest)
        if layer is None:
            raise DsecError(
                ErrorCode.LAYER_ERROR, f"the layer {digest} is not held on this node: hold it first"
            )
        return layer.handle

    async def hold(self, spawner: Spawner, digest: str, image_path: Path) -> None:
        """Mount an image unless it is held already; see ``Kernel.hold_layer``."""
        async with self._lock:
            if digest in self._layers:
                return
            if not self._free_handles:
                raise _all_in_use()
            layer = _Layer(self._free_handles.pop(), image_path)
            try:
                await _mounted(spawner, digest, layer)
            except BaseException:
                self._free_handles.append(layer.handle)
                raise
            self._layers[digest] = layer

    async def hold_mount(self, spawner: Spawner, digest: str, mount_fd: int) -> None:
        """Hold a mount as it is, by a descriptor of our own; see ``SnapshotKernel.hold_mount``."""
        async with self._lock:
            if digest in self._layers:
                return
            if not self._free_handles:
                raise _all_in_use()
            descriptor = os.dup(mount_fd)
            layer = _Layer(self._free_handles.pop(), mount_fd=descriptor)
            try:
                await _mounted(spawner, digest, layer)
            except BaseException:
                os.close(layer.mount_fd)
                self._free_handles.append(layer.handle)
                raise
            self._layers[digest] = layer

    async def release(
        self,
        digest: str,
        unless: Callable[[str], bool] | None = None,
    ) -> bool:
        """Let go of a layer; return whether it was held. A dead spawner holds nothing any more.

        With ``unless`` it is asked at the last moment whether somebody needs it after all.
        """
        async with self._lock:
            if unless is not None and unless(digest):
                return False
            layer = self._layers.pop(digest, None)
            if layer is None:
                return False
            spawner = self._told
            try:
                if spawner is not None and spawner.alive:
                    await spawner.request(SpawnerRequest(kind=SpawnerKind.DROP, layer=layer.handle))
            except DsecError:
                if spawner is not None and spawner.alive:
                    raise
            finally:
                self._free_handles.append(layer.handle)
                if layer.mount_fd >= 0:
                    # Whoever closes a file system in memory last frees all that is in it.
                    await asyncio.to_thread(os.close, layer.mount_fd)
            return True

    def digests(self) -> list[str]:
        """Return what is held, sorted."""
        return sorted(self._layers)

    async def mount_again(self, spawner: Spawner) -> None:
        """Give a new spawner all layers; one whose image is gone by now is no longer held.

        Raises:
            DsecError: ``unavailable`` when the spawner has died; all are held for the next one.
        """
        async with self._lock:
            self._told = spawner
            for digest, layer in list(self._layers.items()):
                try:
                    await _mount(spawner, digest, layer)
                except DsecError:
                    if not spawner.alive:
                        raise
                    del self._layers[digest]
                    self._free_handles.append(layer.handle)
                    if layer.mount_fd >= 0:
                        os.close(layer.mount_fd)

    def close(self) -> None:
        """Close every descriptor; the spawner lets go of the rest by its end. Idempotent."""
        for layer in self._layers.values():
            if layer.mount_fd >= 0:
                os.close(layer.mount_fd)
        self._layers.clear()


def _all_in_use() -> DsecError:
    return DsecError(ErrorCode.EXHAUSTED, f"{LAYER_HANDLES} layers are held: release one first")


async def _mounted(spawner: Spawner, digest: str, layer: _Layer) -> None:
    """Mount a layer; when the waiter is cancelled, the spawner is left without it all the same."""
    mounting = asyncio.ensure_future(_mount(spawner, digest, layer))
    try:
        await asyncio.shield(mounting)
    except asyncio.CancelledError:
        await asyncio.wait({mounting})
        if not mounting.cancelled() and mounting.exception() is None:
            with contextlib.suppress(DsecError):  # a dead spawner holds nothing
                await spawner.request(SpawnerRequest(kind=SpawnerKind.DROP, layer=layer.handle))
        raise


async def _mount(spawner: Spawner, digest: str, layer: _Layer) -> None:
    if layer.image_path is None:
        request = SpawnerRequest(kind=SpawnerKind.HOLD, layer=layer.handle, flags=HOLD_IS_MOUNT)
        await spawner.request(request, [layer.mount_fd])
        return
    try:
        image_fd = os.open(layer.image_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        failure = from_os_error("open", error, str(layer.image_path))
        raise DsecError(
            ErrorCode.LAYER_ERROR,
            f"the image of layer {digest} cannot be read: {failure.message}",
            details=failure.details,
        ) from error
    try:
        request = SpawnerRequest(kind=SpawnerKind.HOLD, layer=layer.handle)
        await spawner.request(request, [image_fd])
    finally:
        os.close(image_fd)
