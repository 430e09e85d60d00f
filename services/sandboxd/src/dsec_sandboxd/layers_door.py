"""The door to the node's layer store: archives come in by pieces and become layers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid, not_found
from dsec_common.wire.files import FILE_CHUNK_BYTES
from dsec_common.wire.layer import (
    ArchiveFormat,
    GitHistory,
    ImportLayer,
    InspectLayer,
    LayerChunkStored,
    LayerImportProgress,
    LayerInfo,
    LayerList,
    LayerRemoved,
    ListLayers,
    RemoveLayer,
    TagLayer,
    UploadLayerChunk,
)
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.kernel.interface import Orphan
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layer_listing import layer_info, page_of
from dsec_sandboxd.layers.leaving_out import LeaveOut
from dsec_sandboxd.layers.limits import ImportProgress
from dsec_sandboxd.layers.names import validate_tag
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.snapshot_residue import import_exclusion

_log: Final = structlog.get_logger(__name__)

_HASH_PIECE_BYTES: Final = 1 << 20


class _Upload:
    """An archive on its way: a file that only this daemon sees."""

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.received_bytes = 0
        self.last_piece_at = now
        self.importing = False

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)


class LayersDoor:
    """The layer verbs of this node, for every project."""

    def __init__(
        self,
        node: str,
        store: LayerStore,
        holds: LayerHolds,
        *,
        events: EventPublisher,
        clock: Clock,
        directory: Path,
        upload_max_bytes: int,
        disk_reserve_bytes: int,
        uploads_max: int,
        imports_max: int,
        idle_s: float,
    ) -> None:
        self._node = node
        self._store = store
        self._holds = holds
        self._events = events
        self._clock = clock
        self._directory = directory
        self._upload_max_bytes = upload_max_bytes
        self._disk_reserve_bytes = disk_reserve_bytes
        self._uploads_max = uploads_max
        self._idle_s = idle_s
        self._uploads: dict[tuple[str, str], _Upload] = {}
        self._imports = asyncio.Semaphore(imports_max)

    def open(self) -> None:
        """Make the directory of uploads and remove what an earlier daemon left in it.

        Raises:
            DsecError: when it cannot be made.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._directory.iterdir():
                left.unlink()
        except OSError as error:
            raise from_os_error("mkdir", error, str(self._directory)) from error

    def close(self) -> None:
        """Remove every upload."""
        for key in list(self._uploads):
            self._drop(key)

    # --- Coming in ----------------------------------------------------------------------------

    async def upload(self, request: Request[UploadLayerChunk]) -> LayerChunkStored:
        """Keep one piece of an archive; pieces may come in any order, and twice.

        Raises:
            DsecError: ``invalid`` beyond the largest size; ``exhausted`` with too many uploads or
                a full disk; ``conflict`` while it is being imported.
        """
        message = request.message
        key = (request.project, subjects.validate_local(message.upload_id))
        if len(message.data) > FILE_CHUNK_BYTES:
            raise invalid_field("data", f"{len(message.data)} bytes; {FILE_CHUNK_BYTES} at most")
        end = message.offset + len(message.data)
        if message.offset < 0 or end > self._upload_max_bytes:
            raise invalid_field(
                "offset", f"{message.offset} is not within {self._upload_max_bytes} bytes"
            )
        upload = self._uploads.get(key) or self._begin(key)
        if upload.importing:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"upload {message.upload_id} is complete and being imported; begin another",
            )
        upload.last_piece_at = self._clock.now()
        self._check_room(upload, len(message.data))
        try:
            written = os.pwrite(upload.descriptor, message.data, message.offset)
        except OSError as error:
            self._drop(key)
            raise from_os_error("write", error, "the node's upload directory") from error
        if written != len(message.data):
            self._drop(key)
            raise DsecError(ErrorCode.EXHAUSTED, "the node's disk for uploads is full")
        upload.received_bytes += written
        return LayerChunkStored(cause_id=message.message_id, received_bytes=upload.received_bytes)

    def _check_room(self, upload: _Upload, size_bytes: int) -> None:
        free = os.fstatvfs(upload.descriptor)
        if free.f_bavail * free.f_frsize - size_bytes < self._disk_reserve_bytes:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"node {self._node} keeps the last {self._disk_reserve_bytes} bytes of its disk "
                "free; remove layers, or import on another node",
                retry_after_s=5.0,
            )

    def _begin(self, key: tuple[str, str]) -> _Upload:
        ours = sum(1 for project, _ in self._uploads if project == key[0])
        # No project may keep all others out.
        ours_max = max(1, self._uploads_max // 2)
        if len(self._uploads) >= self._uploads_max or ours >= ours_max:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"node {self._node} is receiving {len(self._uploads)} archives already, {ours} of "
                "them this project's; try later or another node",
                retry_after_s=2.0,
            )
        # A project's name has no dot, so no two uploads share a file.
        path = self._directory / f"{key[0]}.{key[1]}"
        try:
            upload = self._uploads[key] = _Upload(path, self._clock.now())
        except OSError as error:
            raise from_os_error("open", error, "the node's upload directory") from error
        return upload

    def _drop(self, key: tuple[str, str]) -> None:
        upload = self._uploads.pop(key, None)
        if upload is not None:
            with contextlib.suppress(OSError):
                upload.close()

    def remove_orphans(self) -> list[Orphan]:
        """Remove the files in the directory of uploads that are no upload."""
        known = {upload.path.name for upload in self._uploads.values()}
        found = []
        for left in list(self._directory.iterdir()):
            if left.name not in known and left.is_file():
                left.unlink(missing_ok=True)
                found.append(Orphan("upload", left.name))
        return found

    def remove_idle(self) -> None:
        """Remove uploads that nobody goes on with."""
        oldest = self._clock.now() - self._idle_s
        for key, upload in list(self._uploads.items()):
            if not upload.importing and upload.last_piece_at < oldest:
                _log.info("upload_abandoned", project=key[0], upload=key[1])
                self._drop(key)

    async def import_layer(self, request: Request[ImportLayer]) -> LayerInfo:
        """Make a layer of an upload; the upload is gone afterwards, whatever came of it.

        Progress is told by events.

        Raises:
            DsecError: ``not_found`` without the upload, ``invalid`` when size or hash differ or a
                name is malformed, ``conflict``, ``layer_error`` for forbidden content.
        """
        message = request.message
        key = (request.project, subjects.validate_local(message.upload_id))
        upload = self._uploads.get(key)
        if upload is None:
            raise not_found(
                f"there is no upload {message.upload_id} on node {self._node}; send its pieces "
                "first, to the same node",
                upload_id=message.upload_id,
            )
        if upload.importing:
            raise DsecError(
                ErrorCode.CONFLICT, f"upload {message.upload_id} is being imported already"
            )
        for tag in message.tags:
            validate_tag(tag)
        leaving_out = LeaveOut(
            paths=import_exclusion(message.exclude, clean=message.clean),
            git=message.git or (GitHistory.CUT if message.clean else GitHistory.KEEP),
        )
        upload.importing = True
        try:
            async with self._imports:
                await asyncio.to_thread(_verify, upload, message)
                imported = await self._store.import_layer(
                    request.project,
                    message.name,
                    message.version,
                    upload.path,
                    kind=message.kind,
                    archive_format=(
                        None if message.format is ArchiveFormat.AUTO else message.format
                    ),
                    image=message.image,
                    replace=message.replace,
                    leaving_out=leaving_out,
                    progress=lambda step: self._tell(request.project, message, step),
                )
        finally:
            self._drop(key)
        if imported.warnings:
            _log.info(
                "layer_changed_on_import",
                layer=imported.layer.reference,
                warnings=imported.warnings[:10],
            )
        layer = imported.layer
        for tag in message.tags:
            layer = await self._store.tag(request.project, layer.name, tag, layer.version)
        return msgspec.structs.replace(
            layer_info(layer, self._node, message.message_id), left_out=imported.left_out
        )

    def _tell(self, project: str, message: ImportLayer, step: ImportProgress) -> None:
        self._events.publish(
            subjects.layer_event(project, message.upload_id, "progress"),
            LayerImportProgress(
                cause_id=message.message_id,
                upload_id=message.upload_id,
                stage=step.stage,
                done_bytes=step.done_bytes,
                total_bytes=step.total_bytes,
            ),
        )

    # --- What is there ------------------------------------------------------------------------

    async def list(self, request: Request[ListLayers]) -> LayerList:
        """Return a page of the project's layers, sorted by reference."""
        layers = await self._store.list(request.project)
        return page_of(layers, self._node, self._store.store_id, request.message)

    async def tag(self, request: Request[TagLayer]) -> LayerInfo:
        """Let a tag mean a version; return that layer.

        Raises:
            DsecError: ``not_found`` for an unknown version; ``invalid``.
        """
        message = request.message
        layer = await self._store.tag(request.project, message.name, message.tag, message.version)
        return layer_info(layer, self._node, message.message_id)

    async def inspect(self, request: Request[InspectLayer]) -> LayerInfo:
        """Return one layer.

        Raises:
            DsecError: ``not_found`` or ``invalid``.
        """
        layer = await self._store.inspect(request.project, request.message.reference)
        return layer_info(layer, self._node, request.message.message_id)

    async def remove(self, request: Request[RemoveLayer]) -> LayerRemoved:
        """Remove a reference; running sandboxes keep the image.

        Raises:
            DsecError: ``not_found`` or ``invalid``.
        """
        message = request.message
        await self._store.remove(request.project, message.reference)
        try:
            await self._store.collect_garbage(self._holds.in_use)
        except DsecError as error:
            _log.warning("garbage_not_collected", error=str(error))
        return LayerRemoved(cause_id=message.message_id, reference=message.reference)


def _verify(upload: _Upload, message: ImportLayer) -> None:
    """Return if the upload is what was announced. Reads all of it; call it in a thread.

    Raises:
        DsecError: ``invalid`` when size or hash differ.
    """
    # A file can be larger than what was sent; no time is spent on holes.
    size_bytes = min(os.fstat(upload.descriptor).st_size, upload.received_bytes)
    if size_bytes != message.size_bytes:
        raise invalid(
            f"{size_bytes} bytes were uploaded, {message.size_bytes} were announced; send all "
            "pieces again",
            field="size_bytes",
        )
    digest = hashlib.sha256()
    offset = 0
    while piece := os.pread(upload.descriptor, _HASH_PIECE_BYTES, offset):
        digest.update(piece)
        offset += len(piece)
    if digest.hexdigest() != message.sha256.lower():
        raise invalid(
            f"the upload's sha256 is {digest.hexdigest()}, {message.sha256[:64]} was announced; "
            "send all pieces again",
            field="sha256",
        )
