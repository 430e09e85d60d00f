"""Layers in a directory of a local or shared file system, mounted in place.

Nothing is copied to the node: the kernel reads the blocks that are used, when they are used.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import from_os_error
from dsec_sandboxd.layers.catalogue import Catalogue
from dsec_sandboxd.layers.names import TagReference, validate_name, validate_tag, validate_version

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.backend import Publication
    from dsec_sandboxd.layers.records import Layer

_T = TypeVar("_T")


class DirectoryBackend:
    """A :class:`~dsec_sandboxd.layers.backend.LayerBackend`, given a file system with ``flock``.

    Attributes:
        directory: the store's.
        holder: this node, for the images that it uses; a name of its own by default.
    """

    def __init__(self, directory: Path, *, holder: str = "", clock: Clock | None = None) -> None:
        self._directory = directory
        self._catalogue = Catalogue(directory)
        self._holder = holder or uuid.uuid4().hex
        self._clock = clock or SystemClock()
        self._store_id = ""

    @property
    def staging(self) -> Path:
        """Where images are built: on the store's own file system."""
        return self._catalogue.staging

    @property
    def store_id(self) -> str:
        """See the protocol."""
        return self._store_id

    @property
    def references_version(self) -> str:
        """See the protocol; always the store's own."""
        return self._catalogue.references_version

    async def open(self) -> int:
        """See the protocol; crashed imports of all nodes are cleaned up."""
        self._store_id, cleaned = await self._in_thread(self._catalogue.open)
        return cleaned

    async def close(self) -> None:
        """Nothing is kept open; what this node declared expires, or is replaced by its next run."""

    async def publish(self, publication: Publication) -> Layer:
        """See the protocol."""
        return await self._in_thread(lambda: self._catalogue.publish(publication))

    async def find(self, project: str, reference: str) -> Layer:
        """See the protocol; three small file operations, without a thread."""
        return self._catalogue.find(project, reference)

    async def list(self, project: str) -> tuple[Layer, ...]:
        """See the protocol."""
        return await self._in_thread(lambda: self._catalogue.list(project))

    async def tag(self, project: str, name: str, tag: str, version: str, *, at: float) -> Layer:
        """See the protocol."""
        reference = TagReference(validate_name(name), validate_tag(tag))
        validate_version(version)
        return await self._in_thread(lambda: self._catalogue.tag(reference, project, version, at))

    async def remove(self, project: str, reference: str) -> None:
        """See the protocol."""
        await self._in_thread(lambda: self._catalogue.remove(project, reference))

    def path(self, digest: str) -> Path:
        """See the protocol."""
        return self._catalogue.images.path(digest)

    def is_ready(self, digest: str) -> bool:
        """See the protocol."""
        return self._catalogue.images.is_verified(digest)

    async def ensure(self, digest: str) -> Path:
        """See the protocol; the digest is computed once, and again if the file is another one."""
        images = self._catalogue.images
        if not images.is_verified(digest):
            await self._in_thread(lambda: images.verify(digest))
        return images.path(digest)

    async def declare(self, held: Collection[str]) -> None:
        """See the protocol."""
        now = self._clock.now()
        await self._in_thread(lambda: self._catalogue.declare(self._holder, held, now))

    async def collect_garbage(self, in_use: frozenset[str]) -> tuple[str, ...]:
        """See the protocol."""
        now = self._clock.now()
        return await self._in_thread(lambda: self._catalogue.collect_garbage(in_use, now))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(naming_os_errors, work, self._directory)


def naming_os_errors(work: Callable[[], _T], path: Path) -> _T:
    """Run ``work``; a kernel error becomes a typed one that names the file."""
    try:
        return work()
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(path)
        raise from_os_error("layer store", error, where) from error
