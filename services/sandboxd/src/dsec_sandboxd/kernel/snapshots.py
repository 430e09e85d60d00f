"""Copies of writable layers, held layers folded into one: the daemon's side of ``snapshot.c``."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.kernel.cgroups_tree import open_path
from dsec_sandboxd.kernel.command import out_of_descriptors
from dsec_sandboxd.kernel.layer_copies import LayerCopy
from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.protocol import SpawnerKind, SpawnerRequest, step_name
from dsec_sandboxd.kernel.spawner import creation_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.layer_table import LayerTable
    from dsec_sandboxd.kernel.sandbox import Sandbox

_RESULT: Final = struct.Struct("=iI6Q")
#: The helper gives up after 8 s by itself; this much later nothing will come.
_RESULT_TIMEOUT_S: Final = 12.0
_BLOCK_BYTES: Final = 4096


class Copying(KernelPart):
    """What of the real kernel copies layers."""

    _layers: LayerTable
    _copying: WeakKeyDictionary[Sandbox, asyncio.Lock]
    _copies: set[asyncio.Task[LayerCopy]]

    async def snapshot(
        self, local: str, *, fold: Sequence[str] = (), size_bytes: int, inodes: int
    ) -> LayerCopy:
        """Copy a sandbox's writable layer; see ``SnapshotKernel.snapshot``."""
        sandbox = self._require(local)
        request = SpawnerRequest(
            kind=SpawnerKind.SNAPSHOT,
            slot=sandbox.slot,
            base_id=self._base_id(sandbox.slot),
            layers=[self._layers.handle(digest) for digest in fold],
            disk_bytes=_whole_blocks(size_bytes),
            inodes=inodes,
        )
        return await self._in_background(self._copy_frozen(sandbox, request))

    async def fold(self, layers: Sequence[str], *, size_bytes: int, inodes: int) -> LayerCopy:
        """Fold held layers into one; see ``SnapshotKernel.fold``."""
        request = SpawnerRequest(
            kind=SpawnerKind.SNAPSHOT,
            layers=[self._layers.handle(digest) for digest in layers],
            disk_bytes=_whole_blocks(size_bytes),
            inodes=inodes,
        )
        return await self._in_background(self._copy(request, None))

    async def hold_mount(self, digest: str, mount_fd: int) -> None:
        """Hold a copy as a layer; see ``SnapshotKernel.hold_mount``."""
        await self._layers.hold_mount(await self._living_spawner(), digest, mount_fd)

    async def _in_background(self, work: object) -> LayerCopy:
        """Wait for a copy; when the waiter is cancelled it is finished all the same, and dropped.

        Its helper thaws the sandbox, and no other copy of it may begin before.
        """
        task: asyncio.Task[LayerCopy] = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop)
            raise

    async def _copy_frozen(self, sandbox: Sandbox, request: SpawnerRequest) -> LayerCopy:
        async with self._copying.setdefault(sandbox, asyncio.Lock()):
            if sandbox.ending is not None:
                raise unavailable("the sandbox ended before its snapshot was taken")
            async with sandbox.freezer.borrowed():
                return await self._copy(request, sandbox.cgroup)

    async def _copy(self, request: SpawnerRequest, cgroup: Cgroup | None) -> LayerCopy:
        spawner = await self._living_spawner()
        descriptors: list[int] = []
        if cgroup is not None:
            descriptors.append(open_path(cgroup.directory, os.O_RDONLY | os.O_DIRECTORY))
        try:
            _, received = await spawner.request(request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if len(received) != 2:  # noqa: PLR2004  the result's socket and the mount
            for descriptor in received:
                os.close(descriptor)
            raise out_of_descriptors()
        result_fd, mount_fd = received
        try:
            with socket.socket(fileno=result_fd) as channel:
                return await _result(channel, mount_fd)
        except BaseException:
            os.close(mount_fd)
            raise


async def _result(channel: socket.socket, mount_fd: int) -> LayerCopy:
    channel.setblocking(False)
    data = b""
    try:
        async with asyncio.timeout(_RESULT_TIMEOUT_S):
            data = await asyncio.get_running_loop().sock_recv(channel, _RESULT.size)
    except TimeoutError:
        pass
    if len(data) != _RESULT.size:
        # Whether the sandbox stands still is seen to by who lent it: it may be paused.
        raise unavailable("the process that copies the writable layer was killed: try again")
    error, step, size_bytes, inodes, _, hole_bytes, frozen_us, _ = _RESULT.unpack(data)
    if error:
        raise _copy_error(step, error)
    return LayerCopy(
        mount_fd=mount_fd,
        size_bytes=size_bytes,
        inodes=inodes,
        hole_bytes=hole_bytes,
        frozen_s=frozen_us / 1e6,
    )


def _copy_error(step: int, error: int) -> DsecError:
    base = creation_error(step, error)
    details = base.details | {"operation": step_name(step)}
    name = details["errno"]
    if name in {"ENOSPC", "ENOMEM"}:
        return DsecError(
            ErrorCode.EXHAUSTED,
            "there is no room for this snapshot: delete snapshots, wait until some are packed, or "
            "change less",
            details=details | {"reason": "snapshot_room"},
        )
    if name == "ENAMETOOLONG":
        return DsecError(
            ErrorCode.INVALID,
            "the writable layer has directories so deep that their paths cannot be named: remove "
            "them",
            details=details | {"reason": "too_deep"},
        )
    if name == "ETIMEDOUT":
        return DsecError(
            ErrorCode.TIMEOUT,
            "the snapshot took too long and was given up; the sandbox runs on: a process hangs in "
            "the kernel, or there is too much to copy",
            details=details,
        )
    return base


def _whole_blocks(size_bytes: int) -> int:
    """Return the size rounded up; a tmpfs of size 0 would have no limit."""
    return max(-(-size_bytes // _BLOCK_BYTES), 1) * _BLOCK_BYTES


def _drop(task: asyncio.Task[LayerCopy]) -> None:
    if not task.cancelled() and task.exception() is None:
        os.close(task.result().mount_fd)
