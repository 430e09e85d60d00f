"""What this host is and lacks."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import KernelFacts
from dsec_sandboxd.kernel.protocol import SLOTS_MAX
from dsec_sandboxd.kernel.seccomp import ARCHITECTURES

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.cgroups import Layout

#: File-backed EROFS mounts (6.12) and overlays made of descriptors (6.13).
_KERNEL_MINIMUM: Final = (6, 13)
_FILE_SYSTEMS: Final = ("erofs", "overlay", "tmpfs", "devpts")
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION_MINIMUM: Final = 2
_PR_SCHED_CORE: Final = 62
_PR_SCHED_CORE_GET: Final = 0
#: Control socket, pidfd, two command cgroups, memory notice; and what the daemon itself needs.
_DESCRIPTORS_PER_SANDBOX: Final = 6
_DESCRIPTORS_RESERVED: Final = 512


def require_host() -> None:
    """Refuse a host on which no sandbox can run at all, naming what to do.

    Raises:
        DsecError: ``unsupported``.
    """
    problems = []
    if os.geteuid() != 0:
        problems.append("it needs root: run it with sudo")
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if version < _KERNEL_MINIMUM:
        problems.append(f"Linux {release} is too old: 6.13 or later is needed")
    if platform.machine() not in ARCHITECTURES:
        problems.append(f"there is no system call table for {platform.machine()}")
    known = Path("/proc/filesystems").read_text().split()
    problems += [f"the kernel lacks {name}: load it" for name in _FILE_SYSTEMS if name not in known]
    if problems:
        raise DsecError(
            ErrorCode.UNSUPPORTED, "sandboxes cannot run on this host: " + "; ".join(problems)
        )


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def read_facts(layout: Layout) -> KernelFacts:
    """Return the facts of a host that passed ``require_host``."""
    missing = list(layout.missing)
    if _landlock_version() < _LANDLOCK_VERSION_MINIMUM:
        missing.append("landlock")
    if not _has_core_scheduling():
        missing.append("core_scheduling")
    descriptors = raise_descriptor_limit()
    return KernelFacts(
        kernel_release=platform.release(),
        cgroup_layout=layout.mode,
        missing=tuple(missing),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpus=len(os.sched_getaffinity(0)),
        sandboxes_max=min(
            SLOTS_MAX, (descriptors - _DESCRIPTORS_RESERVED) // _DESCRIPTORS_PER_SANDBOX
        ),
    )


def _has_core_scheduling() -> bool:
    """Return whether the kernel gives cookies and the processors have hardware threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    cookie = ctypes.c_ulong()
    asked = (_PR_SCHED_CORE, _PR_SCHED_CORE_GET, 0, 0, ctypes.byref(cookie))
    return int(libc.prctl(*asked)) == 0


def _landlock_version() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    version: int = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    return max(0, version)
