"""Making a layer of a snapshot: its chain folded into one, without what is left out."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, from_os_error, invalid
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.snapshot import PackSnapshot
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.layers.erofs import image_digest, read_superblock
from dsec_sandboxd.layers.importer import BuiltImage
from dsec_sandboxd.layers.limits import ImportWatch
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.snapshot_image import pack_image
from dsec_sandboxd.snapshot_residue import Exclusion, exclusion
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.snapshot_tree import SnapshotRecord

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.layer_copies import LayerCopy

_INODES_SLACK: Final = 1024
_MOUNT_SETATTR: Final = 442  # the same number on every machine
_OPEN_TREE: Final = 428
_OPEN_TREE_CLONE: Final = 1
_AT_EMPTY_PATH: Final = 0x1000
_MOUNT_ATTR_RDONLY: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)


class SnapshotPacker:
    """Makes layers of snapshots."""

    def __init__(self, store: SnapshotStore, layers: LayerStore, kernel: Kernel) -> None:
        self._store = store
        self._layers = layers
        self._kernel = kernel

    async def pack(self, record: SnapshotRecord, asked: PackSnapshot) -> Layer:
        """Publish what a snapshot changed as ``name@version`` in its project.

        Raises:
            DsecError: as :meth:`dsec_sandboxd.snapshots.Snapshots.pack`.
        """
        if asked.kind not in {LayerKind.WORKSPACE, LayerKind.TOOLKIT}:
            raise invalid_field("kind", f"{asked.kind.value}: use workspace or toolkit")
        left_out = exclusion(asked.exclude, clean=asked.clean)
        chain = [self._store.tree.layer(layer) for layer in record.chain]
        hold = await self._store.hold(record.local, record.chain)
        try:
            wanted = sum(layer.room_bytes for layer in chain)
            async with self._store.room.for_copy(wanted) as size_bytes:
                copy = await self._kernel.fold(
                    tuple(reversed(hold.digests)),
                    size_bytes=size_bytes,
                    inodes=sum(layer.inodes for layer in chain) + _INODES_SLACK,
                )
                try:
                    await asyncio.to_thread(_leave_out, copy.mount_fd, left_out)
                    async with self._store.turns.turn(record.project, record.sandbox):
                        return await self._publish(record.project, copy, asked)
                finally:
                    await asyncio.to_thread(os.close, copy.mount_fd)
        finally:
            hold.release()

    async def _publish(self, project: str, copy: LayerCopy, asked: PackSnapshot) -> Layer:
        async def build(staging: Path) -> BuiltImage:
            path = staging / "image.erofs"
            size = await pack_image(
                copy.mount_fd,
                path,
                size_bytes=copy.size_bytes,
                inodes=copy.inodes,
                hole_bytes=copy.hole_bytes,
            )
            digest = await asyncio.to_thread(image_digest, path, ImportWatch())
            return BuiltImage(
                path=path,
                digest=digest,
                size_bytes=size,
                entries=read_superblock(path).inodes,
                source_digest="",
                warnings=(),
            )

        return await self._layers.publish_built(
            project, asked.name, asked.version, build, kind=asked.kind, replace=asked.replace
        )


def _leave_out(mount_fd: int, left_out: Exclusion) -> None:
    """Delete what is left out from a copy that is ours alone. No link is followed.

    Raises:
        DsecError: ``invalid`` when the tree is too deep to be walked.
    """
    root = _writable(mount_fd)
    try:
        _prune(root, (), left_out)
    except RecursionError as error:
        raise invalid(
            "the snapshot has directories too deep to look through for what is left out: pack it "
            "without patterns, or remove them",
            reason="too_deep",
        ) from error
    except OSError as error:
        raise from_os_error("leaving out", error, "snapshot") from error
    finally:
        os.close(root)


def _prune(directory: int, path: tuple[str, ...], left_out: Exclusion) -> None:
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    before = os.fstat(directory)
    for name, is_directory in found:
        here = (*path, name)
        if left_out.matches(here):
            if is_directory:
                shutil.rmtree(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
        elif is_directory:
            inside = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
            )
            try:
                _prune(inside, here, left_out)
            finally:
                os.close(inside)
    os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))


def _writable(mount_fd: int) -> int:
    """Return the root of a copy by a second mount of it, which is writable."""
    clone: int = _libc.syscall(
        _OPEN_TREE, mount_fd, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
    )
    if clone < 0:
        raise _last_error("open_tree")
    attributes = struct.pack("=4Q", 0, _MOUNT_ATTR_RDONLY, 0, 0)
    if _libc.syscall(_MOUNT_SETATTR, clone, b"", _AT_EMPTY_PATH, attributes, len(attributes)) < 0:
        failure = _last_error("mount_setattr")
        os.close(clone)
        raise failure
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=clone)
    finally:
        os.close(clone)


def _last_error(operation: str) -> DsecError:
    number = ctypes.get_errno()
    return from_os_error(operation, OSError(number, os.strerror(number)), "snapshot")
