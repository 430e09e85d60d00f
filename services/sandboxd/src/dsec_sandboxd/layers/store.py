"""The layer store as services use it: imports, over whatever back end keeps the layers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import DsecError
from dsec_common.subjects import validate_project
from dsec_sandboxd.layers.backend import LayerBackend, Publication
from dsec_sandboxd.layers.directory_backend import DirectoryBackend, naming_os_errors
from dsec_sandboxd.layers.importer import BuiltImage, ImageBuilder
from dsec_sandboxd.layers.leaving_out import LeaveOut
from dsec_sandboxd.layers.limits import ImportLimits, ImportProgress, ImportWatch
from dsec_sandboxd.layers.names import NamedReference, validate_name, validate_version
from dsec_sandboxd.layers.records import ImportedLayer, Layer
from dsec_sandboxd.layers.staging import staging_directory

if TYPE_CHECKING:
    from dsec_common.wire.layer import ArchiveFormat, LayerKind

_IMPORTS_AT_ONCE: Final = 2


class LayerStore:
    """A content-addressed store of layers.

    Safe for any number of tasks, processes and hosts at once. Use :meth:`open` first and
    :meth:`close` last, or ``async with``.

    Attributes:
        backend: what keeps the layers; a path means a directory, local or shared.
        limits: bounds of an import.
        clock: dates references.
    """

    def __init__(
        self,
        backend: LayerBackend | Path,
        *,
        limits: ImportLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        if isinstance(backend, Path):
            backend = DirectoryBackend(backend, clock=self._clock)
        self.backend = backend
        self._limits = limits or ImportLimits()
        self._threads = ThreadPoolExecutor(_IMPORTS_AT_ONCE, thread_name_prefix="layer-import")

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def store_id(self) -> str:
        """The store's identity, equal on all nodes that share it."""
        return self.backend.store_id

    @property
    def references_version(self) -> str:
        """A token that is another one after every change of any reference, by whatever node.

        Changes by other nodes show at once with a directory, within a second otherwise.
        """
        return self.backend.references_version

    async def open(self) -> int:
        """Make the store if there is none, and clean up after crashed imports.

        Returns:
            The number of crashed imports that were cleaned up.

        Raises:
            DsecError: when the store cannot be made or written to.
        """
        return await self.backend.open()

    async def close(self) -> None:
        """Wait for running imports, let their threads go, and close the back end."""
        await asyncio.to_thread(self._threads.shutdown)
        await self.backend.close()

    async def import_layer(
        self,
        project: str,
        name: str,
        version: str,
        source: Path,
        *,
        kind: LayerKind,
        archive_format: ArchiveFormat | None = None,
        image: str = "",
        replace: bool = False,
        leaving_out: LeaveOut | None = None,
        progress: Callable[[ImportProgress], None] | None = None,
    ) -> ImportedLayer:
        """Make a layer of a directory, a tar archive or a container image.

        All or nothing, also when this task is cancelled or the process dies. Importing the same
        content again takes no room and is not an error. What is kept of the content, and what is
        refused, is said in :mod:`dsec_sandboxd.layers.tree`.

        Args:
            project: whose layer it will be.
            name: its name.
            version: its version.
            source: a directory or a file of this host; its content is not trusted.
            kind: the role of the layer in a sandbox.
            archive_format: what ``source`` is; by default that is found out.
            image: which image, by its tag, for an archive of several.
            replace: let ``name@version`` mean something else from now on; running sandboxes keep
                what they have.
            leaving_out: what of the source does not become part of the layer.
            progress: called on the event loop at every new stage and every few MiB.

        Raises:
            DsecError: ``invalid`` for names, ``not_found`` without a source, ``conflict`` when
                ``name@version`` means other content or another kind, ``layer_error`` for forbidden
                or damaged content, ``exhausted`` over a limit or on a full disk.
        """
        validate_project(project)
        reference = NamedReference(validate_name(name), validate_version(version))
        watch = ImportWatch()
        if progress is not None:
            watch.report = _on_the_loop(progress)

        loop = asyncio.get_running_loop()
        created_at = self._clock.now()

        def work() -> ImportedLayer:
            with staging_directory(self.backend.staging) as staging:
                built = ImageBuilder(
                    source=source,
                    archive_format=archive_format,
                    tag=image,
                    staging=staging,
                    limits=self._limits,
                    watch=watch,
                    leaving_out=leaving_out or LeaveOut(),
                ).build()
                publishing = self.backend.publish(
                    Publication(
                        image=built,
                        project=project,
                        reference=reference,
                        kind=kind,
                        created_at=created_at,
                        staging=staging,
                        watch=watch,
                        replace=replace,
                    )
                )
                layer = asyncio.run_coroutine_threadsafe(publishing, loop).result()
                return ImportedLayer(layer=layer, warnings=built.warnings, left_out=built.left_out)

        submitted = self._threads.submit(naming_os_errors, work, source)
        running = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            watch.cancel()
            # A thread that has started cleans up after itself, which must be waited for.
            if not submitted.cancel():
                with suppress(DsecError):
                    await running
            raise

    async def publish_built(
        self,
        project: str,
        name: str,
        version: str,
        build: Callable[[Path], Awaitable[BuiltImage]],
        *,
        kind: LayerKind,
        replace: bool = False,
    ) -> Layer:
        """Publish an image that the node has built itself; all or nothing.

        Args:
            project: whose layer it will be.
            name: its name.
            version: its version.
            build: makes the image in a private directory, which is removed afterwards.
            kind: the role of the layer in a sandbox.
            replace: let ``name@version`` mean something else from now on.

        Raises:
            DsecError: as :meth:`import_layer`; what ``build`` raises.
        """
        validate_project(project)
        reference = NamedReference(validate_name(name), validate_version(version))
        with staging_directory(self.backend.staging) as staging:
            return await self.backend.publish(
                Publication(
                    image=await build(staging),
                    project=project,
                    reference=reference,
                    kind=kind,
                    created_at=self._clock.now(),
                    staging=staging,
                    watch=ImportWatch(),
                    replace=replace,
                )
            )

    async def resolve(self, project: str, reference: str) -> Layer:
        """Return the layer that a project means, its image checked.

        The image's digest is computed at its first use in this process and whenever the file has
        become another one; otherwise this takes three small file operations and no thread.

        Args:
            project: whose reference it is.
            reference: ``name@version``, ``name:tag``, or ``sha256:…`` if the project has a name
                for it.

        Raises:
            DsecError: ``invalid`` for a malformed reference or one without a version, ``not_found``
                for an unknown one, ``layer_error`` when the image is missing, damaged or replaced.
        """
        layer = await self.backend.find(project, reference)
        if not self.backend.is_ready(layer.digest):
            await self.backend.ensure(layer.digest)
        return layer

    def image_path(self, digest: str) -> Path:
        """Return where this node has the image behind a digest, or would have it."""
        return self.backend.path(digest)

    async def local_image(self, digest: str, image_path: Path) -> Path:
        """Return the image behind a digest as a checked file of this node, fetched if need be.

        An ``image_path`` that is not the store's is returned as it is: its owner answers for it.

        Raises:
            DsecError: as the back end's ``ensure``.
        """
        if image_path != self.backend.path(digest) or self.backend.is_ready(digest):
            return image_path
        return await self.backend.ensure(digest)

    async def declare(self, held: Collection[str]) -> None:
        """Tell the other nodes which digests this one uses, until told otherwise or for an hour.

        Raises:
            DsecError: when that cannot be told.
        """
        await self.backend.declare(held)

    async def inspect(self, project: str, reference: str) -> Layer:
        """Return the layer that a project means, without a look at its image.

        Raises:
            DsecError: ``invalid``, ``not_found`` or ``layer_error``, as :meth:`resolve`.
        """
        return await self.backend.find(project, reference)

    async def list(self, project: str) -> tuple[Layer, ...]:
        """Return the project's layers, sorted by reference."""
        return await self.backend.list(project)

    async def tag(self, project: str, name: str, tag: str, version: str) -> Layer:
        """Let ``name:tag`` mean ``name@version`` from now on; return that layer.

        Sandboxes keep what the tag meant when they were made.

        Raises:
            DsecError: ``invalid`` for malformed names, ``not_found`` for an unknown version.
        """
        return await self.backend.tag(project, name, tag, version, at=self._clock.now())

    async def remove(self, project: str, reference: str) -> None:
        """Remove ``name@version`` or ``name:tag``; the image stays until :meth:`collect_garbage`.

        Raises:
            DsecError: ``not_found`` for an unknown reference, ``invalid`` for a malformed one,
                ``conflict`` for a version that a tag means.
        """
        await self.backend.remove(project, reference)

    async def collect_garbage(self, in_use: Collection[str] = ()) -> tuple[str, ...]:
        """Delete the images that no project refers to and no node holds; return their digests.

        Args:
            in_use: digests to keep all the same.
        """
        return await self.backend.collect_garbage(frozenset(in_use))


def _on_the_loop(
    progress: Callable[[ImportProgress], None],
) -> Callable[[ImportProgress], None]:
    loop = asyncio.get_running_loop()

    def report(step: ImportProgress) -> None:
        loop.call_soon_threadsafe(progress, step)

    return report
