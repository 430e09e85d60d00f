"""Process control in the v2 tree, which both backends share.

Every host that runs sandboxes has a v2 tree, with or without controllers. A sandbox is a directory
there, ``dsec-<node>/<local>``; each of its commands is a directory below it. The kernel then
freezes and kills whole trees at once: a process cannot leave by forking twice or by starting a
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.kernel.cgroups_layout import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.cgroups_layout import Layout

_FIRST_PAUSE_S: Final = 0.000_2
_LONGEST_PAUSE_S: Final = 0.05
_RECLAIMED_IN_PART: Final = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENODEV})
_NOT_YET: Final = frozenset({errno.EBUSY, errno.ENOTEMPTY})


def write_file(path: str, text: bytes) -> None:
    """Write ``text`` to one cgroup file in one call.

    Raises:
        DsecError: ``unsupported`` when the kernel has no such file, else what the errno says.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        if Path(path).parent.exists():
            raise DsecError(
                ErrorCode.UNSUPPORTED, f"this kernel has no {path}: use a newer one"
            ) from error
        raise from_os_error("write", error, path) from error
    except OSError as error:
        raise from_os_error("write", error, path) from error


def read_file(path: str) -> bytes:
    """Return one cgroup file's text.

    Raises:
        DsecError: ``not_found`` when the cgroup is gone, else what the errno says.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(descriptor, 65_536):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error("read", error, path) from error


def read_field(path: str, name: bytes) -> int:
    """Return the number after ``name`` in a cgroup file of ``name value`` lines; 0 without it."""
    for line in read_file(path).splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def open_path(path: str, flags: int) -> int:
    """Return a descriptor for one cgroup or cgroup file; the caller closes it.

    Raises:
        DsecError: ``exhausted`` without a free descriptor, ``not_found`` when it is gone.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error("open", error, path) from error


def is_gone(error: DsecError) -> bool:
    """Return whether the error says that the cgroup was removed (ENODEV: while a file was open)."""
    return error.details.get("errno") in {"ENOENT", "ENODEV"}


def make_directory(path: str) -> None:
    """Make one cgroup.

    Raises:
        DsecError: ``conflict`` when it exists, else what the errno says.
    """
    try:
        os.mkdir(path, 0o755)  # noqa: PTH102  a hot path; building a Path costs as much as the call
    except FileExistsError as error:
        raise DsecError(
            ErrorCode.CONFLICT, f"the cgroup {path} exists already: remove it first"
        ) from error
    except OSError as error:
        raise from_os_error("mkdir", error, path) from error


def remove_directory(path: str) -> bool:
    """Remove one cgroup; return whether it is gone. A busy one stays, for the caller to retry."""
    try:
        os.rmdir(path)  # noqa: PTH106  as in make_directory
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _NOT_YET:
            return False
        raise from_os_error("rmdir", error, path) from error
    return True


def list_directories(path: str) -> list[str]:
    """Return the names of the cgroups below ``path``, sorted; none when ``path`` is gone."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error("list", error, path) from error


def read_processes(directory: str) -> list[int]:
    """Return the ids of the processes directly in one v2 cgroup; none when it is gone."""
    try:
        return [int(line) for line in read_file(f"{directory}/cgroup.procs").split()]
    except DsecError as error:
        if is_gone(error):
            return []
        raise


def reclaim(path: str, text: bytes) -> None:
    """Have the kernel give memory of a cgroup back, as much as it can.

    What it cannot get at (without swap: anonymous memory) stays, which is no error; neither is a
    cgroup that is gone, nor a kernel without the file (before 5.19).
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, text)
    except OSError as error:
        if error.errno not in _RECLAIMED_IN_PART:
            raise from_os_error("reclaim", error, path) from error
    finally:
        os.close(descriptor)


