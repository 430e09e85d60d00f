"""What was sampled, or refused, on disk before anybody is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

import msgspec

from dsec.model_trace import ModelCall
from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid
from dsec_common.model_calls import CallAnswer


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was answered.

    Attributes:
        number: of the report that was answered.
        answer: what its harness is sent, also when it asks again.
        call: its tokens; None when it was refused.
    """

    number: int
    answer: CallAnswer
    call: ModelCall | None = None


class CallJournal:
    """A file of one rollout's calls: a line of JSON for each.

    A line is on disk before its call is answered, so what a harness was told is always here. A
    line that was cut by a crash was not told to anybody and is dropped. One process has the file
    at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._writing = asyncio.Lock()
        self.answered: dict[int, Recorded] = {}
        """By the number of the report."""

    @property
    def calls(self) -> list[ModelCall]:
        """What was sampled."""
        return [it.call for it in self.answered.values() if it.call is not None]

    def __enter__(self) -> Self:
        """Read what is there.

        Raises:
            DsecError: ``conflict`` while another process has it; ``invalid`` for another file.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise from_os_error("open", error, str(self._path)) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DsecError(
                ErrorCode.CONFLICT, f"{self._path} is another relay's: one relay for a rollout"
            ) from None

    def _read(self) -> None:
        size = os.fstat(self._descriptor).st_size
        text = os.pread(self._descriptor, size, 0)
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                recorded = msgspec.json.decode(line, type=Recorded)
            except msgspec.DecodeError as error:
                raise invalid(f"{self._path}:{number} is no call: {error}") from error
            self.answered[recorded.number] = recorded
        if len(whole) < len(text):
            os.ftruncate(self._descriptor, len(whole))
        os.lseek(self._descriptor, 0, os.SEEK_END)

    async def record(self, recorded: Recorded) -> None:
        """Write a call down; on return it is on disk.

        Raises:
            DsecError: naming the call that failed; then it is not there.
        """
        line = msgspec.json.encode(recorded) + b"\n"
        async with self._writing:
            await asyncio.to_thread(self._append, line)
        self.answered[recorded.number] = recorded

    def _append(self, line: bytes) -> None:
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise from_os_error("write", error, str(self._path)) from error
