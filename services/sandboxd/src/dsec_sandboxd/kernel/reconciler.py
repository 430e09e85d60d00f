"""Removing from the kernel what belongs to no sandbox of this daemon.

Only what carries this node's name is looked at, and each thing is asked about again right before it
is removed: what another node has, or a creation that has just begun, is never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.cgroups_tree import list_directories, read_processes, remove_all
from dsec_sandboxd.kernel.interface import Orphan

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.cgroups import CgroupDriver

_log: Final = structlog.get_logger(__name__)
_END_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.005


async def remove_cgroups(driver: CgroupDriver, owned: Callable[[str], bool]) -> list[Orphan]:
    """Kill and remove every cgroup of this node that is nobody's; return what was found.

    What does not go within ten seconds is logged and left for the next time.

    Args:
        driver: of this node.
        owned: whether a local id has a sandbox, living or being born.
    """
    found: list[Orphan] = []
    orphans = [local for local in driver.leftovers() if not owned(local)]
    killed: set[int] = set()
    for local in orphans:
        killed |= _kill(driver, local)
        found.append(Orphan("cgroup", local))
    for local in orphans:
        try:
            await _remove(driver, local, owned, killed)
        except (DsecError, TimeoutError) as error:
            _log.error("orphan_stays", kind="cgroup", name=local, error=str(error) or "busy")
    return [*(Orphan("process", str(pid)) for pid in sorted(killed)), *found]


def _kill(driver: CgroupDriver, local: str) -> set[int]:
    """End all processes in the directories of one local id; return those that were there."""
    pids = {pid for directory in _trees(driver, local) for pid in read_processes(directory)}
    # The v2 tree first: it ends all at once, frozen or not. What is in a v1 directory alone, one
    # by one.
    with contextlib.suppress(DsecError):
        driver.adopt(local).kill()
    for pid in pids:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if any(pid in read_processes(tree) for tree in _trees(driver, local)):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
    return pids


async def _remove(
    driver: CgroupDriver, local: str, owned: Callable[[str], bool], killed: set[int]
) -> None:
    """Remove the directories of a local id; add what is killed meanwhile to ``killed``."""
    async with asyncio.timeout(_END_TIMEOUT_S):
        while not owned(local) and not _removed(driver, local):
            killed |= _kill(driver, local)
            await asyncio.sleep(_PAUSE_S)


def _removed(driver: CgroupDriver, local: str) -> bool:
    with contextlib.suppress(DsecError):
        driver.adopt(local).remove()  # with its notices, should an adoption have failed half-way
    # Deepest first: a cgroup with another one in it cannot be removed.
    return remove_all(_trees(driver, local)[::-1])


def _trees(driver: CgroupDriver, local: str) -> list[str]:
    """Return the directories of a local id in every hierarchy, each before those in it."""
    waiting = [f"{parent}/{local}" for parent in driver.parents()]
    found = []
    while waiting:
        directory = waiting.pop(0)
        if os.path.isdir(directory):  # noqa: PTH112  a cgroup, which answers from memory
            found.append(directory)
            waiting += [f"{directory}/{name}" for name in list_directories(directory)]
    return found
