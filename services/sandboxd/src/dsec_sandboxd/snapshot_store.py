"""Where snapshot layers are: in memory at first, packed to the disk soon after, mounted when used.

A copy of a writable layer is a file system in memory, held by its mount. Sandboxes are made from it
at once. In the background it becomes an EROFS image in the node's snapshot directory; the StateDB
then learns of it, and from there on new sandboxes mount the image. The memory is free when the last
sandbox that was made from it has ended.

After a crash, what is in the StateDB has its image, and an image without a record is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from dsec_common.errors import DsecError, not_found
from dsec_common.subjects import ScopedId
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd import metrics
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.kernel.layer_copies import LayerCopy
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.snapshot_holds import (
    Hold,
    LayerStack,
    StoredLayer,
    image_name,
    memory_name,
)
from dsec_sandboxd.snapshot_image import disk_bytes, pack_image
from dsec_sandboxd.snapshot_records import SnapshotRecords
from dsec_sandboxd.snapshot_room import SnapshotLimits, SnapshotRoom
from dsec_sandboxd.snapshot_tree import SnapshotRecord, SnapshotTree
from dsec_sandboxd.snapshot_turns import PackingTurns

_log: Final = structlog.get_logger(__name__)

#: A snapshot that is deleted so soon is never packed: that of a short fork, for one.
PACK_AFTER_S: Final = 1.0
_IMAGES_IDLE_MAX: Final = 64


class SnapshotStore:
    """The layers of a node's snapshots."""

    def __init__(
        self,
        tree: SnapshotTree,
        kernel: Kernel,
        records: SnapshotRecords,
        holds: LayerHolds,
        *,
        directory: Path,
        limits: SnapshotLimits,
        image_of: Callable[[str], Path],
    ) -> None:
        """Take the parts.

        Args:
            tree: the core; nobody else changes it.
            kernel: copies and mounts.
            records: of durable snapshots.
            holds: of the layers below snapshots, which no garbage collection may take.
            directory: for the images.
            limits: what all of it may take.
            image_of: where the layer store has the image behind a digest.
        """
        self.tree = tree
        self.limits = limits
        self.room = SnapshotRoom(limits, directory, self._pack_all_now)
        self._kernel = kernel
        self._records = records
        self._holds = holds
        self._directory = directory
        self._image_of = image_of
        self._layers: dict[str, StoredLayer] = {}
        self._idle: dict[str, None] = {}
        self._work: set[asyncio.Task[None]] = set()
        self.turns = PackingTurns()
        self._closing = False

    # --- Starting and stopping ----------------------------------------------------------------

    def open(self) -> None:
        """Load what is durable; remove files that belong to nothing and records without a file.

        Raises:
            DsecError: when the directory cannot be made.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._records.load()
        whole = [record for record in found if self.image_path(record.local).exists()]
        lost = [record for record in found if record not in whole] + self.tree.load(whole)
        for record in lost:
            _log.error("snapshot_lost", snapshot=record.local, project=record.project)
            self._records.delete(record.local)
        known = {record.local for record in self.tree.all_layers()}
        for file in self._directory.iterdir():
            if file.name.removesuffix(".erofs") in known:
                continue
            if file.is_dir():
                file.rmdir()  # a mount point that a crash left
            else:
                file.unlink()
        for record in self.tree.all_layers():
            self._layers[record.local] = StoredLayer()
            self._layers[record.local].packed.set()
            self.room.image_kept(record.size_bytes)
            self._holds.adopt(record.layer_digests)

    def sweep(self) -> None:
        """Remove what nobody needs; to be called once all sandboxes that live on are adopted."""
        self._remove_all(self.tree.sweep())

    async def close(self) -> None:
        """Pack what somebody asked for and is not durable yet; let go of everything."""
        self._closing = True
        self._pack_all_now()
        while self._work:
            await asyncio.wait(set(self._work))
        for layer in self._layers.values():
            if layer.mount_fd >= 0:
                os.close(layer.mount_fd)
                layer.mount_fd = -1

    # --- For new sandboxes --------------------------------------------------------------------

    def restored(self, project: str, request: CreateSandbox) -> SnapshotRecord:
        """Return the snapshot that a create request starts from.

        Raises:
            DsecError: ``invalid`` when it also names layers; ``not_found`` when the project has no
                such snapshot on this node.
        """
        if request.base or request.workspace or request.toolkits:
            raise invalid_field(
                "snapshot",
                "a snapshot has its own layers; leave base, workspace and toolkits empty",
            )
        return self.find(project, request.snapshot)

    def find(self, project: str, snapshot_id: str) -> SnapshotRecord:
        """Return the project's snapshot of that full id.

        Raises:
            DsecError: ``not_found``, also for another node's; ``invalid`` for what is no id.
        """
        scoped = ScopedId.parse(snapshot_id, "snapshot id")
        if scoped.owner != self.tree.node:
            raise not_found(
                f"the snapshot {snapshot_id} is on node {scoped.owner}, not on {self.tree.node}",
                what="snapshot",
                snapshot_id=snapshot_id,
            )
        return self.tree.find(project, scoped.local)

    def layers_below(self, project: str, stack: LayerStack) -> tuple[Layer, ...]:
        """Return the layers of the layer store below a snapshot or in a sandbox, to be mounted.

        Their names may mean something else by now, or nothing: what counts is the content.
        """
        return tuple(
            Layer(
                project=project,
                name=reference.partition("@")[0],
                version=reference.partition("@")[2],
                digest=digest,
                kind=LayerKind.BASE,
                size_bytes=0,
                entries=0,
                created_at=0.0,
                source_digest="",
                image_path=self._image_of(digest),
            )
            for reference, digest in zip(stack.layer_references, stack.layer_digests, strict=True)
        )

    # --- Layers -------------------------------------------------------------------------------

    def image_path(self, layer: str) -> Path:
        """Return where the image of a snapshot layer is, or would be."""
        return self._directory / f"{layer}.erofs"

    def detail(self, layer: str) -> str:
        """Return why a layer is not durable, if packing it has failed."""
        known = self._layers.get(layer)
        return known.detail if known else ""

    def keep(self, record: SnapshotRecord, copy: LayerCopy) -> SnapshotRecord:
        """Take over a finished copy as a new snapshot's layer; it is packed soon."""
        record = self.tree.add(record)
        layer = StoredLayer(mount_fd=copy.mount_fd, memory_bytes=copy.size_bytes)
        self.room.copy_kept(copy.size_bytes)
        self._layers[record.local] = layer
        self._holds.adopt(record.layer_digests)
        self._start(self._pack_later(record.local, layer), f"pack {record.local}")
        return record

    async def hold(self, local: str, layers: Sequence[str]) -> Hold:
        """Have snapshot layers mounted for a sandbox; see ``SnapshotLayers``."""
        del local
        hold = Hold(self, layers)
        self.tree.mount(layers)
        try:
            for layer in layers:
                await self._take(self.tree.layer(layer), hold)
        except BaseException:
            hold.release()
            raise
        return hold

    def adopt(self, local: str, layers: Sequence[str]) -> Hold:
        """Count a sandbox that has them mounted already; see ``SnapshotLayers``."""
        del local
        self.tree.mount(layers)
        return Hold(self, layers)

    async def _take(self, record: SnapshotRecord, hold: Hold) -> None:
        layer = self._layers[record.local]
        if not (layer.in_memory or layer.mounted) or layer.lock.locked():
            async with layer.lock:
                await self._mount(record.local, layer)
                self._count(record.local, layer, hold)
        else:
            self._count(record.local, layer, hold)

    async def _mount(self, name: str, layer: StoredLayer) -> None:
        if layer.in_memory or layer.mounted:
            return
        if layer.mount_fd >= 0:
            await self._kernel.hold_mount(memory_name(name), layer.mount_fd)
            layer.in_memory = True
        else:
            await self._kernel.hold_layer(image_name(name), self.image_path(name))
            layer.mounted = True

    def _count(self, name: str, layer: StoredLayer, hold: Hold) -> None:
        # Once the image is mounted the copy has no new users.
        memory = not layer.mounted
        if memory:
            layer.memory_users += 1
        else:
            layer.image_users += 1
            self._idle.pop(name, None)
        hold.taken.append((name, memory))
        hold.digests = (*hold.digests, memory_name(name) if memory else image_name(name))

    def let_go(self, layers: Sequence[str], taken: Collection[tuple[str, bool]]) -> None:
        """Count one user less of each; what is garbage goes in the background."""
        for name, memory in taken:
            layer = self._layers.get(name)
            if layer is None:
                continue
            if memory:
                layer.memory_users -= 1
                self._drop_memory_if_unused(name, layer)
            else:
                layer.image_users -= 1
                if not layer.image_users:
                    self._idle[name] = None
        self._remove_all(self.tree.unmount(layers))
        while len(self._idle) > _IMAGES_IDLE_MAX:
            name = next(iter(self._idle))
            del self._idle[name]
            self._start(self._unmount(name), f"unmount {name}")

    async def _unmount(self, name: str) -> None:
        layer = self._layers.get(name)
        if layer is None:
            return
        async with layer.lock:
            if layer.mounted and not layer.image_users:
                layer.mounted = False
                await self._kernel.release_layer(image_name(name))

    def _drop_memory_if_unused(self, name: str, layer: StoredLayer) -> None:
        if layer.mount_fd < 0 and layer.memory_bytes and not layer.memory_users:
            self._start(self._drop_memory(name, layer), f"drop {name}")

    async def _drop_memory(self, name: str, layer: StoredLayer) -> None:
        async with layer.lock:
            if layer.memory_users or layer.mount_fd >= 0:
                return
            layer.in_memory = False
            try:
                await self._kernel.release_layer(memory_name(name))
            finally:
                self._forget_copy(layer)

    def _forget_copy(self, layer: StoredLayer) -> None:
        self.room.copy_gone(layer.memory_bytes)
        layer.memory_bytes = 0

    # --- Packing ------------------------------------------------------------------------------

    async def durable(self, name: str, timeout_s: float) -> None:
        """Have a layer packed now; return when it is, when that has failed, or after a time."""
        layer = self._layers.get(name)
        if layer is None:
            return
        if layer.packed.is_set() and layer.mount_fd >= 0:  # it failed before
            layer.packed.clear()
            self._start(self._pack_later(name, layer), f"pack {name}")
        layer.wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await layer.packed.wait()

    def _pack_all_now(self) -> None:
        """Have no copy wait: what is packed and unused frees its memory."""
        for layer in self._layers.values():
            layer.wanted.set()

    async def _pack_later(self, name: str, layer: StoredLayer) -> None:
        if not layer.wanted.is_set() and not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PACK_AFTER_S):
                    await layer.wanted.wait()
        try:
            if self._layers.get(name) is layer:
                record = self.tree.layer(name)
                async with self.turns.turn(record.project, record.sandbox):
                    if self._layers.get(name) is layer:
                        await self._pack(name, layer)
        except DsecError as error:
            layer.detail = error.message
            _log.warning("snapshot_not_packed", snapshot=name, error=str(error))
        except OSError as error:
            layer.detail = f"the node's disk refuses it: {error.strerror}"
            _log.warning("snapshot_not_packed", snapshot=name, error=str(error))
        finally:
            if layer.detail:
                metrics.SNAPSHOTS_NOT_PACKED.inc()
            layer.packed.set()

    async def _pack(self, name: str, layer: StoredLayer) -> None:
        record = self.tree.layer(name)
        if self._closing and record.transient:
            return
        self.room.check_image(record.size_bytes)
        image = self.image_path(name)
        layer.packing = asyncio.ensure_future(
            pack_image(
                layer.mount_fd,
                image,
                size_bytes=record.size_bytes,
                inodes=record.inodes,
                hole_bytes=record.hole_bytes,
            )
        )
        await asyncio.gather(layer.packing, return_exceptions=True)
        if self._layers.get(name) is not layer:  # it was deleted meanwhile
            image.unlink(missing_ok=True)
            return
        layer.packing.result()
        size = disk_bytes(image)
        record = msgspec.structs.replace(self.tree.layer(name), durable=True, size_bytes=size)
        try:
            self._records.put(record)
        except DsecError:
            image.unlink(missing_ok=True)
            raise
        self.tree.update(record)
        self.room.image_kept(size)
        layer.detail = ""
        async with layer.lock:  # new sandboxes mount the image from here on
            await self._kernel.hold_layer(image_name(name), image)
            layer.mounted = True
            descriptor, layer.mount_fd = layer.mount_fd, -1
        await asyncio.to_thread(os.close, descriptor)
        if not layer.image_users:
            self._idle[name] = None
        self._drop_memory_if_unused(name, layer)

    # --- Deleting -----------------------------------------------------------------------------

    def delete(self, local: str) -> int:
        """Delete a snapshot; return how many bytes of it others still need."""
        changed, garbage = self.tree.delete(local)
        kept_bytes = 0
        for record in changed:
            if record.local == local:
                kept_bytes = record.size_bytes
            if record.durable:
                self._records.put(record)
        self._remove_all(garbage)
        return kept_bytes

    def _remove_all(self, garbage: Sequence[SnapshotRecord]) -> None:
        for record in garbage:
            layer = self._layers.pop(record.local, None)
            if layer is not None:
                self._idle.pop(record.local, None)
                layer.wanted.set()
                self._forget_copy(layer)
                if record.durable:
                    self.room.image_gone(record.size_bytes)
                self._holds.release(record.layer_digests)
                self._start(self._remove(record, layer), f"remove {record.local}")

    async def _remove(self, record: SnapshotRecord, layer: StoredLayer) -> None:
        # The record first: a record without its image would be a snapshot that was lost.
        self._records.delete(record.local)
        self.image_path(record.local).unlink(missing_ok=True)
        if layer.packing is not None:
            layer.packing.cancel()
            await asyncio.wait({layer.packing})  # until then it has the descriptor
        async with layer.lock:
            descriptor, layer.mount_fd = layer.mount_fd, -1
        try:
            await self._kernel.release_layer(memory_name(record.local))
            await self._kernel.release_layer(image_name(record.local))
        finally:  # what the kernel did not let go of, the reconciler finds
            if descriptor >= 0:
                await asyncio.to_thread(os.close, descriptor)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        async def logged() -> None:
            try:
                await work
            except DsecError as error:
                _log.warning("snapshot_work_failed", work=name, error=str(error))

        task = asyncio.create_task(logged(), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
