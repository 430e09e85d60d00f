"""What the host's cgroup trees can enforce, and the limits of one sandbox."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from dsec_common.errors import DsecError, ErrorCode, invalid

DEFAULT_ROOT: Final = Path("/sys/fs/cgroup")
CONTROLLERS: Final = ("memory", "cpu", "pids")
"""The controllers that a sandbox's limits need."""

MINIMUM_MEMORY_BYTES: Final = 4 << 20
"""Below this, namespaces, PID 1 and one small command do not fit."""
MINIMUM_CPUS: Final = 0.01
MAXIMUM_CPUS: Final = 1024.0
MINIMUM_PIDS: Final = 2
"""PID 1 and one command."""
MAXIMUM_PIDS: Final = 4_194_304
"""The kernel's own limit (PID_MAX_LIMIT)."""
MAXIMUM_MEMORY_BYTES: Final = 1 << 60

CPU_PERIOD_US: Final = 100_000

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# A v1 controller is there when its mount shows this file (the root has no pids.max).
_V1_PROOF: Final = {"memory": "memory.limit_in_bytes", "cpu": "cpu.shares", "pids": "tasks"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the host keeps its cgroup trees, and what they cannot enforce.

    Attributes:
        mode: ``v2`` (one tree with all controllers), ``hybrid`` (limits in v1 hierarchies, process
            control in a v2 tree without them), or ``none`` (no v2 tree: sandboxes cannot run).
        unified: the v2 tree's mount point; the root where there is none.
        v1: controller name to the mount point of its v1 hierarchy; empty in ``v2`` mode.
        missing: what a sandbox needs and this host cannot enforce: ``unified``, ``memory``,
            ``cpu``, ``pids``, ``swap``. Empty on a host that can run sandboxes.
    """

    mode: Literal["v2", "hybrid", "none"]
    unified: Path
    v1: dict[str, Path] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits of one sandbox, checked when made.

    Attributes:
        memory_bytes: memory and kernel memory charged to the sandbox; it never swaps.
        cpus: the sandbox's share when processors are short, as a number of processors.
        pids: processes and threads, PID 1 included.
        cpu_quota: also cap the sandbox at ``cpus`` when processors are idle. Setting a quota makes
            the kernel walk its cgroups, so it is only done when asked for.
        end_all_on_oom: running out of memory ends every process of the sandbox, so that none is
            left half dead.
        best_effort: run only when no other cgroup beside it wants the processor (``cpu.idle``);
            ``cpus`` is then no share.

    Raises:
        DsecError: ``invalid`` when a limit is not a number that the kernel could enforce.
    """

    memory_bytes: int
    cpus: float
    pids: int
    cpu_quota: bool = False
    end_all_on_oom: bool = True
    best_effort: bool = False

    def __post_init__(self) -> None:
        _check_between(
            "memory_bytes", self.memory_bytes, MINIMUM_MEMORY_BYTES, MAXIMUM_MEMORY_BYTES
        )
        _check_between("cpus", self.cpus, MINIMUM_CPUS, MAXIMUM_CPUS)
        _check_between("pids", self.pids, MINIMUM_PIDS, MAXIMUM_PIDS)

    @property
    def cpu_quota_us(self) -> int:
        """Return microseconds of processor time in each period of ``CPU_PERIOD_US``."""
        return max(1_000, round(self.cpus * CPU_PERIOD_US))  # the kernel refuses less than 1 ms

    @property
    def cpu_shares(self) -> int:
        """Return the v1 shares: the kernel's default, 1024, for one processor."""
        return max(2, min(262_144, round(self.cpus * 1024)))

    @property
    def cpu_weight(self) -> int:
        """Return the v2 weight: the kernel's default, 100, for one processor."""
        return max(1, min(10_000, round(self.cpus * 100)))


class LimitText(NamedTuple):
    """What is written to one file of a sandbox's cgroups to have a limit in force.

    Attributes:
        tree: in which of the driver's trees, the v2 one first.
        file: the file's name.
        text: its new content.
    """

    tree: int
    file: str
    text: bytes


def detect_layout(root: Path = DEFAULT_ROOT) -> Layout:
    """Return how the cgroup trees below ``root`` are laid out. Reads only; changes nothing."""
    if (root / "cgroup.controllers").exists():
        available = (root / "cgroup.controllers").read_text().split()
        missing = tuple(name for name in CONTROLLERS if name not in available)
        return Layout("v2", root, missing=missing)
    v1 = {name: root / name for name in CONTROLLERS if (root / name / _V1_PROOF[name]).exists()}
    absent = [name for name in CONTROLLERS if name not in v1]
    if "memory" in v1 and not (v1["memory"] / "memory.memsw.limit_in_bytes").exists():
        absent.append("swap")
    if not (root / "unified" / "cgroup.controllers").exists():
        return Layout("none", root, v1, ("unified", *absent))
    return Layout("hybrid", root / "unified", v1, tuple(absent))


def check_name(kind: str, name: str) -> str:
    """Return ``name`` when it is safe as a directory below a cgroup.

    Raises:
        DsecError: ``invalid`` for anything but 1 to 64 letters, digits, ``-`` and ``_`` that start
            with a letter or a digit.
    """
    if _NAME.fullmatch(name) is None:
        raise invalid(
            f"the {kind} {name[:80]!r} cannot name a cgroup: "
            "use 1 to 64 letters, digits, '-' and '_', a letter or a digit first"
        )
    return name


def require_enforceable(layout: Layout) -> None:
    """Refuse a host on which a limit would silently not hold.

    Raises:
        DsecError: ``unsupported``, naming everything that is missing.
    """
    if layout.missing:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"the cgroup trees at {layout.unified} cannot enforce {', '.join(layout.missing)}: "
            "mount or enable these controllers on the host (swap: boot with swapaccount=1)",
            details={"missing": ",".join(layout.missing)},
        )


def _check_between(name: str, value: float, minimum: float, maximum: float) -> None:
    if not math.isfinite(value) or not minimum <= value <= maximum:
        raise invalid(
            f"{name} is {value!r}: a sandbox needs from {minimum} to {maximum}", limit=name
        )


def node_pids_max() -> int:
    """Return how many processes and threads all sandboxes of this node may have together.

    Three quarters of what the host can number, or can have threads of: sandboxes that all fork to
    their limits must leave some to the services beside them.
    """
    kernel = Path("/proc/sys/kernel")
    most = (int((kernel / name).read_text()) for name in ("pid_max", "threads-max"))
    return min(most) * 3 // 4
