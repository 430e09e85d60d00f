"""Watches on directories of sandboxes: numbered events, kept a while for those who ask again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.subjects import validate_local
from dsec_common.wire.files import FileChange, FileEvent, FileEvents, WatchFiles
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES
from dsec_sandboxd.commands import kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_desk import FileDesk, as_text
from dsec_sandboxd.file_sessions import Key, Sessions
from dsec_sandboxd.kernel.file_ports import Watcher

WATCHES_PER_SANDBOX: Final = 8
WATCHES_MAX: Final = 512
#: Kept of each watch until they are asked for; older ones are lost, and that is said.
WATCH_EVENTS_MAX: Final = 4096
#: Of their paths, which the sandbox chooses.
_KEPT_BYTES_MAX: Final = 1 << 20
#: A sandbox that changes files without end must not keep the daemon from the others: of one watch
#: so many events are taken at once, and no more in so many seconds. The rest overflows inside.
_TAKEN_AT_ONCE: Final = 50
_TURN_S: Final = 0.02
#: Of one answer, so that it fits a message whatever the paths are.
ANSWER_EVENTS_MAX: Final = 200
WATCH_WAIT_MAX_S: Final = 30.0


class _Watch:
    """One watch, read by a task of its own."""

    def __init__(self, path: str, watcher: Watcher) -> None:
        self.path = path
        self._watcher = watcher
        self._events: deque[FileEvent] = deque()
        self._kept_bytes = 0
        self._last = 0
        self._news = asyncio.Event()
        self._ended = False
        self._error: DsecError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"watch {path}")

    async def end(self) -> None:
        """Let go of the watcher. Idempotent."""
        self._error = self._error or unavailable(f"the watch of {self.path} is over")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._watcher.close()
        self._news.set()

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            while (event := await self._watcher.next()) is not None:
                self._last += 1
                self._keep(
                    FileEvent(
                        seq=self._last,
                        change=FileChange(event.change.value),
                        path=as_text(event.path),
                        is_directory=event.is_directory,
                        move_id=event.move_id,
                    )
                )
                self._news.set()
                if self._last % _TAKEN_AT_ONCE == 0:
                    await asyncio.sleep(max(0.0, _TURN_S - (time.monotonic() - began)))
                    began = time.monotonic()
            self._ended = True
        except DsecError as error:
            self._error = error
        self._news.set()

    def _keep(self, event: FileEvent) -> None:
        self._events.append(event)
        self._kept_bytes += len(event.path)
        while len(self._events) > WATCH_EVENTS_MAX or self._kept_bytes > _KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._events.popleft().path)

    async def after(self, seq: int, wait_s: float, cause_id: str) -> FileEvents:
        """Return the events after ``seq``, waiting for the first one.

        Raises:
            DsecError: why the watch is over, when all it saw has been told.
        """
        if not 0 <= seq <= self._last:
            raise invalid_field("after", f"{seq} is not between 0 and {self._last}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while seq == self._last and not self._ended and self._error is None:
                    self._news.clear()
                    await self._news.wait()
        oldest = self._last - len(self._events) + 1
        found = list(self._events)[max(seq + 1 - oldest, 0) :]
        if not found and self._error is not None:
            raise self._error
        told = _fitting(found)
        return FileEvents(
            cause_id=cause_id,
            events=told,
            lost=seq + 1 < oldest,
            ended=self._ended and len(told) == len(found),
        )


def _fitting(events: list[FileEvent]) -> tuple[FileEvent, ...]:
    """Return the first that fit one answer; at least one. Paths are of the sandbox's choosing."""
    size = 0
    for count, event in enumerate(events[:ANSWER_EVENTS_MAX]):
        size += len(event.path.encode(errors="surrogatepass"))
        if count and size > LISTING_PAGE_BYTES:
            return tuple(events[:count])
    return tuple(events[:ANSWER_EVENTS_MAX])


class Watches:
    """The verb ``watch_files``."""

    def __init__(self, desk: FileDesk, idle_s: float) -> None:
        self._desk = desk
        self.sessions: Sessions[_Watch] = Sessions(
            "watches",
            desk.clock,
            per_sandbox=WATCHES_PER_SANDBOX,
            per_node=WATCHES_MAX,
            idle_s=idle_s,
        )

    async def watch_files(self, request: Request[WatchFiles]) -> FileEvents:
        """Begin a watch, or return its next events; see ``WatchFiles``.

        Raises:
            DsecError: ``not_found`` for the path, or with reason ``watch_over`` for the watch;
                ``conflict`` with reason ``rolled_back``; ``denied``; ``exhausted`` when there are
                too many watches.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        validate_local(message.watch_id)
        if not 0 <= message.wait_s <= WATCH_WAIT_MAX_S:
            raise invalid_field(
                "wait_s", f"{message.wait_s} is not between 0 and {WATCH_WAIT_MAX_S:g}"
            )
        key: Key = (record.project, record.local, message.watch_id)
        if message.close:
            await self.sessions.end(key)
            return FileEvents(cause_id=message.message_id, ended=True)
        is_new = not self.sessions.has(key)
        if is_new and (message.after or message.begun):
            raise self.sessions.why(key, _watch_over(message.path))

        async def begin() -> _Watch:
            watcher = await self._desk.kernel.watch(
                record.local,
                message.path,
                recursive=message.recursive,
                user=kernel_user(message.user),
            )
            return _Watch(message.path, watcher)

        try:
            watch = await self.sessions.use(key, begin)
            try:
                if watch.path != message.path:
                    raise invalid_field("path", "one watch names different paths")
                wait_s = 0.0 if is_new else message.wait_s
                return await watch.after(message.after, wait_s, message.message_id)
            finally:
                self.sessions.rest(key)
        except DsecError as error:
            if error.code is not ErrorCode.INVALID:
                await self.sessions.end(key)
                error = self.sessions.why(key, error)
            raise self._desk.told(record, "watch_files", message.path, error) from error


def _watch_over(path: str) -> DsecError:
    return DsecError(
        ErrorCode.NOT_FOUND,
        f"the watch of {path[:200]!r} is over: look at the files, begin another",
        details={"what": "watch", "reason": "watch_over"},
    )
