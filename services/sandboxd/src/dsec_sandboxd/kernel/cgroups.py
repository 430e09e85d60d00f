"""Cgroups of sandboxes: one interface, a backend for pure v2 hosts and one for hybrid hosts.

The life of a sandbox's cgroup::

    driver = open_driver(detect_layout(), node)     # once; refuses a host that cannot enforce
    cgroup = driver.adopt(local)                    # names it
        -> the spawner makes its directory below each of driver.parent_fds(), writes
           driver.limit_texts(limits) there, and clones with CLONE_INTO_CGROUP into the v2 one;
           the child writes b"0" to the tasks file of each other one
    cgroup.watch_oom(end_all=…)
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
    LimitText,
    detect_layout,
    require_enforceable,
)
from dsec_sandboxd.kernel.cgroups_v1 import HybridDriver
from dsec_sandboxd.kernel.cgroups_v2 import V2Driver

__all__ = [
    "Cgroup",
    "CgroupDriver",
    "CgroupLimits",
    "Layout",
    "LimitText",
    "detect_layout",
    "open_driver",
]


class Cgroup(Protocol):
    """One sandbox's cgroups. Methods on a sandbox that is gone do nothing or say ``not_found``."""

    local: str
    directory: str
    """Its directory in the v2 tree."""

    def change_limits(self, limits: CgroupLimits) -> None:
        """Put other amounts of memory, processor and processes in force; the rest stays.

        What is in use already must fit.
        """

    def watch_oom(self, *, end_all: bool = True) -> None:
        """Have the driver's ``read_ooms`` name this sandbox from now on.

        ``end_all`` is what it was created with as ``end_all_on_oom``.
        """

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

    def open_exec(self, exec_id: str) -> int:
        """Return another descriptor of a command's directory, as ``create_exec`` does.

        Raises:
            DsecError: ``not_found`` when the directory or the sandbox is gone.
        """

    def exec_ids(self) -> list[str]:
        """Return the commands' directories that exist, sorted: what an earlier daemon left."""

    def kill_exec(self, exec_id: str) -> None:
        """End every process that the command started, daemons too, frozen or not."""

    def exec_processes(self, exec_id: str) -> list[int]:
        """Return the command's process ids as the host numbers them."""

    def exec_populated(self, exec_id: str) -> bool:
        """Return whether a process of the command is alive (a zombie is not)."""

    def stop_exec(self, exec_id: str) -> None:
        """Have the command's processes stand still even while the sandbox's do not.

        Where the sandbox stands still they never run in between. Nothing when it is gone.
        """

    def let_exec_go(self, exec_id: str) -> None:
        """Undo ``stop_exec``. Nothing when it is gone."""

    def exec_stopped(self, exec_id: str) -> bool:
        """Return whether ``stop_exec`` was called for the command, by whichever daemon."""

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

    def reclaim(self) -> None:
        """Give back what memory can be had without ending a process. Slow: call it in a thread."""

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

    def limit_texts(self, limits: CgroupLimits) -> list[LimitText]:
        """Return what to write, in order, to have every limit of a sandbox in force.

        A kernel without one of the files cannot enforce that limit: none may be left out.
        """

    def parent_fds(self) -> tuple[int, ...]:
        """Return descriptors of the node's directory in every hierarchy; they stay the driver's."""

    def adopt(self, local: str) -> Cgroup:
        """Return the handle of one sandbox's cgroups, whether they are there already or not.

        Raises:
            DsecError: ``invalid`` for an id that cannot be a name.
        """

    def parents(self) -> list[str]:
        """Return the node's directory in every hierarchy, the v2 one first."""

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
