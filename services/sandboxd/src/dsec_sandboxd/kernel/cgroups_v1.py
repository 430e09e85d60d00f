"""The hybrid backend: limits in v1 hierarchies, process control in the v2 tree.

A process of the sandbox enters the v1 cgroups by itself, writing ``0`` to each ``tasks`` file that
the host opened for it: attaching by process id waits for every processor (7 to 11 ms).
"""

from __future__ import annotations

import os
import select
from pathlib import Path
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
    open_path,
    read_field,
    read_file,
    reclaim,
    remove_all,
    write_file,
)

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.cgroups_layout import CgroupLimits, Layout


_MEMORY, _CPU, _PIDS = (1 + CONTROLLERS.index(name) for name in ("memory", "cpu", "pids"))
#: v1 does not count what sockets buffer as memory: it has a limit of its own, this part of the
#: other. Without it a sandbox of 128 MiB kept 600 MiB in TCP buffers, charged to nobody.
_SOCKET_MEMORY_PART: Final = 8
#: What a new cgroup has; it need not be written.
_CPU_SHARES_AT_BIRTH: Final = 1024
_TCP_MEMORY: Final = "/proc/sys/net/ipv4/tcp_mem"


def node_socket_memory_bytes() -> int:
    """Return what all sandboxes together may buffer in sockets.

    Half of the amount from which on the kernel shrinks every TCP connection of the host: sandboxes
    must not slow down the services beside them. From within a container that amount cannot be
    seen; then it is what the kernel sets it to by itself, a sixteenth of the memory.
    """
    try:
        pressure_pages = int(read_file(_TCP_MEMORY).split()[1])
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        pressure_pages = os.sysconf("SC_PHYS_PAGES") // 16
    return pressure_pages * os.sysconf("SC_PAGE_SIZE") // 2


