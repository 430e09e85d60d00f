"""One living sandbox: its commands and files."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_sandboxd.kernel.command import out_of_descriptors
from dsec_sandboxd.kernel.init import InitClient
from dsec_sandboxd.kernel.interface import DirectoryEntry, FileKind, FileStat, OpenMode
from dsec_sandboxd.kernel.protocol import FileOperation, step_name
from dsec_sandboxd.kernel.spawner import creation_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.command import CommandRun
    from dsec_sandboxd.kernel.init import FileAnswer
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Stream

_PATH_BYTES_MAX: Final = 4095
#: A file operation takes well under a millisecond. Whoever waits for one holds up others.
_FILE_TIMEOUT_S: Final = 10.0
#: How many empty command cgroups one sandbox keeps for its next commands.
_IDLE_DIRECTORIES_MAX: Final = 2
#: How many cgroups of commands that left daemons are looked at when a command begins.
_SWEPT_AT_ONCE: Final = 8

_OPEN_OPERATIONS: Final = {
    OpenMode.READ: FileOperation.OPEN_READ,
    OpenMode.WRITE: FileOperation.OPEN_WRITE,
    OpenMode.APPEND: FileOperation.OPEN_APPEND,
    OpenMode.CREATE: FileOperation.OPEN_CREATE,
}
_WITH_DESCRIPTOR: Final = {*_OPEN_OPERATIONS.values(), FileOperation.LIST}
_LETTERS: Final = {"f": FileKind.FILE, "d": FileKind.DIRECTORY, "l": FileKind.LINK}


@dataclass(slots=True)
class _CommandDirectory:
    """A v2 cgroup for one command at a time, by which its whole tree is killed."""

    name: str
    descriptor: int
    killed: bool = False
    """Never used again: Linux kills whatever ``CLONE_INTO_CGROUP`` puts into a cgroup that was once
    killed, since it compares the cgroup's count of kills with that of the parent's own."""

    @property
    def reusable(self) -> bool:
        """Whether another command may run in it."""
        return self.descriptor >= 0 and not self.killed

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Sandbox:
    """A sandbox from its clone to its end. ``on_end`` is called when PID 1 ends by itself."""

    def __init__(
        self,
        local: str,
        slot: int,
        cgroup: Cgroup,
        *,
        pidfd: int,
        control_fd: int,
        on_end: Callable[[], None],
    ) -> None:
        self.local = local
        self.slot = slot
        self.cgroup = cgroup
        self.pidfd = pidfd
        self.init = InitClient(control_fd, on_end)
        self.ending: asyncio.Task[None] | None = None
        self.oom_notices = 0
        self._idle: list[_CommandDirectory] = []
        self._returned: list[_CommandDirectory] = []
        self._occupied: deque[_CommandDirectory] = deque()  # without descriptors
        self._next_directory = 0

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        self.init.close()
        for directory in (*self._idle, *self._returned):
            directory.close()
        self._idle.clear()
        self._returned.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    # -- commands

    def prepare_directory(self) -> None:
        """Make the first command's cgroup ahead of need."""
        self._idle.append(self._make_directory())

    async def exec(
        self,
        spec: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None,
        read_ooms: Callable[[], None],
    ) -> CommandResult:
        """Run a command; see ``Kernel.exec``."""
        directory = self._take_directory()
        notices = self.oom_notices
        timers: list[asyncio.TimerHandle] = []
        clean = True  # until it may have processes
        try:
            run = self.init.start_command(spec, directory.descriptor, on_output)
            clean = False
            if spec.timeout_s > 0:
                self._arm(run, directory, timers)
            result = await run.done
            clean = not run.timed_out
        except DsecError:
            clean = clean or not run.was_started
            raise
        finally:
            for timer in timers:
                timer.cancel()
            if not clean:
                self._kill(directory)
            self._give_back(directory)
        if result.exit_code == 0:
            return result
        read_ooms()
        return replace(result, oom=self.oom_notices > notices)

    def _arm(
        self, run: CommandRun, directory: _CommandDirectory, timers: list[asyncio.TimerHandle]
    ) -> None:
        loop = asyncio.get_running_loop()

        def terminate() -> None:
            run.timed_out = True
            if self.init.alive:
                self.init.signal_tree(run, directory.descriptor, signal.SIGTERM)
            timers.append(loop.call_later(run.spec.grace_s, kill))

        def kill() -> None:
            self._kill(directory)

        timers.append(loop.call_later(run.spec.timeout_s, terminate))

    def _kill(self, directory: _CommandDirectory) -> None:
        directory.killed = True
        self.cgroup.kill_exec(directory.name)

    def _take_directory(self) -> _CommandDirectory:
        self._sweep()
        return self._idle.pop() if self._idle else self._make_directory()

    def _make_directory(self) -> _CommandDirectory:
        name = str(self._next_directory)
        self._next_directory += 1
        return _CommandDirectory(name, self.cgroup.create_exec(name))

    def _give_back(self, directory: _CommandDirectory) -> None:
        if self.pidfd < 0:
            directory.close()
        else:
            self._returned.append(directory)

    def _sweep(self) -> None:
        """Reuse the cgroups of ended commands; those with daemons left in them wait.

        Every command may leave daemons: no more than a few of their cgroups are looked at again in
        one turn, and none keeps a descriptor, of which the node has few.
        """
        again = [self._occupied.popleft() for _ in range(min(len(self._occupied), _SWEPT_AT_ONCE))]
        for directory in (*self._returned, *again):
            if self.cgroup.exec_populated(directory.name):
                directory.close()
                self._occupied.append(directory)
            elif directory.reusable and len(self._idle) < _IDLE_DIRECTORIES_MAX:
                self._idle.append(directory)
            else:
                directory.close()
                self.cgroup.remove_exec(directory.name)
        self._returned.clear()

    # -- files

    async def open_file(self, path: str, mode: OpenMode, permissions: int, user: str) -> int:
        """Open a regular file; see ``Kernel.open_file``."""
        _, descriptors = await self._file(_OPEN_OPERATIONS[mode], user, path, permissions)
        # Opened without blocking, for the sandbox's sake; regular files ignore the flag.
        return descriptors[0]

    async def stat(self, path: str, user: str) -> FileStat:
        """Describe a path; see ``Kernel.stat``."""
        reply, _ = await self._file(FileOperation.STAT, user, path)
        return FileStat(
            kind=_kind_of(reply.file_mode),
            size_bytes=reply.size_bytes,
            mode=stat.S_IMODE(reply.file_mode),
            user_id=reply.user_id,
            group_id=reply.group_id,
            modified_at=reply.modified_ns / 1e9,
        )

    async def list_directory(self, path: str, user: str) -> list[DirectoryEntry]:
        """List a directory; see ``Kernel.list_directory``."""
        _, descriptors = await self._file(FileOperation.LIST, user, path)
        names_fd = descriptors[0]
        try:
            size = os.fstat(names_fd).st_size
            text = os.fsdecode(os.pread(names_fd, size, 0))
        finally:
            os.close(names_fd)
        return [
            DirectoryEntry(name=entry[1:], kind=_LETTERS.get(entry[0], FileKind.OTHER))
            for entry in text.split("\0")
            if entry
        ]

    async def make_directory(
        self, path: str, *, parents: bool, permissions: int, user: str
    ) -> None:
        """Create a directory; see ``Kernel.make_directory``."""
        operation = FileOperation.MKDIR_PARENTS if parents else FileOperation.MKDIR
        await self._file(operation, user, path, permissions)

    async def rename(self, source: str, target: str, user: str) -> None:
        """Move a path; see ``Kernel.rename``."""
        check_path(target)
        await self._file(FileOperation.RENAME, user, source, target=target)

    async def unlink(self, path: str, user: str) -> None:
        """Remove a path; see ``Kernel.unlink``."""
        await self._file(FileOperation.UNLINK, user, path)

    async def _file(
        self,
        operation: FileOperation,
        user: str,
        path: str,
        permissions: int = 0,
        target: str | None = None,
    ) -> FileAnswer:
        check_path(path)
        paths = [path] if target is None else [path, target]
        try:
            async with asyncio.timeout(_FILE_TIMEOUT_S):
                reply, descriptors = await self.init.file(operation, user, paths, permissions)
        except TimeoutError as error:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"{path!r}: the sandbox did not answer within {_FILE_TIMEOUT_S:g} s: look at what "
                "its processes do, or delete it",
                details={"operation": operation.name.lower(), "path": path},
            ) from error
        if reply.error:
            raise file_error(path, user, reply.step, reply.error)
        if operation in _WITH_DESCRIPTOR and not descriptors:
            raise out_of_descriptors()
        return reply, descriptors


