"""Cgroups of sandboxes: one interface, a backend for pure v2 hosts and one for hybrid hosts.

The life of a sandbox's cgroup::

    driver = open_driver(detect_layout(), node)     # once; refuses a host that cannot enforce
    cgroup = driver.create(local, limits)           # directories, limits, descriptors
        -> the spawner clones with CLONE_INTO_CGROUP into cgroup.unified_directory_fd;
           the child writes b"0" to each of cgroup.enter_fds, then closes them
    cgroup.close_descriptors()
    cgroup.delegate_exec(base_uid)                  # PID 1 may now start commands in directories
    descriptor = cgroup.create_exec(exec_id)        # one for each command
        -> PID 1 clones with CLONE_INTO_CGROUP into descriptor; the daemon closes its copy
    cgroup.kill_exec(exec_id); cgroup.remove_exec(exec_id)
    cgroup.kill(); await cgroup.remove_when_empty()
    driver.close()

All calls but ``freeze`` and ``remove_when_empty`` are synchronous and short: the kernel answers
from memory, and handing them to a thread would cost more than they take. After a crash,
``driver.leftovers()`` names what is still there, and ``driver.adopt(local)`` takes it over.
"""

from __future__ import annotations

from typing import Protocol

from dsec_sandboxd.kernel.cgroups_layout import (
    CgroupLimits,
    Layout,
    detect_layout,
    require_enforceable,
)
from dsec_sandboxd.kernel.cgroups_v1 import HybridDriver
from dsec_sandboxd.kernel.cgroups_v2 import V2Driver

__all__ = ["Cgroup", "CgroupDriver", "CgroupLimits", "Layout", "detect_layout", "open_driver"]


class Cgroup(Protocol):
    """One sandbox's cgroups. Methods on a sandbox that is gone do nothing or say ``not_found``."""

    local: str
    unified_directory_fd: int
    """The v2 directory for CLONE_INTO_CGROUP; -1 once closed."""
    enter_fds: tuple[int, ...]
    """Files that the child writes ``0`` to; empty on a pure v2 host and once closed."""

    def close_descriptors(self) -> None:
        """Close the descriptors of the creation. Idempotent; nothing else needs them."""

    def watch_oom(self) -> None:
        """Watch an adopted sandbox; ``create`` has done it for a new one."""

    def delegate_exec(self, base_uid: int) -> None:
        """Let the host user ``base_uid`` start processes in the commands' directories."""

    def create_exec(self, exec_id: str) -> int:
        """Make a command's directory; return a descriptor that the caller closes.

        Whoever holds the descriptor can walk the host's cgroup tree from it: PID 1 may, a command
        must never inherit it.

        Raises:
            DsecError: ``conflict`` when the exec id is in use, ``not_found`` when the sandbox is
                gone, ``invalid`` for an id that cannot be a name.
        """

    def kill_exec(self, exec_id: str) -> None:
        """End every process that the command started, daemons too, frozen or not."""

    def exec_processes(self, exec_id: str) -> list[int]:
        """Return the command's process ids as the host numbers them."""

    def exec_populated(self, exec_id: str) -> bool:
        """Return whether a process of the command is alive (a zombie is not)."""

    def remove_exec(self, exec_id: str) -> bool:
        """Remove the command's directory; False while a process is still ending: call again."""

    def processes(self) -> list[int]:
        """Return all process ids of the sandbox as the host numbers them."""

    def populated(self) -> bool:
        """Return whether a process of the sandbox is alive (a zombie is not)."""

    def memory_bytes_current(self) -> int:
        """Return the bytes charged now, page cache included."""

    def memory_bytes_peak(self) -> int:
        """Return the most bytes ever charged."""

    def cpu_usage_s(self) -> float:
        """Return processor seconds used since creation."""

    def pids_current(self) -> int:
        """Return the number of processes and threads."""

    def oom_kills(self) -> int:
        """Return how many processes ended for want of memory; at least 1 after an OOM notice."""

    async def freeze(self, timeout_s: float = 5.0) -> None:
        """Stop every process; return when all stand still.

        Raises:
            DsecError: ``timeout`` when one does not; the sandbox then runs on.
        """

    def thaw(self) -> None:
        """Let a frozen sandbox run on."""

    def kill(self) -> None:
        """End every process of the sandbox, frozen or not."""

    def remove(self) -> bool:
        """Remove all directories and descriptors; False while a process is still ending."""

    async def remove_when_empty(self, timeout_s: float = 10.0) -> None:
        """Remove as soon as the processes have ended.

        Raises:
            DsecError: ``timeout`` when some have not ended by then.
        """


class CgroupDriver(Protocol):
    """Makes and finds the cgroups of one node."""

    layout: Layout

    def create(self, local: str, limits: CgroupLimits) -> Cgroup:
        """Make a sandbox's cgroups with every limit in force and its memory watched.

        A failure leaves nothing behind.

        Raises:
            DsecError: ``invalid`` for an id that cannot be a name, ``conflict`` when the sandbox
                exists, ``unsupported`` when the kernel lacks what a limit needs.
        """

    def adopt(self, local: str) -> Cgroup:
        """Return the handle of a sandbox that an earlier daemon made, to watch, kill or remove."""

    def leftovers(self) -> list[str]:
        """Return the local ids that have a directory in any tree, sorted."""

    def oom_fileno(self) -> int:
        """Return the one descriptor that becomes readable when ``read_ooms`` has news."""

    def read_ooms(self) -> list[str]:
        """Return the sandboxes that ran out of memory since the last call. Never waits.

        Where ``end_all_on_oom`` was asked for, all their processes are ended: by the kernel on v2,
        by this call on a hybrid host.
        """

    def close(self) -> None:
        """Close the descriptors; remove the node's directories when empty. Idempotent."""


def open_driver(layout: Layout, node: str) -> CgroupDriver:
    """Return the backend for this host, with the node's parent directories made.

    Raises:
        DsecError: ``unsupported``, naming what the host cannot enforce.
    """
    require_enforceable(layout)
    return V2Driver(layout, node) if layout.mode == "v2" else HybridDriver(layout, node)