def limit_texts(limits: CgroupLimits) -> list[LimitText]:
    """Return what to write, in order, to have a sandbox's limits in force."""
    memory_bytes = b"%d" % limits.memory_bytes
    sockets_bytes = b"%d" % (limits.memory_bytes // _SOCKET_MEMORY_PART)
    texts = [
        LimitText(_MEMORY, "memory.limit_in_bytes", memory_bytes),
        # Memory and swap together, set to the same: nothing is left for swap.
        LimitText(_MEMORY, "memory.memsw.limit_in_bytes", memory_bytes),
        LimitText(_MEMORY, "memory.kmem.tcp.limit_in_bytes", sockets_bytes),
    ]
    if limits.best_effort:
        # The least weight, and preempted by all others.
        texts.append(LimitText(_CPU, "cpu.idle", b"1"))
    elif limits.cpu_shares != _CPU_SHARES_AT_BIRTH:
        texts.append(LimitText(_CPU, "cpu.shares", b"%d" % limits.cpu_shares))
    if limits.cpu_quota:
        texts.append(LimitText(_CPU, "cpu.cfs_period_us", b"%d" % CPU_PERIOD_US))
        texts.append(LimitText(_CPU, "cpu.cfs_quota_us", b"%d" % limits.cpu_quota_us))
    texts.append(LimitText(_PIDS, "pids.max", b"%d" % limits.pids))
    return texts


def change_limits(memory: str, cpu: str, pids: str, limits: CgroupLimits) -> None:
    """Write other amounts over a sandbox's limits in its three v1 directories."""
    memory_bytes = b"%d" % limits.memory_bytes
    names = ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]
    if limits.memory_bytes < int(read_file(f"{memory}/memory.limit_in_bytes")):
        names.reverse()  # memory may never be allowed more than memory and swap together
    for name in names:
        write_file(f"{memory}/{name}", memory_bytes)
    sockets_bytes = b"%d" % (limits.memory_bytes // _SOCKET_MEMORY_PART)
    write_file(f"{memory}/memory.kmem.tcp.limit_in_bytes", sockets_bytes)
    if not limits.best_effort:
        write_file(f"{cpu}/cpu.shares", b"%d" % limits.cpu_shares)
    write_file(f"{pids}/pids.max", b"%d" % limits.pids)


class EventfdOomWatch:
    """Out-of-memory notices of all sandboxes behind one epoll descriptor.

    v1 tells an eventfd for each cgroup when it has no memory left, just before the kernel chooses
    a process to end: one descriptor for each sandbox, and a notice may precede the count.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._eventfd_of: dict[str, int] = {}
        self._local_of: dict[int, str] = {}

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a notice waits."""
        return self._epoll.fileno()

    def add(self, local: str, memory: str) -> None:
        """Start to watch one sandbox by its v1 memory directory."""
        path = f"{memory}/memory.oom_control"
        subject = open_path(path, os.O_RDONLY)
        notice = -1
        try:
            notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            write_file(f"{memory}/cgroup.event_control", b"%d %d" % (notice, subject))
            self._epoll.register(notice, select.EPOLLIN)
        except (OSError, DsecError) as error:
            if notice >= 0:
                os.close(notice)
            if isinstance(error, OSError):
                raise from_os_error("watch", error, path) from error
            raise
        finally:
            os.close(subject)
        self._eventfd_of[local] = notice
        self._local_of[notice] = local

    def discard(self, local: str) -> None:
        """Stop to watch one sandbox. Idempotent. Closing the eventfd ends the kernel's side too."""
        notice = self._eventfd_of.pop(local, None)
        if notice is not None:
            del self._local_of[notice]
            os.close(notice)  # nobody else has it open, so that epoll forgets it, too

    def read(self) -> list[str]:
        """Return the sandboxes that ran out of memory since the last call."""
        found = []
        for notice, _ in self._epoll.poll(0):
            os.eventfd_read(notice)
            found.append(self._local_of[notice])
        return found

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for local in list(self._eventfd_of):
            self.discard(local)
        self._epoll.close()


class HybridCgroup(UnifiedCgroup):
    """One sandbox on a host whose controllers are bound to v1."""

    def __init__(
        self, local: str, directory: str, v1: dict[str, str], driver: HybridDriver
    ) -> None:
        super().__init__(local, directory)
        self.v1 = v1
        self._driver = driver

    def change_limits(self, limits: CgroupLimits) -> None:
        """Put other amounts of memory, processor and processes in force."""
        change_limits(self.v1["memory"], self.v1["cpu"], self.v1["pids"], limits)

    def watch_oom(self, *, end_all: bool = True) -> None:
        """Have the driver's ``read_ooms`` name this sandbox when it runs out of memory.

        v1 ends one process only. With ``end_all``, ``read_ooms`` ends the others.
        """
        self._driver.watch(self, end_all=end_all)

    def memory_bytes_current(self) -> int:
        """Return the bytes charged to the sandbox now, page cache included."""
        return int(read_file(f"{self.v1['memory']}/memory.usage_in_bytes"))

    def memory_bytes_peak(self) -> int:
        """Return the most bytes ever charged."""
        return int(read_file(f"{self.v1['memory']}/memory.max_usage_in_bytes"))

    def pids_current(self) -> int:
        """Return the number of processes and threads."""
        return int(read_file(f"{self.v1['pids']}/pids.current"))

    def oom_kills(self) -> int:
        """Return how many processes the kernel ended because the sandbox ran out of memory.

        At least one once ``read_ooms`` named the sandbox: ending all processes upon the notice may
        be quicker than the kernel's own choice, which then counts nothing.
        """
        counted = read_field(f"{self.v1['memory']}/memory.oom_control", b"oom_kill")
        return max(counted, int(self._driver.has_run_out(self.local)))

    def reclaim(self) -> None:
        """Give back what memory can be had without ending a process. Slow: call it in a thread."""
        reclaim(f"{self.v1['memory']}/memory.force_empty", b"0")

    def remove(self) -> bool:
        """Remove the sandbox's directories in all trees; return whether all are gone. Idempotent.

        A memory cgroup whose directory is gone lives on in the kernel while page cache is charged
        to it; emptying it here would throw away the layers' cache that other sandboxes read.
        """
        self._driver.unwatch(self.local)
        return super().remove() and remove_all(list(self.v1.values()))


class HybridDriver(UnifiedDriver):
    """Makes sandboxes' cgroups on a host whose controllers are bound to v1."""

    def __init__(self, layout: Layout, node: str) -> None:
        super().__init__(layout, node)
        self._v1_parents = {name: str(layout.v1[name] / self._parent_name) for name in CONTROLLERS}
        for parent in self._v1_parents.values():
            Path(parent).mkdir(mode=0o755, exist_ok=True)
        # Held by the parent, so that the first and last sandbox do not make the kernel rewrite its
        # code to start and stop counting.
        write_file(
            f"{self._v1_parents['memory']}/memory.kmem.tcp.limit_in_bytes",
            b"%d" % node_socket_memory_bytes(),
        )
        write_file(f"{self._v1_parents['pids']}/pids.max", b"%d" % node_pids_max())
        self._watch = EventfdOomWatch()
        self._ends_all: dict[str, HybridCgroup] = {}
        self._ran_out: set[str] = set()

    def limit_texts(self, limits: CgroupLimits) -> list[LimitText]:
        """Return what to write, in order, to have a sandbox's limits in force."""
        return limit_texts(limits)

    def adopt(self, local: str) -> HybridCgroup:
        """Return the handle of a cgroup that may exist already."""
        check_name("sandbox id", local)
        v1 = {name: f"{parent}/{local}" for name, parent in self._v1_parents.items()}
        return HybridCgroup(local, f"{self.parent}/{local}", v1, self)

    def watch(self, cgroup: HybridCgroup, *, end_all: bool) -> None:
        """Watch one sandbox's memory; see ``HybridCgroup.watch_oom``."""
        self._watch.add(cgroup.local, cgroup.v1["memory"])
        if end_all:
            self._ends_all[cgroup.local] = cgroup

    def unwatch(self, local: str) -> None:
        """Stop to watch one sandbox. Idempotent."""
        self._watch.discard(local)
        self._ends_all.pop(local, None)
        self._ran_out.discard(local)

    def has_run_out(self, local: str) -> bool:
        """Return whether ``read_ooms`` has named this sandbox."""
        return local in self._ran_out

    def oom_fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read_ooms`` has news."""
        return self._watch.fileno()

    def read_ooms(self) -> list[str]:
        """Return the sandboxes that ran out of memory since the last call. Never waits."""
        found = self._watch.read()
        self._ran_out.update(found)
        for local in found:
            if local in self._ends_all:
                self._ends_all[local].kill()
        return found

    def close(self) -> None:
        """Close the descriptors; remove the node's directories when empty. Idempotent."""
        self._ends_all.clear()
        self._watch.close()
        super().close()

    def parents(self) -> list[str]:
        """Return the node's directory in every hierarchy, the v2 one first."""
        return [self.parent, *self._v1_parents.values()]