class UnifiedCgroup:
    """One sandbox's directory in the v2 tree, and the commands' directories below it."""

    def __init__(self, local: str, directory: str) -> None:
        self.local = local
        self.directory = directory
        self._base_uid: int | None = None
        self._made: set[str] = set()  # the commands' directories that this object made

    # -- commands

    def delegate_exec(self, base_uid: int) -> None:
        """Let the host user ``base_uid`` start processes in this sandbox's command directories.

        The kernel asks for write permission on ``cgroup.procs`` of the directory that a process
        starts in and of the nearest one that holds both it and its parent. Nothing else is given:
        limits and ``cgroup.kill`` stay with the host's root.
        """
        self._base_uid = base_uid
        self._give(f"{self.directory}/cgroup.procs", base_uid)

    def create_exec(self, exec_id: str) -> int:
        """Make a command's directory; return its descriptor for CLONE_INTO_CGROUP, to be closed.

        Raises:
            DsecError: ``conflict`` when the exec id is in use, ``not_found`` when the sandbox is
                gone.
        """
        directory = self._exec_directory(exec_id)
        make_directory(directory)
        self._made.add(directory)
        try:
            if self._base_uid is not None:
                self._give(f"{directory}/cgroup.procs", self._base_uid)
            return open_path(directory, os.O_RDONLY | os.O_DIRECTORY)
        except DsecError:
            self.remove_exec(exec_id)
            raise

    def open_exec(self, exec_id: str) -> int:
        """Return a descriptor of a command's directory, which the caller closes.

        Raises:
            DsecError: ``not_found`` when the directory or the sandbox is gone.
        """
        return open_path(self._exec_directory(exec_id), os.O_RDONLY | os.O_DIRECTORY)

    def exec_ids(self) -> list[str]:
        """Return the commands' directories that exist, sorted: what an earlier daemon left."""
        names = list_directories(self.directory)
        return [name.removeprefix("exec-") for name in names if name.startswith("exec-")]

    def kill_exec(self, exec_id: str) -> None:
        """End every process that the command started, daemons too. Nothing when it is gone."""
        _kill(self._exec_directory(exec_id))

    def exec_processes(self, exec_id: str) -> list[int]:
        """Return the ids of the command's processes, as the reader's namespace numbers them."""
        return read_processes(self._exec_directory(exec_id))

    def exec_populated(self, exec_id: str) -> bool:
        """Return whether a process of the command is alive."""
        return _populated(self._exec_directory(exec_id))

    def stop_exec(self, exec_id: str) -> None:
        """Have the command's processes stand still by themselves. Nothing when it is gone."""
        _write_unless_gone(f"{self._exec_directory(exec_id)}/cgroup.freeze", b"1")

    def let_exec_go(self, exec_id: str) -> None:
        """Undo ``stop_exec``. Nothing when it is gone."""
        _write_unless_gone(f"{self._exec_directory(exec_id)}/cgroup.freeze", b"0")

    def exec_stopped(self, exec_id: str) -> bool:
        """Return whether ``stop_exec`` was called for the command, by whichever daemon."""
        try:
            return read_file(f"{self._exec_directory(exec_id)}/cgroup.freeze").strip() == b"1"
        except DsecError as error:
            if is_gone(error):
                return False
            raise

    def remove_exec(self, exec_id: str) -> bool:
        """Remove the command's directory; return whether it is gone. Call again when it is not."""
        directory = self._exec_directory(exec_id)
        if not remove_directory(directory):
            return False
        self._made.discard(directory)
        return True

    # -- the whole sandbox

    def processes(self) -> list[int]:
        """Return the ids of the sandbox's processes, as the reader's namespace numbers them."""
        found = read_processes(self.directory)
        for name in list_directories(self.directory):
            found += read_processes(f"{self.directory}/{name}")
        return found

    def populated(self) -> bool:
        """Return whether any process of the sandbox is alive."""
        return _populated(self.directory)

    def kill(self) -> None:
        """End every process of the sandbox, frozen or not. Nothing when it is gone."""
        _kill(self.directory)

    async def freeze(self, timeout_s: float = 5.0) -> None:
        """Stop every process of the sandbox; return when all stand still.

        Raises:
            DsecError: ``timeout`` when a process stays in an uninterruptible call; the sandbox is
                thawed again.
        """
        write_file(f"{self.directory}/cgroup.freeze", b"1")
        try:
            await _until(
                lambda: read_field(f"{self.directory}/cgroup.events", b"frozen") == 1,
                timeout_s,
                f"sandbox {self.local} did not freeze within {timeout_s} s; it runs on",
            )
        except BaseException:
            with contextlib.suppress(DsecError):  # gone meanwhile: nothing left to thaw
                self.thaw()
            raise

    def thaw(self) -> None:
        """Let a frozen sandbox run on. Nothing when it is not frozen."""
        write_file(f"{self.directory}/cgroup.freeze", b"0")

    def remove(self) -> bool:
        """Remove the sandbox's directories; return whether all are gone.

        Idempotent. False means that a process is still ending: kill, and call again.
        """
        for directory in self._made:
            remove_directory(directory)
        if remove_directory(self.directory):
            return True
        for name in list_directories(self.directory):
            remove_directory(f"{self.directory}/{name}")
        return remove_directory(self.directory)

    async def remove_when_empty(self, timeout_s: float = 10.0) -> None:
        """Remove the sandbox's directories as soon as its processes have ended.

        Raises:
            DsecError: ``timeout`` when some process has not ended by then; it is named.
        """
        await _until(
            self.remove,
            timeout_s,
            f"the cgroups of sandbox {self.local} are busy after {timeout_s} s: kill its processes",
        )

    def cpu_usage_s(self) -> float:
        """Return the processor seconds used. The v2 tree counts them without a controller too."""
        return read_field(f"{self.directory}/cpu.stat", b"usage_usec") / 1e6

    def _exec_directory(self, exec_id: str) -> str:
        return f"{self.directory}/exec-{check_name('exec id', exec_id)}"

    @staticmethod
    def _give(path: str, base_uid: int) -> None:
        try:
            os.chown(path, base_uid, -1)
        except OSError as error:
            raise from_os_error("chown", error, path) from error


