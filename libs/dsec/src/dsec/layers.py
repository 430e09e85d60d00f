"""Layers: the read-only trees that sandboxes are made of, in the nodes' stores."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.archive import tar_pieces, tree_size_bytes
from dsec.channel import Channel
from dsec.events import EventHub
from dsec.window import drained, in_window
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.layer import (
    ArchiveFormat,
    ImportLayer,
    InspectLayer,
    LayerChunkStored,
    LayerImportProgress,
    LayerInfo,
    LayerKind,
    LayerList,
    LayerRemoved,
    ListLayers,
    RemoveLayer,
    UploadLayerChunk,
)
from dsec_common.wire.node import ListNodes, NodeList
from dsec_common.wire.sandbox import FILE_CHUNK_BYTES

Progress = Callable[[str, int, int], None]
"""Told ``(stage, done_bytes, total_bytes)``; a total of 0 means that it is not known."""

_TIMEOUT_S: Final = 30.0
_IMPORT_TIMEOUT_S: Final = 900.0


class Layers:
    """The project's layers.

    Nodes that share a directory share a store; the others have their own. An import goes to every
    store, so that the scheduler is free to choose; ``nodes`` of a layer says where it is.
    """

    def __init__(self, channel: Channel, events: EventHub) -> None:
        self._channel = channel
        self._events = events

    # --- Importing ----------------------------------------------------------------------------

    async def import_directory(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str,
        name: str,
        version: str,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of a local directory's tree, sent as a tar stream made on the fly.

        Args:
            path: the directory that becomes the layer's root.
            kind: ``base``, ``workspace`` or ``toolkit``.
            name: the layer's name.
            version: its version; the two make the reference ``name@version``.
            replace: let the reference point to other content than before.
            progress: told how far it is.

        Raises:
            DsecError: ``invalid`` or ``layer_error`` for content that no layer may hold,
                ``conflict`` when the reference holds other content, ``unavailable`` without nodes.
        """
        directory = Path(path)
        total = await asyncio.to_thread(tree_size_bytes, directory)
        return await self._import(
            lambda: tar_pieces(directory, FILE_CHUNK_BYTES),
            total,
            ImportLayer(
                upload_id="",
                size_bytes=0,
                sha256="",
                kind=_kind(kind),
                name=name,
                version=version,
                replace=replace,
            ),
            progress,
        )

    async def import_tar(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str,
        name: str,
        version: str,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of a tar archive, plain or compressed; see :meth:`import_directory`."""
        return await self._import_file(
            Path(path), ArchiveFormat.TAR, _kind(kind), name, version, replace, progress
        )

    async def import_oci(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str = LayerKind.BASE,
        name: str,
        version: str,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make one layer of a container image: an OCI layout (directory or tar), ``docker save``.

        Its layers are flattened in order; see :meth:`import_directory`.
        """
        source = Path(path)
        if not source.is_dir():  # noqa: ASYNC240  one stat before it is all read
            return await self._import_file(
                source, ArchiveFormat.OCI, _kind(kind), name, version, replace, progress
            )
        total = await asyncio.to_thread(tree_size_bytes, source)
        return await self._import(
            lambda: tar_pieces(source, FILE_CHUNK_BYTES),
            total,
            ImportLayer(
                upload_id="",
                size_bytes=0,
                sha256="",
                kind=_kind(kind),
                name=name,
                version=version,
                format=ArchiveFormat.OCI,
                replace=replace,
            ),
            progress,
        )

    async def _import_file(  # noqa: PLR0917  private: one call site per format, all given
        self,
        path: Path,
        archive_format: ArchiveFormat,
        kind: LayerKind,
        name: str,
        version: str,
        replace: bool,
        progress: Progress | None,
    ) -> LayerInfo:
        try:
            total = path.stat().st_size  # noqa: ASYNC240  as above
        except OSError as error:
            raise invalid(f"cannot read {path}: {error.strerror}") from error
        return await self._import(
            lambda: _file_pieces(path),
            total,
            ImportLayer(
                upload_id="",
                size_bytes=0,
                sha256="",
                kind=kind,
                name=name,
                version=version,
                format=archive_format,
                replace=replace,
            ),
            progress,
        )

    async def _import(
        self,
        pieces: Callable[[], AsyncGenerator[bytes, None]],
        total_bytes: int,
        request: ImportLayer,
        progress: Progress | None,
    ) -> LayerInfo:
        layer: LayerInfo | None = None
        nodes: list[str] = []
        for store in await self._stores():
            layer = await self._import_to(store[0], pieces(), total_bytes, request, progress)
            nodes += store
        if layer is None:
            raise _no_nodes()
        return msgspec.structs.replace(layer, nodes=tuple(sorted(nodes)))

    async def _import_to(
        self,
        node: str,
        pieces: AsyncGenerator[bytes, None],
        total_bytes: int,
        request: ImportLayer,
        progress: Progress | None,
    ) -> LayerInfo:
        upload_id = new_id()
        size_bytes, sha256 = await self._upload(node, upload_id, pieces, total_bytes, progress)

        def show(message: Message) -> None:
            if isinstance(message, LayerImportProgress) and progress:
                progress(message.stage, message.done_bytes, message.total_bytes)

        subject = subjects.layer_event(self._channel.project, upload_id, "progress")
        async with self._events.listening(subject, show):
            return await self._channel.ask(
                subjects.layer(self._channel.project, node, "import"),
                msgspec.structs.replace(
                    request, upload_id=upload_id, size_bytes=size_bytes, sha256=sha256
                ),
                LayerInfo,
                timeout_s=_IMPORT_TIMEOUT_S,
            )

    async def _upload(
        self,
        node: str,
        upload_id: str,
        pieces: AsyncGenerator[bytes, None],
        total_bytes: int,
        progress: Progress | None,
    ) -> tuple[int, str]:
        digest = hashlib.sha256()
        size_bytes = 0
        subject = subjects.layer(self._channel.project, node, "upload")

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, LayerChunkStored]]:
            nonlocal size_bytes
            async for data in pieces:
                digest.update(data)
                yield self._channel.ask(
                    subject,
                    UploadLayerChunk(upload_id=upload_id, offset=size_bytes, data=data),
                    LayerChunkStored,
                    timeout_s=_TIMEOUT_S,
                    repeatable=True,
                )
                size_bytes += len(data)
                if progress:
                    progress("upload", size_bytes, max(total_bytes, size_bytes))

        async with aclosing(pieces):
            await drained(in_window(jobs()))
        return size_bytes, digest.hexdigest()

    # --- Looking up ---------------------------------------------------------------------------

    async def _stores(self) -> list[list[str]]:
        """Return the ready nodes, those that share a store together.

        Raises:
            DsecError: ``unavailable`` when there are none.
        """
        reply = await self._channel.ask(
            subjects.node(self._channel.project, "list"),
            ListNodes(),
            NodeList,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
        )
        stores: dict[str, list[str]] = {}
        for node in reply.nodes:
            if node.ready:
                stores.setdefault(node.heartbeat.store_id or node.node, []).append(node.node)
        if not stores:
            raise _no_nodes()
        return list(stores.values())

    async def list(self) -> list[LayerInfo]:
        """Return the project's layers in all stores, sorted by reference."""
        found: dict[tuple[str, str], LayerInfo] = {}
        for nodes in await self._stores():
            reply = await self._channel.ask(
                subjects.layer(self._channel.project, nodes[0], "list"),
                ListLayers(),
                LayerList,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
            )
            for layer in reply.layers:
                key = (layer.reference, layer.digest)
                known = found.get(key, layer)
                found[key] = msgspec.structs.replace(
                    known, nodes=tuple(sorted({*known.nodes, *nodes}))
                )
        return [found[key] for key in sorted(found)]

    async def inspect(self, reference: str) -> LayerInfo:
        """Return one layer by ``name@version`` or ``sha256:…``.

        Raises:
            DsecError: ``not_found`` when no store has it; ``invalid`` for an impossible reference.
        """
        layer: LayerInfo | None = None
        missing: DsecError | None = None
        where: list[str] = []
        for nodes in await self._stores():
            try:
                layer = await self._channel.ask(
                    subjects.layer(self._channel.project, nodes[0], "inspect"),
                    InspectLayer(reference=reference),
                    LayerInfo,
                    timeout_s=_TIMEOUT_S,
                    repeatable=True,
                )
                where += nodes
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                missing = error
        if layer is None:
            raise missing or _no_nodes()
        return msgspec.structs.replace(layer, nodes=tuple(sorted(where)))

    async def remove(self, reference: str) -> None:
        """Remove a reference from all stores; an image goes when nothing refers to it.

        Raises:
            DsecError: ``not_found`` when no store has it.
        """
        removed = False
        missing: DsecError | None = None
        for nodes in await self._stores():
            try:
                await self._channel.ask(
                    subjects.layer(self._channel.project, nodes[0], "remove"),
                    RemoveLayer(reference=reference),
                    LayerRemoved,
                    timeout_s=_TIMEOUT_S,
                )
                removed = True
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                missing = error
        if not removed:
            raise missing or _no_nodes()


async def _file_pieces(path: Path) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as file:
        while data := await asyncio.to_thread(file.read, FILE_CHUNK_BYTES):
            yield data


def _kind(kind: LayerKind | str) -> LayerKind:
    try:
        return LayerKind(kind)
    except ValueError:
        known = ", ".join(LayerKind)
        raise invalid(f"{kind!r} is not a kind of layer; use one of {known}") from None


def _no_nodes() -> DsecError:
    return unavailable("no node is ready to hold layers; `dsec node list` shows why")
