"""Layers: the read-only trees that sandboxes are made of, in the nodes' stores."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dsec.archive import PlainFile, file_pieces, tar_pieces, tree_size_bytes
from dsec.channel import Channel
from dsec.events import EventHub
from dsec.inventory import list_nodes
from dsec.layer_requests import import_request, layer_kind
from dsec.window import drained, in_window
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.files import FILE_CHUNK_BYTES
from dsec_common.wire.layer import (
    ArchiveFormat,
    GitHistory,
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
    TagLayer,
    UploadLayerChunk,
)

if TYPE_CHECKING:
    from dsec.pack.package import Package

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
        tags: Iterable[str] = (),
        replace: bool = False,
        exclude: Iterable[str] = (),
        clean: bool = False,
        git: GitHistory | str | None = None,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of a local directory's tree, sent as a tar stream made on the fly.

        Equal trees give equal layers: the digest depends on nothing but names, content, owners,
        permission bits and modification times.

        Args:
            path: the directory that becomes the layer's root.
            kind: ``base``, ``workspace``, ``toolkit`` or ``data``.
            name: the layer's name.
            version: its version; the two make the reference ``name@version``.
            tags: let ``name:tag`` mean this version from now on, for each of them.
            replace: let the reference point to other content than before.
            exclude: patterns of absolute paths that are left out: ``*`` is any text within one
                name, ``**`` any number of directories.
            clean: leave out what builds leave behind (caches, histories, editors' backups), and
                cut git repositories to the commit that is checked out.
            git: ``keep``, ``cut`` or ``drop`` repositories; by default ``cut`` with ``clean``.
            progress: told how far it is.

        Raises:
            DsecError: ``invalid`` or ``layer_error`` for content that no layer may hold,
                ``conflict`` when the reference holds other content, ``unavailable`` without nodes.
        """
        directory = Path(path)
        total = await asyncio.to_thread(tree_size_bytes, directory)
        request = import_request(
            kind, name, version, tags, replace=replace, left_out=(exclude, clean, git)
        )
        return await self._import(
            lambda: tar_pieces(directory, FILE_CHUNK_BYTES), total, request, progress
        )

    async def import_tar(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str,
        name: str,
        version: str,
        tags: Iterable[str] = (),
        replace: bool = False,
        exclude: Iterable[str] = (),
        clean: bool = False,
        git: GitHistory | str | None = None,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of a tar archive, plain or compressed; see :meth:`import_directory`."""
        request = import_request(
            kind, name, version, tags, replace=replace, left_out=(exclude, clean, git)
        )
        return await self._import_file(Path(path), request, progress)

    async def import_oci(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str = LayerKind.BASE,
        name: str,
        version: str,
        image: str = "",
        tags: Iterable[str] = (),
        replace: bool = False,
        exclude: Iterable[str] = (),
        clean: bool = False,
        git: GitHistory | str | None = None,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make one layer of a container image: an OCI layout (directory or tar), ``docker save``.

        Its layers are flattened in order; see :meth:`import_directory`.

        Args:
            path: the layout or archive.
            kind: as there.
            name: as there.
            version: as there.
            image: which image of several, by its tag (``name:tag``, or the end of it).
            tags: as there.
            replace: as there.
            exclude: as there.
            clean: as there.
            git: as there.
            progress: as there.

        Raises:
            DsecError: ``invalid`` too when no image or several of the archive fit.
        """
        source = Path(path)
        request = msgspec.structs.replace(
            import_request(
                kind, name, version, tags, replace=replace, left_out=(exclude, clean, git)
            ),
            format=ArchiveFormat.OCI,
            image=image,
        )
        return await self._import_whatever(source, request, progress)

    async def import_path(
        self,
        path: str | os.PathLike[str],
        *,
        kind: LayerKind | str,
        name: str,
        version: str,
        tags: Iterable[str] = (),
        replace: bool = False,
        exclude: Iterable[str] = (),
        clean: bool = False,
        git: GitHistory | str | None = None,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of a directory, a tar archive or a container image: what it looks like.

        What has the files of an OCI layout or of ``docker save`` becomes what the image holds; see
        :meth:`import_oci` and :meth:`import_directory`.
        """
        request = msgspec.structs.replace(
            import_request(
                kind, name, version, tags, replace=replace, left_out=(exclude, clean, git)
            ),
            format=ArchiveFormat.AUTO,
        )
        return await self._import_whatever(Path(path), request, progress)

    async def import_files(
        self,
        files: Iterable[PlainFile],
        *,
        kind: LayerKind | str,
        name: str,
        version: str,
        tags: Iterable[str] = (),
        replace: bool = False,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a layer of files that no directory holds; see :meth:`import_directory`.

        Equal files give equal layers: they have neither times nor owners.
        """
        some = tuple(files)
        total = await asyncio.to_thread(lambda: sum(file.size_bytes() for file in some))
        request = import_request(kind, name, version, tags, replace=replace)
        return await self._import(
            lambda: file_pieces(some, FILE_CHUNK_BYTES), total, request, progress
        )

    async def import_package(
        self,
        package: str | os.PathLike[str] | Package,
        *,
        public_key: str = "",
        name: str = "",
        version: str = "",
        tags: Iterable[str] = (),
        replace: bool = False,
        progress: Progress | None = None,
    ) -> LayerInfo:
        """Make a toolkit of a package, in which ``/opt/dsec/agents/<name>/run`` is the agent.

        Args:
            package: a file, all of which is checked first; or one that was read.
            public_key: whose signature is demanded; empty for none.
            name: the layer's name, and its version; else the agent's.
            version: see there.
            tags: as in :meth:`import_directory`.
            replace: as there.
            progress: as there.

        Raises:
            DsecError: as :func:`dsec.pack.package.read_package`, and as there.
        """
        from dsec.pack.layering import layer_files, package_of  # noqa: PLC0415  few have one

        found = await asyncio.to_thread(package_of, package, public_key)
        return await self.import_files(
            await asyncio.to_thread(lambda: tuple(layer_files(found))),
            kind=LayerKind.TOOLKIT,
            name=name or found.manifest.name,
            version=version or found.manifest.version,
            tags=tags,
            replace=replace,
            progress=progress,
        )

    async def _import_whatever(
        self, source: Path, request: ImportLayer, progress: Progress | None
    ) -> LayerInfo:
        if not source.is_dir():  # noqa: ASYNC240  one stat before it is all read
            return await self._import_file(source, request, progress)
        total = await asyncio.to_thread(tree_size_bytes, source)
        return await self._import(
            lambda: tar_pieces(source, FILE_CHUNK_BYTES), total, request, progress
        )

    async def _import_file(
        self, path: Path, request: ImportLayer, progress: Progress | None
    ) -> LayerInfo:
        try:
            total = path.stat().st_size  # noqa: ASYNC240  as above
        except OSError as error:
            raise invalid(f"cannot read {path}: {error.strerror}") from error
        return await self._import(lambda: _file_pieces(path), total, request, progress)

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
        reply = await list_nodes(self._channel)
        stores: dict[str, list[str]] = {}
        for node in reply.nodes:
            if node.ready:
                stores.setdefault(node.heartbeat.store_id or node.node, []).append(node.node)
        if not stores:
            raise _no_nodes()
        return list(stores.values())

    async def list(
        self, *, kind: LayerKind | str | None = None, name: str = "", tag: str = ""
    ) -> list[LayerInfo]:
        """Return the project's layers in all stores, sorted by reference; all, or those that fit.

        Args:
            kind: only layers of this kind.
            name: only layers of this name; with ``*`` at its end, of names that begin so.
            tag: only layers that this tag means.
        """
        asked = ListLayers(kind=None if kind is None else layer_kind(kind), name=name, tag=tag)
        found: dict[tuple[str, str], LayerInfo] = {}
        for nodes in await self._stores():
            async for layer in self._pages(nodes[0], asked):
                key = (layer.reference, layer.digest)
                known = found.get(key, layer)
                found[key] = msgspec.structs.replace(
                    known, nodes=tuple(sorted({*known.nodes, *nodes}))
                )
        return [found[key] for key in sorted(found)]

    async def _pages(self, node: str, asked: ListLayers) -> AsyncIterator[LayerInfo]:
        while True:
            reply = await self._channel.ask(
                subjects.layer(self._channel.project, node, "list"),
                asked,
                LayerList,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
            )
            for layer in reply.layers:
                yield layer
            if not reply.next_after:
                return
            asked = msgspec.structs.replace(
                asked, after=reply.next_after, message_id=ListLayers().message_id
            )

    async def tag(self, reference: str, tag: str) -> LayerInfo:
        """Let ``name:tag`` mean ``reference`` (``name@version``) from now on; return that layer.

        A version means the same for ever, a tag is what moves. Sandboxes keep what a tag meant
        when they were made. Every store that has the version is told.

        Raises:
            DsecError: ``not_found`` when no store has the version; ``invalid``.
        """
        name, at, version = reference.partition("@")
        if not at:
            raise invalid(f"{reference!r} is not a version; a tag means a name@version")
        return await self._of_each_store(
            "tag", lambda: TagLayer(name=name, tag=tag, version=version)
        )

    async def inspect(self, reference: str) -> LayerInfo:
        """Return one layer by ``name@version``, ``name:tag`` or ``sha256:…``, with its history.

        Raises:
            DsecError: ``not_found`` when no store has it; ``invalid`` for an impossible reference.
        """
        return await self._of_each_store(
            "inspect", lambda: InspectLayer(reference=reference), repeatable=True
        )

    async def _of_each_store(
        self, verb: str, request: Callable[[], Message], *, repeatable: bool = False
    ) -> LayerInfo:
        layer: LayerInfo | None = None
        missing: DsecError | None = None
        where: list[str] = []
        for nodes in await self._stores():
            try:
                layer = await self._channel.ask(
                    subjects.layer(self._channel.project, nodes[0], verb),
                    request(),
                    LayerInfo,
                    timeout_s=_TIMEOUT_S,
                    repeatable=repeatable,
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
        """Remove a ``name@version`` or ``name:tag`` from all stores.

        An image goes when nothing refers to it; running sandboxes keep theirs.

        Raises:
            DsecError: ``not_found`` when no store has it; ``conflict`` for a version that a tag
                means.
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


def _no_nodes() -> DsecError:
    return unavailable("no node is ready to hold layers; `dsec node list` shows why")
