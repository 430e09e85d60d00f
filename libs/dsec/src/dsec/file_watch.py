"""Changes below a directory of a sandbox, in order, also over a lost connection."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final, Self

from dsec.channel import Channel
from dsec.handle import Closing
from dsec_common.errors import DsecError
from dsec_common.wire.base import new_id
from dsec_common.wire.files import FileChange, FileEvent, FileEvents, WatchFiles

_WAIT_S: Final = 20.0
_REQUEST_TIMEOUT_S: Final = 60.0


class FileWatch(Closing):
    """Changes below one directory, from the moment the ``async with`` block is entered.

    Iterating yields :class:`~dsec_common.wire.files.FileEvent` until what is watched is gone. An
    event with the change ``overflow`` says that others were lost: look at the files themselves.
    A watch that a rollback or the death of the node's daemon has ended says so with an error.
    For example::

        async with sandbox.watch("/work", recursive=True) as changes:
            async for event in changes:
                print(event.change, event.path)

    Attributes:
        path: what is watched.
    """

    def __init__(
        self, channel: Channel, subject: str, path: str, *, recursive: bool, user: str
    ) -> None:
        self.path = path
        self._channel = channel
        self._subject = subject
        self._recursive = recursive
        self._user = user
        self._id = new_id()
        self._seen = 0
        self._begun = False
        self._ended = False
        self._waiting: deque[FileEvent] = deque()

    async def _ask(self, *, wait_s: float = 0.0, close: bool = False) -> FileEvents:
        return await self._channel.ask(
            self._subject,
            WatchFiles(
                path=self.path,
                watch_id=self._id,
                recursive=self._recursive,
                after=self._seen,
                wait_s=wait_s,
                close=close,
                user=self._user,
                begun=self._begun,
            ),
            FileEvents,
            timeout_s=_REQUEST_TIMEOUT_S,
            repeatable=True,
            patience_s=wait_s + 10.0,
        )

    def _take(self, reply: FileEvents) -> None:
        self._begun = True
        if reply.lost:
            first = reply.events[0].seq if reply.events else self._seen + 1
            self._waiting.append(FileEvent(seq=first - 1, change=FileChange.OVERFLOW, path=""))
        self._waiting += reply.events
        if reply.events:
            self._seen = reply.events[-1].seq
        self._ended = reply.ended

    async def __aenter__(self) -> Self:
        self._take(await self._ask())
        return self

    async def _leave(self) -> None:
        # With its sandbox gone it is over anyway; forgotten by its node soon in any case.
        with suppress(DsecError):
            await self._ask(close=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileEvent:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._take(await self._ask(wait_s=_WAIT_S))
        return self._waiting.popleft()
