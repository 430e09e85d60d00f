"""Copying inside a sandbox, and moving what cannot be renamed: a directory that a layer brought.

Both go through a sibling of the target with a name of its own, which becomes the target in one
step when it is whole. Nothing of the target has changed before; what a daemon that is killed leaves
is the sibling (``.dsec-copy-…``).
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import time
from collections import Counter
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id
from dsec_common.wire.files import CopyFile, FileCopied, FileMoved, MoveFile
from dsec_sandboxd.commands import check_path, kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_desk import FileDesk
from dsec_sandboxd.kernel.file_ports import TreeCount
from dsec_sandboxd.records import SandboxRecord

COPIES_PER_SANDBOX: Final = 4
"""Copies at work in one sandbox at once."""
COPY_TIMEOUT_S: Final = 600.0
"""A copy that takes longer is given up."""
_REMOVAL_TIMEOUT_S: Final = 60.0
_PREFIX: Final = ".dsec-copy-"


class Copies:
    """The verbs that copy and move."""

    def __init__(self, desk: FileDesk) -> None:
        self._desk = desk
        self._running: Counter[str] = Counter()

    async def copy_file(self, request: Request[CopyFile]) -> FileCopied:
        """Copy a file or a tree to another path of the same sandbox.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``;
                ``conflict`` for a target that may not be replaced; ``exhausted`` without room, or
                for more copies at once than a sandbox may have.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        target = _place(message.path, message.target)
        check_path(target, "target")
        started_at = time.perf_counter()
        try:
            count = await self._copy(
                record,
                message.path,
                target,
                kernel_user(message.user),
                replace=message.replace,
            )
        except DsecError as error:
            raise self._desk.told(record, "copy_file", message.path, error) from error
        self._desk.log(
            record,
            request,
            "copy_file",
            count.content_bytes,
            started_at,
            target=target,
            entries=str(count.entries),
        )
        return FileCopied(
            cause_id=message.message_id,
            path=message.path,
            target=target,
            entries=count.entries,
            content_bytes=count.content_bytes,
        )

    async def move_file(self, request: Request[MoveFile]) -> FileMoved:
        """Move a file or a directory, in one step where the kernel can.

        It cannot for a directory that a layer brought, and from one mount to another: those are
        copied and then removed, as ``mv`` does.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``;
                ``conflict`` for a target that may not be replaced; as :meth:`copy_file`.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        target = _place(message.path, message.target)
        check_path(target, "target")
        user = kernel_user(message.user)
        started_at = time.perf_counter()
        try:
            try:
                await self._desk.kernel.rename(
                    record.local, message.path, target, replace=message.replace, user=user
                )
            except DsecError as error:
                if error.details.get("reason") != "across_layers":
                    raise
                await self._copy(record, message.path, target, user, replace=message.replace)
                await self._remove(record, message.path, user)
        except DsecError as error:
            raise self._desk.told(record, "move_file", message.path, error) from error
        self._desk.log(record, request, "move_file", 0, started_at, target=target)
        return FileMoved(cause_id=message.message_id, path=message.path, target=target)

    async def _copy(
        self, record: SandboxRecord, source: str, target: str, user: str, *, replace: bool
    ) -> TreeCount:
        target = target.rstrip("/")
        if posixpath.basename(target) in {"", ".", ".."}:
            raise invalid_field("target", f"{target or '/'!r} has no name of its own")
        if self._running[record.local] >= COPIES_PER_SANDBOX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{COPIES_PER_SANDBOX} copies run in this sandbox already: wait for one",
                details={"reason": "too_many_copies"},
                retry_after_s=1.0,
            )
        kernel, local = self._desk.kernel, record.local
        beside = posixpath.join(posixpath.dirname(target), f"{_PREFIX}{new_id()}")
        self._running[local] += 1
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                count = await kernel.copy_path(local, source, beside, user=user)
            await kernel.rename(local, beside, target, replace=replace, user=user)
        except BaseException as error:
            with contextlib.suppress(DsecError):
                await self._remove(record, beside, user)
            if isinstance(error, TimeoutError):
                raise DsecError(
                    ErrorCode.TIMEOUT,
                    f"{source!r} was not copied within {COPY_TIMEOUT_S:g} s; nothing was changed: "
                    "copy it with a command",
                ) from None
            if isinstance(error, DsecError) and beside in error.message:
                raise _about(error, beside, target) from error
            raise
        finally:
            self._running[local] -= 1
            if not self._running[local]:
                del self._running[local]
        return count

    async def _remove(self, record: SandboxRecord, path: str, user: str) -> None:
        """Remove a tree, for a bounded time: somebody inside may fill it again for ever."""
        kernel = self._desk.kernel
        try:
            async with asyncio.timeout(_REMOVAL_TIMEOUT_S):
                while not (await kernel.remove_tree(record.local, path, user=user)).complete:
                    pass
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"{path!r} was copied, and not wholly removed within {_REMOVAL_TIMEOUT_S:g} s: "
                "delete it, and look at what fills it again",
            ) from None


def _place(path: str, target: str) -> str:
    """Return the target; one that ends in a slash is the directory that the path goes into."""
    name = posixpath.basename(path.rstrip("/"))
    return f"{target}{name}" if target.endswith("/") and target.strip("/") and name else target


def _about(error: DsecError, beside: str, target: str) -> DsecError:
    """Return an error about the target: nobody knows the name that it was copied under."""
    return DsecError(
        error.code,
        error.message.replace(beside, target),
        retryable=error.retryable,
        details={**error.details, "path": target},
    )
