"""Layers in NATS: documents in a key-value bucket, images in an object bucket of the same name."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_common.bus import Bus
from dsec_common.bus_objects import OBJECT_CHUNK_BYTES, ObjectBucket
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerDocument
from dsec_sandboxd.layers.object_storage import Document

if TYPE_CHECKING:
    from dsec_common.bus_kv import KeyValue
    from dsec_sandboxd.layers.limits import ImportWatch


class NatsStorage:
    """An :class:`~dsec_sandboxd.layers.object_storage.ObjectStorage` in JetStream.

    Attributes:
        bus: connected; not closed by the storage.
        bucket: the name of both buckets.
        replicas: how many servers keep a copy.
    """

    def __init__(self, bus: Bus, bucket: str, *, replicas: int = 1) -> None:
        self._bus = bus
        self._bucket = bucket
        self._replicas = replicas
        self._documents: KeyValue[LayerDocument]
        self._images: ObjectBucket

    async def open(self) -> None:
        """See the protocol; makes both buckets."""
        bus = self._bus
        self._documents = await bus.kv(self._bucket, LayerDocument, replicas=self._replicas)
        self._images = await bus.objects(self._bucket, replicas=self._replicas)

    async def close(self) -> None:
        """Nothing of ours is open: the bus is the service's."""

    async def read_document(self, key: str) -> Document | None:
        """See the protocol."""
        try:
            entry = await self._documents.get(_encoded(key))
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            raise
        return Document(entry.value.data, str(entry.revision)) if entry.value else None

    async def write_document(self, key: str, data: bytes, *, revision: str | None) -> str:
        """See the protocol."""
        document = LayerDocument(data=data)
        if revision is None:
            return str(await self._documents.create(_encoded(key), document))
        return str(await self._documents.update(_encoded(key), document, int(revision)))

    async def delete_document(self, key: str) -> None:
        """See the protocol."""
        await self._documents.delete(_encoded(key))

    async def document_keys(self, prefix: str) -> list[str]:
        """See the protocol."""
        pattern = f"{_encoded(prefix.removesuffix('/'))}.>"
        return sorted(_decoded(key) for key in await self._documents.keys(pattern))

    async def image_bytes(self, name: str) -> int | None:
        """See the protocol."""
        try:
            return (await self._images.info(name)).size_bytes
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            raise

    async def image_names(self) -> list[str]:
        """See the protocol."""
        return await self._images.names()

    async def write_image(self, name: str, path: Path, watch: ImportWatch) -> None:
        """See the protocol."""
        await self._images.put(name, file_pieces(path, OBJECT_CHUNK_BYTES, watch))

    def read_image(self, name: str) -> AsyncGenerator[bytes]:
        """See the protocol."""
        return self._images.get(name)

    async def delete_image(self, name: str) -> None:
        """See the protocol."""
        await self._images.delete(name)

    async def remove_orphans(self, older_than_s: float) -> int:
        """See the protocol."""
        return await self._images.remove_orphans(older_than_s)


async def file_pieces(path: Path, piece_bytes: int, watch: ImportWatch) -> AsyncIterator[bytes]:
    """Yield a file's content; ``watch`` is told, and raises when the import was cancelled."""
    total, done = path.stat().st_size, 0  # noqa: ASYNC240  one stat before it is all read
    with path.open("rb", buffering=0) as file:
        while piece := await asyncio.to_thread(file.read, piece_bytes):
            yield piece
            done += len(piece)
            watch.advance("store", done, total)


def _encoded(key: str) -> str:
    """Return a key in the letters of a bucket's; each word becomes one token."""
    words = (base64.urlsafe_b64encode(word.encode()).decode() for word in key.split("/"))
    return ".".join(words)


def _decoded(key: str) -> str:
    return "/".join(base64.urlsafe_b64decode(word).decode() for word in key.split("."))
