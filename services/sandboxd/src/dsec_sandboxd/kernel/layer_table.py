"""Held layers: one detached EROFS mount each, kept by the spawner under a number."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.kernel.protocol import LAYER_HANDLES, SpawnerKind, SpawnerRequest

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.kernel.spawner import Spawner


@dataclass(slots=True)
class _Layer:
    handle: int
    image_path: Path


class LayerTable:
    """Which layers are held, and under which number the spawner knows them."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}
        self._free_handles = list(range(LAYER_HANDLES - 1, -1, -1))
        self._lock = asyncio.Lock()

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
                raise DsecError(
                    ErrorCode.EXHAUSTED, f"{LAYER_HANDLES} layers are held: release one first"
                )
            layer = _Layer(self._free_handles.pop(), image_path)
            try:
                await _mount(spawner, digest, layer)
            except BaseException:
                self._free_handles.append(layer.handle)
                raise
            self._layers[digest] = layer

    async def release(self, spawner: Spawner | None, digest: str) -> None:
        """Let go of a layer. Idempotent; a dead spawner holds nothing any more."""
        async with self._lock:
            layer = self._layers.pop(digest, None)
            if layer is None:
                return
            if spawner is not None and spawner.alive:
                await spawner.request(SpawnerRequest(kind=SpawnerKind.DROP, layer=layer.handle))
            self._free_handles.append(layer.handle)

    async def mount_again(self, spawner: Spawner) -> None:
        """Give a new spawner all layers; one whose image is gone by now is no longer held."""
        async with self._lock:
            for digest, layer in list(self._layers.items()):
                try:
                    await _mount(spawner, digest, layer)
                except DsecError:
                    del self._layers[digest]
                    self._free_handles.append(layer.handle)


async def _mount(spawner: Spawner, digest: str, layer: _Layer) -> None:
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