def check_path(path: str) -> None:
    """Refuse what can never name a file of a sandbox.

    Raises:
        DsecError: ``invalid`` with reason ``invalid_path``.
    """
    size = len(os.fsencode(path))
    if not path.startswith("/") or "\0" in path or size > _PATH_BYTES_MAX:
        raise invalid(
            f"{path[:200]!r} is not an absolute path of at most {_PATH_BYTES_MAX} bytes",
            reason="invalid_path",
        )


_FILE_CODES: Final = {
    errno.ENOENT: ErrorCode.NOT_FOUND,
    errno.ENOTDIR: ErrorCode.NOT_FOUND,
    errno.EACCES: ErrorCode.DENIED,
    errno.EPERM: ErrorCode.DENIED,
    errno.EROFS: ErrorCode.DENIED,
    errno.EEXIST: ErrorCode.CONFLICT,
    errno.ENOTEMPTY: ErrorCode.CONFLICT,
    errno.ENOSPC: ErrorCode.EXHAUSTED,
    errno.ENOMEM: ErrorCode.EXHAUSTED,
    errno.EAGAIN: ErrorCode.EXHAUSTED,
    errno.EISDIR: ErrorCode.INVALID,
    errno.ELOOP: ErrorCode.INVALID,
    errno.ENAMETOOLONG: ErrorCode.INVALID,
    errno.EINVAL: ErrorCode.INVALID,
    errno.EXDEV: ErrorCode.INVALID,
    errno.ENXIO: ErrorCode.INVALID,
}
_INVALID_REASONS: Final = {errno.EISDIR: "is_directory", errno.ENXIO: "not_a_file"}
_INVALID_WORDS: Final = {
    "is_directory": "is a directory; name a file",
    "not_a_file": "is no regular file; only those are read and written",
    "invalid_path": "is not a possible path; check its length, names and links",
}


def file_error(path: str, user: str, step: int, error: int) -> DsecError:
    """Return the typed error for a file operation that the sandbox refused."""
    operation = step_name(step)
    base = creation_error(step, error)
    code = _FILE_CODES.get(error, ErrorCode.INTERNAL)
    if operation == "file_child_died":
        code, extra = ErrorCode.UNAVAILABLE, {"what": "path"}
        said = f"{path!r}: a process in the sandbox ended the operation: try again"
    elif operation == "file_user":
        said, extra = f"the user {user!r} is not known in the sandbox", {"what": "user"}
    elif code is ErrorCode.INVALID:
        reason = _INVALID_REASONS.get(error, "invalid_path")
        reason = "not_a_file" if operation == "file_kind" and error == errno.EINVAL else reason
        said, extra = f"{path!r} {_INVALID_WORDS[reason]}", {"reason": reason}
    else:
        said, extra = f"{path!r}: {os.strerror(error)}", {"what": "path"}
    return DsecError(code, said, details={**base.details, **extra, "path": path})


def _kind_of(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return FileKind.FILE
    if stat.S_ISDIR(mode):
        return FileKind.DIRECTORY
    return FileKind.LINK if stat.S_ISLNK(mode) else FileKind.OTHER
