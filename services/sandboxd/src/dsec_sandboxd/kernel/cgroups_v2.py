"""The pure v2 backend: limits and process control in one tree."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.kernel.cgroups_layout import (
    CONTROLLERS,
    CPU_PERIOD_US,
    LimitText,
    check_name,
    node_pids_max,
)
from dsec_sandboxd.kernel.cgroups_tree import (
    UnifiedCgroup,
    UnifiedDriver,
    is_gone,
    read_field,
    read_file,
    reclaim,
    write_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.kernel.cgroups_layout import CgroupLimits, Layout

_IN_MODIFY: Final = 0x2
_EVENT_HEADER: Final = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_libc: Final = ctypes.CDLL(None, use_errno=True)


def limit_texts(limits: CgroupLimits) -> list[LimitText]:
    """Return what to write, in order, to have a sandbox's limits in force."""
    texts = {"memory.max": b"%d" % limits.memory_bytes, "memory.swap.max": b"0"}
    if limits.end_all_on_oom:
        texts["memory.oom.group"] = b"1"
    if limits.best_effort:
        texts["cpu.idle"] = b"1"  # the least weight, and preempted by all others
    else:
        texts["cpu.weight"] = b"%d" % limits.cpu_weight
    if limits.cpu_quota:
        texts["cpu.max"] = b"%d %d" % (limits.cpu_quota_us, CPU_PERIOD_US)
    texts["pids.max"] = b"%d" % limits.pids
    return [LimitText(0, file, text) for file, text in texts.items()]


class InotifyOomWatch:
    """Out-of-memory notices of all sandboxes on one descriptor: a watch each on memory.events."""

    def __init__(self) -> None:
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")
        self._watches: dict[int, tuple[str, str]] = {}
        self._watch_of: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a notice waits."""
        return self._descriptor

    def add(self, local: str, directory: str) -> None:
        """Start to watch one sandbox."""
        path = f"{directory}/memory.events"
        watch = _checked(
            _libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY), path
        )
        self._watches[watch] = (local, path)
        self._watch_of[local] = watch
        self._seen[local] = read_field(path, b"oom_kill")

    def discard(self, local: str) -> None:
        """Stop to watch one sandbox. Idempotent."""
        watch = self._watch_of.pop(local, None)
        if watch is not None:
            del self._watches[watch], self._seen[local]
            _libc.inotify_rm_watch(self._descriptor, watch)  # refused when the file is gone: fine

    def read(self) -> list[str]:
        """Return the sandboxes in which the kernel has ended a process since the last call."""
        changed: list[tuple[str, str]] = []
        while events := self._read_events():
            offset = 0
            while offset < len(events):
                watch, _, _, name_length = _EVENT_HEADER.unpack_from(events, offset)
                offset += _EVENT_HEADER.size + name_length
                if watch in self._watches and self._watches[watch] not in changed:
                    changed.append(self._watches[watch])
        return [local for local, path in changed if self._has_risen(local, path)]

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_events(self) -> bytes:
        try:
            return os.read(self._descriptor, 65_536)
        except BlockingIOError:
            return b""

    def _has_risen(self, local: str, path: str) -> bool:
        # The file also changes when a limit is merely met; only a kill is an out-of-memory end.
        try:
            count = read_field(path, b"oom_kill")
        except DsecError as error:
            if is_gone(error):
                return False
            raise
        risen = count > self._seen[local]
        self._seen[local] = count
        return risen


class V2Cgroup(UnifiedCgroup):
    """One sandbox on a pure v2 host."""

    def __init__(self, local: str, directory: str, watch: InotifyOomWatch) -> None:
        super().__init__(local, directory)
        self._watch = watch

    def change_limits(self, limits: CgroupLimits) -> None:
        """Put other amounts of memory, processor and processes in force."""
        write_file(f"{self.directory}/memory.max", b"%d" % limits.memory_bytes)
        if not limits.best_effort:
            write_file(f"{self.directory}/cpu.weight", b"%d" % limits.cpu_weight)
        write_file(f"{self.directory}/pids.max", b"%d" % limits.pids)

    def watch_oom(self, *, end_all: bool = True) -> None:  # noqa: ARG002  a file says it here
        """Have the driver's ``read_ooms`` name this sandbox when it runs out of memory."""
        self._watch.add(self.local, self.directory)

    def memory_bytes_current(self) -> int:
        """Return the bytes charged to the sandbox now, page cache included."""
        return int(read_file(f"{self.directory}/memory.current"))

    def memory_bytes_peak(self) -> int:
        """Return the most bytes ever charged.

        Raises:
            DsecError: ``not_found`` when the sandbox is gone, or before Linux 5.19.
        """
        return int(read_file(f"{self.directory}/memory.peak"))

    def pids_current(self) -> int:
        """Return the number of processes and threads."""
        return int(read_file(f"{self.directory}/pids.current"))

    def oom_kills(self) -> int:
        """Return how many processes the kernel ended because the sandbox ran out of memory."""
        return read_field(f"{self.directory}/memory.events", b"oom_kill")

    def reclaim(self) -> None:
        """Give back what memory can be had without ending a process. Slow: call it in a thread."""
        reclaim(f"{self.directory}/memory.reclaim", b"%d" % self.memory_bytes_current())

    def remove(self) -> bool:
        """Remove the sandbox's directories; return whether all are gone. Idempotent."""
        self._watch.discard(self.local)
        return super().remove()


class V2Driver(UnifiedDriver):
    """Makes sandboxes' cgroups on a pure v2 host."""

    def __init__(self, layout: Layout, node: str) -> None:
        super().__init__(layout, node)
        try:
            _enable_controllers(layout.unified)
            write_file(f"{self.parent}/cgroup.subtree_control", _ENABLE)
            write_file(f"{self.parent}/pids.max", b"%d" % node_pids_max())
        except DsecError:
            super().close()
            raise
        self._watch = InotifyOomWatch()

    def limit_texts(self, limits: CgroupLimits) -> list[LimitText]:
        """Return what to write, in order, to have a sandbox's limits in force."""
        return limit_texts(limits)

    def adopt(self, local: str) -> V2Cgroup:
        """Return the handle of a cgroup that may exist already."""
        check_name("sandbox id", local)
        return V2Cgroup(local, f"{self.parent}/{local}", self._watch)

    def oom_fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read_ooms`` has news."""
        return self._watch.fileno()

    def read_ooms(self) -> list[str]:
        """Return the sandboxes that ran out of memory since the last call. Never waits."""
        return self._watch.read()

    def close(self) -> None:
        """Close the descriptors; remove the node's directory when it is empty. Idempotent."""
        self._watch.close()
        super().close()


_ENABLE: Final = " ".join(f"+{name}" for name in CONTROLLERS).encode()


def _enable_controllers(unified: Path) -> None:
    enabled = (unified / "cgroup.subtree_control").read_text().split()
    if all(name in enabled for name in CONTROLLERS):
        return
    try:
        write_file(f"{unified}/cgroup.subtree_control", _ENABLE)
    except DsecError as error:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"cannot enable {', '.join(CONTROLLERS)} in {unified}/cgroup.subtree_control "
            f"({error.details.get('errno')}): run where the cgroup root is writable, or delegate",
        ) from error


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise from_os_error("inotify", OSError(number, os.strerror(number)), what)
    return result