def lock_node(layout: Layout, node: str) -> int:
    """Make the node's directory this process's alone; return the descriptor that holds it.

    A second daemon of the same name would take the sandboxes of the first for leftovers. The lock
    ends with the descriptor, so with the process, however that ends.

    Raises:
        DsecError: ``conflict`` while another process has it.
    """
    directory = layout.unified / f"dsec-{check_name('node', node)}"
    directory.mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DsecError(
            ErrorCode.CONFLICT,
            f"another sandboxd of this host runs the node {node} (it holds {directory}): stop it, "
            "or give this node another name",
        ) from error
    return descriptor


class UnifiedDriver:
    """The node's directory in the v2 tree: one parent, one child for each sandbox."""

    def __init__(self, layout: Layout, node: str) -> None:
        self.layout = layout
        self._parent_name = f"dsec-{check_name('node', node)}"
        self._parent_fds: tuple[int, ...] = ()
        self.parent = str(layout.unified / self._parent_name)
        Path(self.parent).mkdir(mode=0o755, exist_ok=True)
        if not Path(self.parent, "cgroup.kill").exists():
            remove_directory(self.parent)
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"the cgroup v2 tree at {layout.unified} has no cgroup.kill: "
                "sandboxes need Linux 5.14 or later",
            )

    def leftovers(self) -> list[str]:
        """Return the local ids whose directories exist, sorted: after a crash, what it left."""
        found: set[str] = set()
        for parent in self.parents():
            found.update(list_directories(parent))
        return sorted(found)

    def parent_fds(self) -> tuple[int, ...]:
        """Return descriptors of the node's directories, the v2 one first; this driver's own.

        Raises:
            DsecError: ``exhausted`` without enough free descriptors; none is left open.
        """
        if not self._parent_fds:
            opened: list[int] = []
            try:
                for parent in self.parents():
                    opened.append(open_path(parent, os.O_RDONLY | os.O_DIRECTORY))  # noqa: PERF401  see except
            except DsecError:
                for descriptor in opened:
                    os.close(descriptor)
                raise
            self._parent_fds = tuple(opened)
        return self._parent_fds

    def close(self) -> None:
        """Remove the node's directories when no sandbox is left in them. Idempotent."""
        for descriptor in self._parent_fds:
            os.close(descriptor)
        self._parent_fds = ()
        for parent in self.parents():
            remove_directory(parent)

    def parents(self) -> list[str]:
        """Return the node's directory in every hierarchy, the v2 one first."""
        return [self.parent]


def remove_all(directories: list[str]) -> bool:
    """Remove several cgroups, however many are busy; return whether all are gone."""
    gone = True
    for directory in directories:
        gone = remove_directory(directory) and gone
    return gone


def _kill(directory: str) -> None:
    _write_unless_gone(f"{directory}/cgroup.kill", b"1")


def _write_unless_gone(path: str, text: bytes) -> None:
    try:
        write_file(path, text)
    except DsecError as error:
        if not is_gone(error):
            raise


def _populated(directory: str) -> bool:
    try:
        return read_field(f"{directory}/cgroup.events", b"populated") == 1
    except DsecError as error:
        if is_gone(error):
            return False
        raise


async def _until(condition: Callable[[], bool], timeout_s: float, message: str) -> None:
    """Return once ``condition`` holds.

    Growing pauses, because a notice from the kernel would cost one more descriptor a sandbox.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() >= deadline:
            raise DsecError(ErrorCode.TIMEOUT, message)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
