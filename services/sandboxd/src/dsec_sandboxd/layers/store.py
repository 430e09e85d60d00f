"""The layer store as services use it: asynchronous, over the blocking catalogue and importer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, TypeVar

from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import DsecError, from_os_error
from dsec_common.subjects import validate_project
from dsec_sandboxd.layers.catalogue import Catalogue
from dsec_sandboxd.layers.importer import ImageBuilder
from dsec_sandboxd.layers.limits import ImportLimits, ImportProgress, ImportWatch
from dsec_sandboxd.layers.names import NamedReference, validate_name, validate_version
from dsec_sandboxd.layers.records import ImportedLayer, Layer
from dsec_sandboxd.layers.staging import staging_directory

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_common.wire.layer import ArchiveFormat, LayerKind

_T = TypeVar("_T")
_IMPORTS_AT_ONCE: Final = 2


class LayerStore:
    """A content-addressed store of layers in one directory, local or shared between nodes.

    Safe for any number of tasks, processes and hosts at once, given a file system with ``flock``.
    Use :meth:`open` first and :meth:`close` last, or ``async with``.
    """

    def __init__(
        self, directory: Path, *, limits: ImportLimits | None = None, clock: Clock | None = None
    ) -> None:
        self._directory = directory
        self._catalogue = Catalogue(directory)
        self._limits = limits or ImportLimits()
        self._clock = clock or SystemClock()
        self._threads = ThreadPoolExecutor(_IMPORTS_AT_ONCE, thread_name_prefix="layer-import")
        self._store_id = ""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def store_id(self) -> str:
        """The store's identity, equal on all nodes that share its directory."""
        return self._store_id

    @property
    def references_version(self) -> str:
        """A token that is another one after every change of any reference, by whatever node."""
        return self._catalogue.references_version

    async def open(self) -> int:
        """Make the store if there is none, and clean up after crashed imports.

        Returns:
            The number of crashed imports that were cleaned up.

        Raises:
            DsecError: when the directory cannot be made or written to.
        """
        self._store_id, cleaned = await self._in_thread(self._catalogue.open)
        return cleaned

    async def close(self) -> None:
        """Wait for running imports and let their threads go."""
        await asyncio.to_thread(self._threads.shutdown)

    async def import_layer(
        self,
        project: str,
        name: str,
        version: str,
        source: Path,
        *,
        kind: LayerKind,
        archive_format: ArchiveFormat | None = None,
        tag: str = "",
        replace: bool = False,
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
            tag: which image, for an archive of several.
            replace: let ``name@version`` mean something else from now on; running sandboxes keep
                what they have.
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

        def work() -> ImportedLayer:
            with staging_directory(self._catalogue.staging) as staging:
                image = ImageBuilder(
                    source=source,
                    archive_format=archive_format,
                    tag=tag,
                    staging=staging,
                    limits=self._limits,
                    watch=watch,
                ).build()
                layer = self._catalogue.publish(
                    image,
                    project,
                    reference,
                    kind,
                    created_at=self._clock.now(),
                    staging=staging,
                    watch=watch,
                    replace=replace,
                )
                return ImportedLayer(layer=layer, warnings=image.warnings)

        submitted = self._threads.submit(_naming_os_errors, work, source)
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

    async def resolve(self, project: str, reference: str) -> Layer:
        """Return the layer that a project means, its image checked.

        The image's digest is computed at its first use in this process and whenever the file has
        become another one; otherwise this takes three small file operations and no thread.

        Args:
            project: whose reference it is.
            reference: ``name@version``, or ``sha256:…`` if the project has a name for it.

        Raises:
            DsecError: ``invalid`` for a malformed reference or one without a version, ``not_found``
                for an unknown one, ``layer_error`` when the image is missing, damaged or replaced.
        """
        layer = self._catalogue.find(project, reference)
        if not self._catalogue.images.is_verified(layer.digest):
            await self._in_thread(lambda: self._catalogue.images.verify(layer))
        return layer

    async def inspect(self, project: str, reference: str) -> Layer:
        """Return the layer that a project means, without a look at its image.

        Raises:
            DsecError: ``invalid``, ``not_found`` or ``layer_error``, as :meth:`resolve`.
        """
        return self._catalogue.find(project, reference)

    async def list(self, project: str) -> tuple[Layer, ...]:
        """Return the project's layers, sorted by reference."""
        return await self._in_thread(lambda: self._catalogue.list(project))

    async def remove(self, project: str, reference: str) -> None:
        """Remove ``name@version``; the image stays until :meth:`collect_garbage`.

        Raises:
            DsecError: ``not_found`` for an unknown reference, ``invalid`` for a malformed one.
        """
        await self._in_thread(lambda: self._catalogue.remove(project, reference))

    async def collect_garbage(self, in_use: Collection[str] = ()) -> tuple[str, ...]:
        """Delete the images that no project refers to; return their digests.

        Args:
            in_use: digests to keep all the same. An image that is mounted here survives its file;
                on a shared store, name what the other nodes use.
        """
        kept = frozenset(in_use)
        return await self._in_thread(lambda: self._catalogue.collect_garbage(kept))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(_naming_os_errors, work, self._directory)


def _naming_os_errors(work: Callable[[], _T], path: Path) -> _T:
    """Run ``work``; a kernel error becomes a typed one that names the file."""
    try:
        return work()
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(path)
        raise from_os_error("layer store", error, where) from error


def _on_the_loop(
    progress: Callable[[ImportProgress], None],
) -> Callable[[ImportProgress], None]:
    loop = asyncio.get_running_loop()

    def report(step: ImportProgress) -> None:
        loop.call_soon_threadsafe(progress, step)

    return report
