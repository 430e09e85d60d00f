"""The files of one task: written before its command, read when it has ended.

All in the sandbox's own root, by processes of the sandbox, as the user that the command runs as:
whatever a path means in there, it never means anything of the host.
"""

from __future__ import annotations

import os
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.pool import CALL_FILES_MAX_BYTES
from dsec_common.wire.sandbox import CreateSandbox
from dsec_common.wire.task import TaskFiles
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.interface import Kernel, OpenMode

#: Each costs a process of the sandbox.
TASK_FILES_MAX: Final = 64
"""The most files of one task, each way."""
_PATH_BYTES_MAX: Final = 4096
_MODE: Final = 0o644


def check_task(request: CreateSandbox) -> None:
    """Return if the request's task makes sense, or it has none.

    Raises:
        DsecError: ``invalid``, naming the field.
    """
    task = request.task
    if task is None:
        return
    if request.command is None:
        raise invalid_field("task", "there is no command whose files these are")
    for field, paths in (("task.write", tuple(task.write)), ("task.read", task.read)):
        if len(paths) > TASK_FILES_MAX:
            raise invalid_field(field, f"{len(paths)} files; {TASK_FILES_MAX} are the most")
        for path in paths:
            size = len(path.encode("utf-8", "surrogateescape"))
            if not path.startswith("/") or "\0" in path or size > _PATH_BYTES_MAX:
                raise invalid_field(field, f"{path[:80]!r} is not an absolute path")
    size = sum(len(data) for data in task.write.values())
    if size > CALL_FILES_MAX_BYTES:
        raise invalid_field("task.write", f"{size} bytes; {CALL_FILES_MAX_BYTES} are the most")


class TaskDesk:
    """Writes and reads the files of tasks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    async def write(self, local: str, task: TaskFiles, user: str) -> None:
        """Write the files; directories above them are made.

        Raises:
            DsecError: for the first that cannot be written, with its path.
        """
        for path, data in task.write.items():
            with await self._kernel.put_file(local, path, parents=True, user=user) as upload:
                _write_all(upload.descriptor, data, path)
                await upload.commit(_MODE)

    async def read(
        self, local: str, task: TaskFiles, user: str
    ) -> tuple[dict[str, bytes], DsecError | None]:
        """Return the files that can be read, and why the first other one cannot."""
        files: dict[str, bytes] = {}
        failure: DsecError | None = None
        left_bytes = CALL_FILES_MAX_BYTES
        for path in task.read:
            try:
                descriptor = await self._kernel.open_file(local, path, OpenMode.READ, user=user)
                try:
                    data = _read_at_most(descriptor, left_bytes, path)
                finally:
                    os.close(descriptor)
            except DsecError as error:
                failure = failure or error
                continue
            files[path] = data
            left_bytes -= len(data)
        return files, failure


def _write_all(descriptor: int, data: bytes, path: str) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"cannot write {path}: {error.strerror}; give the sandbox more disk",
            retryable=False,
            details={"what": "path", "path": path},
        ) from error


def _read_at_most(descriptor: int, size: int, path: str) -> bytes:
    pieces, left = [], size + 1
    try:
        while left and (piece := os.read(descriptor, left)):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}", what="path", path=path) from error
    data = b"".join(pieces)
    if len(data) > size:
        raise invalid(
            f"{path} is larger than the {size} bytes that an answer has left for it: read it by "
            "pieces, from a sandbox that stays",
            what="path",
            reason="too_large",
            path=path,
        )
    return data
