"""Key-value buckets: typed values, compare-and-swap, a time to live for each entry."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.kv import KeyValue as ClientKeyValue

from dsec_common.bus_headers import outgoing
from dsec_common.bus_types import MessageT, StreamSpec
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.base import MSGPACK, decode, encode

if TYPE_CHECKING:
    from dsec_common.bus_streams import Streams

_KEY: Final = re.compile(r"[-/_=a-zA-Z0-9]+(?:\.[-/_=a-zA-Z0-9]+)*")
_BUCKET: Final = re.compile(r"[-_a-zA-Z0-9]+")
_GONE: Final = frozenset({"DEL", "PURGE"})
_RECONNECT_PAUSE_S: Final = 0.2
#: A watcher that hears nothing looks after itself so often; all else wakes it.
_LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Entry(Generic[MessageT]):
    """A key's state at one revision. ``value`` is None when the key was deleted or expired."""

    key: str
    value: MessageT | None
    revision: int


class KeyValue(Generic[MessageT]):
    """A bucket of messages of one type; made by ``Bus.kv``.

    Keys are tokens of letters, digits and ``-_/=`` joined by dots.
    """

    def __init__(
        self, client: Client, streams: Streams, bucket: str, message_type: type[MessageT]
    ) -> None:
        self.bucket = bucket
        self._client = client
        self._streams = streams
        self._message_type = message_type
        self._prefix = f"$KV.{bucket}."

    @staticmethod
    def stream_spec(
        bucket: str,
        *,
        ttl_s: float,
        history: int,
        in_memory: bool,
        replicas: int,
        max_bytes: int = -1,
    ) -> StreamSpec:
        """Return the stream behind a bucket."""
        if not _BUCKET.fullmatch(bucket):
            raise invalid(f"{bucket!r} is not a bucket name: use letters, digits, '-' and '_'")
        return StreamSpec(
            name=f"KV_{bucket}",
            subjects=(f"$KV.{bucket}.>",),
            in_memory=in_memory,
            max_age_s=ttl_s,
            max_messages_per_subject=history,
            max_bytes=max_bytes,
            replicas=replicas,
            bucket=True,
        )

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise invalid(
                f"{key!r} is not a key: use letters, digits, '-', '_', '/' and '=', joined by dots"
            )
        return self._prefix + key

    async def get(self, key: str) -> Entry[MessageT]:
        """Return the key's entry.

        Raises:
            DsecError: ``not_found`` when the key has no value.
        """
        reply = await self._streams.direct_get(f"KV_{self.bucket}", self._subject(key))
        headers = reply.headers or {}
        if headers.get("Status") or headers.get("KV-Operation") or "Nats-Marker-Reason" in headers:
            raise not_found(f"{self.bucket} holds nothing under {key}", key=key)
        return Entry(
            key, decode(reply.data, self._message_type), int(headers.get("Nats-Sequence", "0"))
        )

    async def put(self, key: str, value: MessageT, *, ttl_s: float = 0.0) -> int:
        """Set the key whatever it holds; return the new revision.

        ``ttl_s`` drops this entry after whole seconds, at least 1; 0 means the bucket's own rule.
        """
        return await self._write(key, value, None, ttl_s)

    async def create(self, key: str, value: MessageT, *, ttl_s: float = 0.0) -> int:
        """Set the key only if it holds nothing; return the revision.

        Raises:
            DsecError: ``conflict`` when it holds something.
        """
        try:
            return await self._write(key, value, 0, ttl_s)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
        # A deleted key keeps a marker, whose revision is then the one to replace.
        reply = await self._streams.direct_get(f"KV_{self.bucket}", self._subject(key))
        headers = reply.headers or {}
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers:
            return await self._write(key, value, int(headers.get("Nats-Sequence", "0")), ttl_s)
        if headers.get("Status"):
            return await self._write(key, value, 0, ttl_s)
        raise DsecError(
            ErrorCode.CONFLICT,
            f"{self.bucket} already holds something under {key}",
            details={"key": key},
        )

    async def update(self, key: str, value: MessageT, revision: int, *, ttl_s: float = 0.0) -> int:
        """Set the key only if ``revision`` is its last; return the new revision.

        Raises:
            DsecError: ``conflict`` when someone else changed it meanwhile: read it again.
        """
        return await self._write(key, value, revision, ttl_s)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Delete the key; with ``revision`` only if that is its last. A missing key is fine.

        Raises:
            DsecError: ``conflict`` when ``revision`` is not the last.
        """
        headers = outgoing(MSGPACK, {"KV-Operation": "DEL"})
        await self._streams.publish(
            self._subject(key), b"", headers, expected_last_subject_sequence=revision
        )

    async def _write(self, key: str, value: MessageT, revision: int | None, ttl_s: float) -> int:
        return await self._streams.publish(
            self._subject(key),
            encode(value),
            outgoing(MSGPACK),
            expected_last_subject_sequence=revision,
            ttl_s=ttl_s,
        )

    async def keys(self, pattern: str = ">") -> list[str]:
        """Return the keys that hold a value, those that match ``pattern`` only."""
        return [entry.key for entry in await self.entries(pattern)]

    async def entries(self, pattern: str = ">") -> list[Entry[MessageT]]:
        """Return all entries that hold a value, those whose keys match ``pattern`` only."""
        found: dict[str, Entry[MessageT]] = {}
        async for entry in self._watch_once(pattern):
            if entry is None:
                break
            found[entry.key] = entry
        return [entry for entry in found.values() if entry.value is not None]

    async def watch(self, pattern: str = ">") -> AsyncGenerator[Entry[MessageT] | None]:
        """Yield the present entries, then ``None`` once, then every change, until left.

        After a lost connection the present entries are yielded again (and ``None`` again): what
        changed meanwhile is not missed, but entries that vanished meanwhile are only absent.
        """
        while True:
            try:
                async for entry in self._watch_once(pattern):
                    yield entry
            except DsecError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _watch_once(self, pattern: str) -> AsyncGenerator[Entry[MessageT] | None]:
        """Yield as :meth:`watch` does, and return when the connection has been lost."""
        bucket = ClientKeyValue(
            name=self.bucket,
            stream=f"KV_{self.bucket}",
            pre=self._prefix,
            js=self._client.jetstream(),
            direct=True,
        )
        epoch = self._streams.epoch
        try:
            watcher: Any = await bucket.watch(pattern)
        except (nats.errors.Error, nats.js.errors.Error) as error:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"cannot watch bucket {self.bucket}: {error}",
                retry_after_s=_RECONNECT_PAUSE_S,
            ) from error
        state = watcher._sub._sub._jsi  # noqa: SLF001  the client offers no other way
        # It would look four times a second whether an answer to the server is due.
        state._fctask.cancel()  # noqa: SLF001  same
        try:
            while epoch == self._streams.epoch:
                await _answer_flow_control(self._client, state)
                try:
                    update = await self._next(watcher)
                except TimeoutError:
                    continue
                if update is None:
                    yield None
                    continue
                gone = update.operation in _GONE or not update.value
                value = None if gone else decode(update.value, self._message_type)
                yield Entry(update.key, value, update.revision or 0)
        finally:
            _cancel_check(state)
            if not self._client.is_closed:
                await watcher.stop()

    async def _next(self, watcher: Any) -> Any:
        """Return the next update.

        Raises:
            TimeoutError: it is time to look, or the connection was lost and is back.
        """
        # Not the watcher's own `updates`: it loses a cancellation that comes together with an
        # update, and whoever watches could then never be stopped.
        async with asyncio.timeout(_LOOK_S) as wait:
            self._streams.waits.add(wait)
            try:
                return await anext(watcher)
            finally:
                self._streams.waits.discard(wait)


async def _answer_flow_control(client: Client, state: Any) -> None:
    """Tell the server that what it waits for has been taken in, once that is so."""
    taken = state._fciseq - state._psub._pending_queue.qsize()  # noqa: SLF001  as its own task does
    if state._fcr and taken >= state._fcd:  # noqa: SLF001  same
        reply, state._fcr, state._fcd = state._fcr, None, 0  # noqa: SLF001  same
        with contextlib.suppress(nats.errors.Error):
            await client.publish(reply)


def _cancel_check(state: Any) -> None:
    """End the task that checks a watcher's heartbeats.

    The client does so only where it can still unsubscribe. Left alone on a connection that drains,
    it takes the silence for a lost consumer and makes new ones for as long as it lives.
    """
    if state._hbtask is not None:  # noqa: SLF001  the client offers no other way
        state._hbtask.cancel()  # noqa: SLF001  same
