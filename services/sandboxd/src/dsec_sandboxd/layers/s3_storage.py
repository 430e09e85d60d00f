"""Layers in an S3-compatible bucket, through obstore (the extra ``dsec[s3]``).

The service must honour ``If-Match`` and ``If-None-Match`` on writes, which Amazon S3, MinIO, Ceph
and Cloudflare R2 do: :meth:`S3Storage.open` tries it and refuses the bucket otherwise.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_sandboxd.layers.nats_storage import file_pieces
from dsec_sandboxd.layers.object_storage import Document
from dsec_sandboxd.layers.urls import s3_options

if TYPE_CHECKING:
    from dsec_sandboxd.layers.limits import ImportWatch

_PIECE_BYTES: Final = 8 << 20
_READS_AT_ONCE: Final = 4
_REQUEST_TIMEOUT: Final = timedelta(seconds=60)
#: Longer than between two looks for changes, so that those keep one connection.
_IDLE_TIMEOUT: Final = timedelta(seconds=2)
_RETRY: Final[Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class S3Storage:
    """An :class:`~dsec_sandboxd.layers.object_storage.ObjectStorage` in a bucket that exists.

    Attributes:
        url: ``s3://bucket/prefix?endpoint=…&region=…``; credentials come from the environment
            (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, a web identity, …), as usual.
        credentials: the access key's id and the secret, for those who have no environment.
    """

    def __init__(self, url: str, *, credentials: tuple[str, str] | None = None) -> None:
        parts = urlsplit(url)
        options = s3_options(url)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._options = options
        self._credentials = credentials
        self._obstore: Any = None
        self._store: Any = None

    async def open(self) -> None:
        """See the protocol; the bucket must exist.

        Raises:
            DsecError: ``unsupported`` without the library, or when the service ignores the
                conditions of a write.
        """
        try:
            import obstore  # noqa: PLC0415  an extra that only such nodes install
            import obstore.exceptions  # noqa: PLC0415  as above
            from obstore.store import S3Store  # noqa: PLC0415  as above
        except ImportError:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                "layers in an S3-compatible bucket need the library obstore; install dsec[s3]",
            ) from None
        endpoint = self._options.get("endpoint", "")
        settings: dict[str, Any] = {}
        if endpoint:
            settings["endpoint"] = endpoint
        if "region" in self._options:
            settings["region"] = self._options["region"]
        if "virtual_hosted_style" in self._options:
            settings["virtual_hosted_style_request"] = (
                self._options["virtual_hosted_style"] == "true"
            )
        if self._credentials is not None:
            settings["access_key_id"], settings["secret_access_key"] = self._credentials
        self._obstore = obstore
        self._store = S3Store(
            self._bucket,
            prefix=self._prefix or None,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": _REQUEST_TIMEOUT,
                "pool_idle_timeout": _IDLE_TIMEOUT,
            },
            retry_config=_RETRY,
            **settings,
        )
        await self._probe()

    async def _probe(self) -> None:
        """Refuse a service that would let two nodes overwrite each other's changes."""
        key = f"probe/{uuid.uuid4().hex}"
        await self.write_document(key, b"1", revision=None)
        try:
            await self.write_document(key, b"2", revision=None)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
        else:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"the service behind s3://{self._bucket} ignores If-None-Match on writes, so nodes "
                "would overwrite each other's changes; use one that honours it",
            )
        finally:
            await self.delete_document(key)

    async def close(self) -> None:
        """See the protocol."""
        self._store = None

    async def read_document(self, key: str) -> Document | None:
        """See the protocol."""
        async with self._translated("read", key):
            try:
                found = await self._obstore.get_async(self._store, f"documents/{key}")
            except FileNotFoundError:
                return None
            data = bytes(await found.bytes_async())
            return Document(data, found.meta["e_tag"])

    async def write_document(self, key: str, data: bytes, *, revision: str | None) -> str:
        """See the protocol."""
        mode = "create" if revision is None else {"e_tag": revision}
        async with self._translated("write", key):
            result = await self._obstore.put_async(
                self._store, f"documents/{key}", data, mode=mode, use_multipart=False
            )
        return str(result["e_tag"])

    async def delete_document(self, key: str) -> None:
        """See the protocol."""
        await self._delete(f"documents/{key}")

    async def document_keys(self, prefix: str) -> list[str]:
        """See the protocol."""
        return [path.removeprefix("documents/") for path in await self._list(f"documents/{prefix}")]

    async def image_bytes(self, name: str) -> int | None:
        """See the protocol."""
        async with self._translated("look at", name):
            try:
                return int((await self._obstore.head_async(self._store, f"images/{name}"))["size"])
            except FileNotFoundError:
                return None

    async def image_names(self) -> list[str]:
        """See the protocol."""
        return [path.removeprefix("images/") for path in await self._list("images/")]

    async def write_image(self, name: str, path: Path, watch: ImportWatch) -> None:
        """See the protocol."""
        async with self._translated("write", name):
            await self._obstore.put_async(
                self._store,
                f"images/{name}",
                file_pieces(path, _PIECE_BYTES, watch),
                chunk_size=_PIECE_BYTES,
                max_concurrency=_READS_AT_ONCE,
            )

    async def read_image(self, name: str) -> AsyncGenerator[bytes]:
        """See the protocol; ranges are read ahead."""
        size = await self.image_bytes(name)
        if size is None:
            raise not_found(f"s3://{self._bucket} has no image {name}", name=name)
        waiting: deque[asyncio.Task[bytes]] = deque()
        offset = 0
        try:
            while offset < size or waiting:
                while offset < size and len(waiting) < _READS_AT_ONCE:
                    length = min(_PIECE_BYTES, size - offset)
                    waiting.append(asyncio.create_task(self._read(name, offset, length)))
                    offset += length
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _read(self, name: str, offset: int, length: int) -> bytes:
        async with self._translated("read", name):
            try:
                found = await self._obstore.get_range_async(
                    self._store, f"images/{name}", start=offset, length=length
                )
            except FileNotFoundError:
                raise not_found(f"s3://{self._bucket} has no image {name}", name=name) from None
            return bytes(found)

    async def delete_image(self, name: str) -> None:
        """See the protocol."""
        await self._delete(f"images/{name}")

    async def remove_orphans(self, older_than_s: float) -> int:
        """See the protocol: an upload that died is invisible, and the bucket's own to forget.

        Set a life-cycle rule that aborts incomplete multipart uploads.
        """
        del older_than_s
        return 0

    async def _delete(self, path: str) -> None:
        async with self._translated("delete", path):
            try:
                await self._obstore.delete_async(self._store, path)
            except FileNotFoundError:
                return

    async def _list(self, prefix: str) -> list[str]:
        found: list[str] = []
        async with self._translated("list", prefix):
            async for page in self._obstore.list(self._store, prefix.removesuffix("/")):
                found += [entry["path"] for entry in page]
        return sorted(found)

    @asynccontextmanager
    async def _translated(self, operation: str, what: str) -> AsyncIterator[None]:
        exceptions = self._obstore.exceptions
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"{what} in s3://{self._bucket} was changed by someone else",
                details={"key": what},
            ) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise DsecError(
                ErrorCode.DENIED,
                f"cannot {operation} {what} in s3://{self._bucket}: it refuses these credentials",
            ) from error
        except exceptions.BaseError as error:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"cannot {operation} {what} in s3://{self._bucket}: {str(error)[:200]}",
                retry_after_s=1.0,
            ) from error
