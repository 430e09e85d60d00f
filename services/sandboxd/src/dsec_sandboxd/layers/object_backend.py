"""Layers in a bucket: images fetched into the node's cache, names in documents.

Documents, each changed by compare-and-swap only::

    store_id                    who this store is, for ever
    version                     changes after every change of a name
    names/<project>/<name>      the versions and tags of one layer
    marks/<hex>                 an image that is about to be deleted (object_marks.py)

An image is stored before a name means it; one without a name is garbage, whoever left it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import validate_project
from dsec_sandboxd.layers import refusals
from dsec_sandboxd.layers.image_cache import ImageCache
from dsec_sandboxd.layers.names import (
    DIGEST_PREFIX,
    DigestReference,
    NamedReference,
    TagReference,
    is_digest,
    parse_reference,
    validate_name,
    validate_tag,
    validate_version,
)
from dsec_sandboxd.layers.object_marks import ImageMarks
from dsec_sandboxd.layers.object_names import NameDocument, NamedRecord
from dsec_sandboxd.layers.object_storage import DOCUMENT_BYTES_MAX, ObjectStorage
from dsec_sandboxd.layers.records import Layer, ReferenceRecord
from dsec_sandboxd.layers.staging import remove_dead

if TYPE_CHECKING:
    from dsec_sandboxd.layers.backend import InUse, Publication
    from dsec_sandboxd.layers.limits import ImportWatch

_log: Final = structlog.get_logger(__name__)

#: Changes by other nodes are seen within this time.
REFRESH_S: Final = 1.0
#: Even a change whose version was lost in a crash is.
_REFRESH_ALL_S: Final = 60.0
_ATTEMPTS: Final = 50
_READS_AT_ONCE: Final = 16
#: A writer that has added nothing for so long is dead.
_ORPHAN_AGE_S: Final = 3600.0


class ObjectBackend:
    """A :class:`~dsec_sandboxd.layers.backend.LayerBackend` over any object storage.

    Attributes:
        storage: the bucket.
        directory: this node's own, for its cache and for running imports.
        cache_bytes: room of the cache.
        in_use: says which digests this node uses.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        directory: Path,
        *,
        cache_bytes: int,
        in_use: InUse = tuple,
        clock: Clock | None = None,
    ) -> None:
        self.cache = ImageCache(directory / "images", cache_bytes, in_use)
        self._storage = storage
        self._directory = directory
        self._clock = clock or SystemClock()
        self._marks = ImageMarks(storage, self._clock)
        self._store_id = ""
        self._version = ""
        self._refreshing: asyncio.Task[None] | None = None
        #: Digests whose stored image turned out to be wrong: the next import replaces it.
        self._damaged: set[str] = set()

    @property
    def staging(self) -> Path:
        """Where images are built: beside the cache."""
        return self._directory / "staging"

    @property
    def store_id(self) -> str:
        """See the protocol."""
        return self._store_id

    @property
    def references_version(self) -> str:
        """See the protocol; it changes once a minute in any case."""
        return f"{self._version}:{self._clock.monotonic() // _REFRESH_ALL_S:.0f}"

    async def open(self) -> int:
        """See the protocol."""
        await self._storage.open()

        def prepare() -> int:
            self.staging.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.cache.open()
            return remove_dead(self.staging, lambda _staging: None)

        cleaned = await asyncio.to_thread(prepare)
        self._store_id = await self._identity()
        await self._refresh()
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._keep_fresh(), name="layer names")
        return cleaned

    async def _identity(self) -> str:
        while True:
            document = await self._storage.read_document("store_id")
            if document is not None:
                return document.data.decode()
            # Of several nodes that come first, one wins, and all read what it wrote.
            with suppress(DsecError):
                await self._storage.write_document(
                    "store_id", str(uuid.uuid4()).encode(), revision=None
                )

    async def close(self) -> None:
        """See the protocol."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
            self._refreshing = None
        await self.cache.close()
        await self._storage.close()

    async def _refresh(self) -> None:
        document = await self._storage.read_document("version")
        self._version = document.revision if document else ""

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._refresh()
            except DsecError as error:
                _log.debug("layer_names_not_refreshed", error=str(error))

    # --- Names --------------------------------------------------------------------------------

    async def find(self, project: str, reference: str) -> Layer:
        """See the protocol; one read of the bucket for a name."""
        validate_project(project)
        wanted = parse_reference(reference)
        if isinstance(wanted, DigestReference):
            for layer in await self.list(project):
                if layer.digest == wanted.digest:
                    return layer
            raise refusals.unknown(project, wanted, ())
        document, _ = await self._read(project, wanted.name)
        version = document.meaning_of(wanted)
        if version is None:
            raise await self._unknown(project, wanted, document)
        return self._layer(project, wanted.name, version, document)

    async def _unknown(
        self, project: str, wanted: NamedReference | TagReference, document: NameDocument
    ) -> DsecError:
        if document.versions:
            known = [NamedReference(wanted.name, version) for version in sorted(document.versions)]
        else:
            known = [
                NamedReference(layer.name, layer.version) for layer in await self.list(project)
            ]
        return refusals.unknown(project, wanted, known, document.tags)

    async def list(self, project: str) -> tuple[Layer, ...]:
        """See the protocol; one read for each name."""
        validate_project(project)
        found = await self._documents(f"names/{project}/")
        layers = [
            self._layer(project, name.rpartition("/")[2], version, document)
            for name, document in found
            for version in document.versions
        ]
        return tuple(sorted(layers, key=lambda layer: layer.reference))

    async def tag(self, project: str, name: str, tag: str, version: str, *, at: float) -> Layer:
        """See the protocol."""
        validate_project(project)
        validate_name(name)
        validate_tag(tag)
        wanted = NamedReference(name, validate_version(version))
        document, _ = await self._read(project, name)
        if version not in document.versions:
            raise await self._unknown(project, wanted, document)

        def change(document: NameDocument) -> NameDocument:
            if version not in document.versions:
                raise refusals.unknown(project, wanted, ())
            return document.with_tag(tag, version, at)

        document = await self._change(project, name, change)
        return self._layer(project, name, version, document)

    async def remove(self, project: str, reference: str) -> None:
        """See the protocol."""
        validate_project(project)
        wanted = parse_reference(reference)
        if isinstance(wanted, DigestReference):
            raise refusals.several_names(wanted)
        document, _ = await self._read(project, wanted.name)
        if not document.has(wanted):
            raise await self._unknown(project, wanted, document)

        def change(document: NameDocument) -> NameDocument:
            if not document.has(wanted):
                raise refusals.unknown(project, wanted, ())
            if isinstance(wanted, TagReference):
                return document.without_tag(wanted.tag)
            if tags := document.tags_of(wanted.version):
                raise refusals.tagged(wanted, tags)
            return document.without_version(wanted.version)

        await self._change(project, wanted.name, change)

    async def _read(self, project: str, name: str) -> tuple[NameDocument, str | None]:
        document = await self._storage.read_document(f"names/{project}/{name}")
        if document is None:
            return NameDocument(), None
        return _decoded(document.data, name), document.revision

    async def _documents(self, prefix: str) -> Sequence[tuple[str, NameDocument]]:
        places = asyncio.Semaphore(_READS_AT_ONCE)

        async def read(key: str) -> tuple[str, NameDocument]:
            async with places:
                document = await self._storage.read_document(key)
            return key, _decoded(document.data, key) if document else NameDocument()

        keys = await self._storage.document_keys(prefix)
        return await asyncio.gather(*(read(key) for key in keys))

    async def _change(
        self, project: str, name: str, change: Callable[[NameDocument], NameDocument]
    ) -> NameDocument:
        for _ in range(_ATTEMPTS):
            before, revision = await self._read(project, name)
            after = change(before)
            if after == before:
                return before
            data = msgspec.json.encode(after)
            if len(data) > DOCUMENT_BYTES_MAX:
                raise DsecError(
                    ErrorCode.EXHAUSTED,
                    f"the layer {name} of the project {project} has as many versions as fit; "
                    "remove old ones, or import under another name",
                )
            try:
                await self._storage.write_document(
                    f"names/{project}/{name}", data, revision=revision
                )
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
                continue
            await self._announce()
            return after
        raise DsecError(
            ErrorCode.UNAVAILABLE,
            f"the layer {name} of the project {project} is being changed by too many at once",
            retry_after_s=1.0,
        )

    async def _announce(self) -> None:
        """Let all nodes see that a name has changed; one change may stand for several."""
        while True:
            document = await self._storage.read_document("version")
            try:
                self._version = await self._storage.write_document(
                    "version",
                    uuid.uuid4().hex.encode(),
                    revision=document.revision if document else None,
                )
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
                continue
            return

    def _layer(self, project: str, name: str, version: str, document: NameDocument) -> Layer:
        record = document.versions[version]
        return Layer(
            project=project,
            name=name,
            version=version,
            digest=record.reference.digest,
            kind=record.reference.kind,
            size_bytes=record.size_bytes,
            entries=record.entries,
            created_at=record.reference.created_at,
            source_digest=record.reference.source_digest,
            image_path=self.cache.path(record.reference.digest),
            tags=document.tags_of(version),
            history=record.reference.history,
            defaults=record.reference.defaults,
        )

    # --- Images -------------------------------------------------------------------------------

    async def publish(self, publication: Publication) -> Layer:
        """See the protocol."""
        image, reference = publication.image, publication.reference
        record = NamedRecord(
            reference=ReferenceRecord(
                digest=image.digest,
                kind=publication.kind,
                created_at=publication.created_at,
                source_digest=image.source_digest,
                defaults=image.defaults,
            ),
            size_bytes=image.size_bytes,
            entries=image.entries,
        )

        def change(document: NameDocument) -> NameDocument:
            standing = document.versions.get(reference.version)
            if standing is not None:
                if standing.reference.means(record.reference):
                    return document
                if not publication.replace:
                    raise refusals.conflict(
                        publication.project, reference, standing.reference, record.reference
                    )
            return document.with_version(reference.version, record)

        before, _ = await self._read(publication.project, reference.name)
        change(before)  # a conflict is known before anything is sent
        name = _image_name(image.digest)
        await self._store(name, image.path, image.size_bytes, publication.watch)
        document = await self._change(publication.project, reference.name, change)
        while True:
            await self._marks.spare(name)
            if await self._storage.image_bytes(name) == image.size_bytes:
                break
            await self._store(name, image.path, image.size_bytes, publication.watch)
        self.cache.adopt(image.digest, image.path)
        return self._layer(publication.project, reference.name, reference.version, document)

    async def _store(self, name: str, path: Path, size: int, watch: ImportWatch) -> None:
        watch.advance("store", 0, size)
        sound = DIGEST_PREFIX + name not in self._damaged
        if sound and await self._storage.image_bytes(name) == size:
            return
        await self._storage.write_image(name, path, watch)
        self._damaged.discard(DIGEST_PREFIX + name)

    def path(self, digest: str) -> Path:
        """See the protocol."""
        return self.cache.path(digest)

    def is_ready(self, digest: str) -> bool:
        """See the protocol."""
        return self.cache.is_ready(digest)

    async def ensure(self, digest: str) -> Path:
        """See the protocol; the image is fetched unless the node has it."""
        try:
            return await self.cache.ensure(digest, lambda: self._source(digest))
        except DsecError as error:
            if error.details.get("reason") == "damaged":
                self._damaged.add(digest)
            raise

    async def _source(self, digest: str) -> tuple[int, AsyncGenerator[bytes]]:
        name = _image_name(digest)
        size = await self._storage.image_bytes(name)
        if size is None:
            raise DsecError(
                ErrorCode.LAYER_ERROR,
                f"the image {digest} is gone from the store; import the layer again",
                details={"digest": digest},
            )
        return size, self._storage.read_image(name)

    async def declare(self, held: Collection[str]) -> None:
        """See the protocol: what this node uses is in its own cache, so nobody has to know."""

    async def collect_garbage(self, in_use: frozenset[str]) -> tuple[str, ...]:
        """See the protocol; half-written images of dead nodes go too, after an hour."""
        stored = await self._storage.image_names()
        kept = {_image_name(digest) for digest in await self._referenced() | in_use}
        marked: dict[str, str] = {}
        for name in stored:
            if name not in kept and is_digest(DIGEST_PREFIX + name):
                revision = await self._marks.condemn(name)
                if revision is not None:
                    marked[name] = revision
        removed = []
        kept = {_image_name(digest) for digest in await self._referenced()} if marked else set()
        for name, revision in marked.items():
            if name not in kept and await self._marks.take(name, revision):
                await self._storage.delete_image(name)
                await self._marks.clear(name)
                removed.append(DIGEST_PREFIX + name)
        await self._storage.remove_orphans(_ORPHAN_AGE_S)
        return tuple(sorted(removed))

    async def _referenced(self) -> set[str]:
        return {
            record.reference.digest
            for _, document in await self._documents("names/")
            for record in document.versions.values()
        }


def _image_name(digest: str) -> str:
    return digest.removeprefix(DIGEST_PREFIX)


def _decoded(data: bytes, name: str) -> NameDocument:
    try:
        return msgspec.json.decode(data, type=NameDocument)
    except msgspec.DecodeError as error:
        raise DsecError(
            ErrorCode.LAYER_ERROR,
            f"the layer store's record of {name} is damaged ({error}); remove that document from "
            "the bucket and import the layer again",
        ) from None
