"""Object buckets: large values in JetStream, by name, laid out as NATS's own tools expect (ADR-20).

A value is cut into chunks on a subject of its own, and one message with its description makes it
visible. Chunks are fetched one by one by their place in the stream: the client library's own
reader takes time that grows with the square of the value's size.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dsec_common.bus_types import StreamSpec
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.base import new_id

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from dsec_common.bus_requests import ReplyInbox
    from dsec_common.bus_streams import Streams

#: Well below the server's largest message, and large enough that round trips do not matter.
OBJECT_CHUNK_BYTES: Final = 512 * 1024
_BUCKET: Final = re.compile(r"[-_a-zA-Z0-9]+")
_WINDOW: Final = 8
_TIMEOUT_S: Final = 15.0
_NOT_FOUND: Final = "404"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One value: its size in bytes, its SHA-256 in hexadecimal, and when it was put, Unix time."""

    name: str
    size_bytes: int
    sha256: str
    put_at: float


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """What ADR-20 calls an object's info."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: datetime
    options: dict[str, Any] = {}
    deleted: bool = False


class ObjectBucket:
    """A bucket of large values; made by ``Bus.objects``.

    A value is visible whole or not at all. What a writer that died has left of one takes room until
    :meth:`remove_orphans`.
    """

    def __init__(self, inbox: ReplyInbox, streams: Streams, bucket: str) -> None:
        self.bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._inbox = inbox
        self._streams = streams

    @staticmethod
    def stream_spec(bucket: str, *, replicas: int, max_bytes: int = -1) -> StreamSpec:
        """Return the stream behind a bucket.

        Raises:
            DsecError: ``invalid`` for an impossible name.
        """
        if not _BUCKET.fullmatch(bucket):
            raise invalid(f"{bucket!r} is not a bucket name: use letters, digits, '-' and '_'")
        return StreamSpec(
            name=f"OBJ_{bucket}",
            subjects=(f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"),
            max_bytes=max_bytes,
            replicas=replicas,
            bucket=True,
        )

    async def put(self, name: str, pieces: AsyncIterator[bytes]) -> ObjectInfo:
        """Store a value under ``name``, in place of what was there.

        Args:
            name: any text.
            pieces: its content, each at most :data:`OBJECT_CHUNK_BYTES`.

        Raises:
            DsecError: ``exhausted`` when the bucket or the server's storage is full;
                ``unavailable`` or ``timeout`` when the server does not answer. Then nothing is
                visible of the new value.
        """
        before = await self._describe(name)
        nuid = new_id()
        digest, size, chunks = hashlib.sha256(), 0, 0
        try:
            waiting: deque[asyncio.Task[int]] = deque()
            last_sequence = 0
            try:
                async for piece in pieces:
                    if len(waiting) == _WINDOW:
                        last_sequence = _ascending(last_sequence, await waiting.popleft())
                    digest.update(piece)
                    size, chunks = size + len(piece), chunks + 1
                    waiting.append(asyncio.create_task(self._append(self._chunks(nuid), piece)))
                    await asyncio.sleep(0)  # each is handed to the connection before the next
                while waiting:
                    last_sequence = _ascending(last_sequence, await waiting.popleft())
            finally:
                # Not given up: the server may store what is on its way after it was told to purge.
                await asyncio.gather(*waiting, return_exceptions=True)
            description = _Description(
                name=name,
                bucket=self.bucket,
                nuid=nuid,
                size=size,
                chunks=chunks,
                digest=f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}",
                mtime=datetime.now(UTC),
                options={"max_chunk_size": OBJECT_CHUNK_BYTES},
            )
            await self._streams.publish(
                self._meta(name), msgspec.json.encode(description), {"Nats-Rollup": "sub"}
            )
        except BaseException:
            await self._purge_quietly(self._chunks(nuid))
            raise
        if before is not None:
            await self._purge(self._chunks(before.nuid))
        return _info(description)

    async def info(self, name: str) -> ObjectInfo:
        """Return what is known of a value.

        Raises:
            DsecError: ``not_found`` when there is none.
        """
        return _info(await self._found(name))

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        """Yield a value's content, piece by piece; its hash is checked at the end.

        Raises:
            DsecError: ``not_found`` when there is none, or when it was deleted meanwhile;
                ``internal`` when its content is not what was put.
        """
        description = await self._found(name)
        digest, sequence = hashlib.sha256(), 0
        for _ in range(description.chunks):
            message = await self._next(self._chunks(description.nuid), sequence + 1)
            if message is None:
                raise not_found(f"{self.bucket} lost {name} while it was read", name=name)
            sequence = int((message.headers or {}).get("Nats-Sequence", "0"))
            digest.update(message.data)
            yield message.data
        if digest.hexdigest() != _info(description).sha256:
            raise DsecError(
                ErrorCode.INTERNAL,
                f"the value {name} of the bucket {self.bucket} is damaged; put it again",
                details={"name": name},
            )

    async def delete(self, name: str) -> None:
        """Delete a value. A missing one is fine."""
        description = await self._describe(name)
        await self._purge(self._meta(name))
        if description is not None:
            await self._purge(self._chunks(description.nuid))

    async def names(self) -> list[str]:
        """Return the names of all values, sorted."""
        prefix = f"$O.{self.bucket}.M."
        found = []
        for subject in await self._subjects(f"{prefix}>"):
            with_name = subject.removeprefix(prefix)
            try:
                found.append(base64.urlsafe_b64decode(with_name).decode())
            except (binascii.Error, UnicodeDecodeError):
                continue  # nothing of ours
        return sorted(found)

    async def remove_orphans(self, older_than_s: float) -> int:
        """Remove the chunks that no value has, and that nobody has added to for ``older_than_s``.

        Returns:
            How many half-written values were removed.
        """
        prefix = f"$O.{self.bucket}.C."
        # Chunks first: a value that is completed after this look is in the next one.
        chunked = {subject.removeprefix(prefix) for subject in await self._subjects(f"{prefix}>")}
        known = {
            description.nuid
            for name in await self.names()
            if (description := await self._describe(name)) is not None
        }
        oldest, removed = datetime.now(UTC).timestamp() - older_than_s, 0
        for nuid in sorted(chunked - known):
            last = await self._last(self._chunks(nuid))
            if last is not None and _stored_at(last) <= oldest:
                await self._purge(self._chunks(nuid))
                removed += 1
        return removed

    # --- The stream ---------------------------------------------------------------------------

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    def _meta(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def _append(self, subject: str, piece: bytes) -> int:
        return await self._streams.publish(subject, piece, {}, timeout_s=_TIMEOUT_S)

    async def _found(self, name: str) -> _Description:
        description = await self._describe(name)
        if description is None:
            raise not_found(f"the bucket {self.bucket} holds nothing under {name}", name=name)
        return description

    async def _describe(self, name: str) -> _Description | None:
        message = await self._last(self._meta(name))
        if message is None:
            return None
        try:
            description = msgspec.json.decode(message.data, type=_Description)
        except msgspec.DecodeError as error:
            raise DsecError(
                ErrorCode.INTERNAL, f"{self.bucket} describes {name} in an unknown way: {error}"
            ) from None
        return None if description.deleted else description

    async def _last(self, subject: str) -> Msg | None:
        return _present(await self._streams.direct_get(self._stream, subject))

    async def _next(self, subject: str, sequence: int) -> Msg | None:
        body = msgspec.json.encode({"seq": sequence, "next_by_subj": subject})
        call = f"$JS.API.DIRECT.GET.{self._stream}"
        return _present(await self._inbox.request(call, body, None, _TIMEOUT_S))

    async def _subjects(self, pattern: str) -> list[str]:
        found: dict[str, int] = {}
        while True:
            answer = await self._streams.api(
                f"STREAM.INFO.{self._stream}",
                {"subjects_filter": pattern, "offset": len(found)},
                _TIMEOUT_S,
            )
            page: dict[str, int] = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(answer.get("total", 0)):
                return list(found)

    async def _purge(self, subject: str) -> None:
        await self._streams.api(f"STREAM.PURGE.{self._stream}", {"filter": subject}, _TIMEOUT_S)

    async def _purge_quietly(self, subject: str) -> None:
        try:
            await self._purge(subject)
        except DsecError:
            return  # remove_orphans finds it


def _ascending(before: int, sequence: int) -> int:
    if sequence <= before:
        raise DsecError(ErrorCode.INTERNAL, "the server stored a value's chunks in another order")
    return sequence


def _present(message: Msg) -> Msg | None:
    status = (message.headers or {}).get("Status", "")
    if status and status != _NOT_FOUND:
        raise DsecError(
            ErrorCode.UNAVAILABLE, f"JetStream answers {status} to a read", retry_after_s=0.5
        )
    return None if status else message


def _stored_at(message: Msg) -> float:
    text = (message.headers or {}).get("Nats-Time-Stamp", "")
    return msgspec.convert(text, datetime).timestamp() if text else 0.0


def _info(description: _Description) -> ObjectInfo:
    _, _, encoded = description.digest.partition("=")
    return ObjectInfo(
        name=description.name,
        size_bytes=description.size,
        sha256=base64.urlsafe_b64decode(encoded).hex(),
        put_at=description.mtime.timestamp(),
    )
