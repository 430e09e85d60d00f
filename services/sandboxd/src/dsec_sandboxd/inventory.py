"""What this process may use of the machine, read from the kernel: processors and memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from dsec_common.wire.node import Resources

_MEMORY_FRESH_S: Final = 0.1
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES: Final = 1 << 60


class Inventory:
    """The machine as this process may use it: never more than its own cgroups allow."""

    def __init__(self, process: Path = Path("/proc"), cgroups: Path = _CGROUP_ROOT) -> None:
        self._meminfo = process / "meminfo"
        self._own_cgroups = process / "self" / "cgroup"
        self._cgroups = cgroups
        self._available_bytes = 0
        self._available_at = -_MEMORY_FRESH_S
        self._memory_limit_bytes = self._own_limit("memory.max", "memory.limit_in_bytes", "memory")

    def physical(self, sandboxes_max: int) -> Resources:
        """Return what there is to hand out without any oversubscription."""
        return Resources(
            cpus=self.cpus(), memory_bytes=self.memory_bytes(), sandboxes=sandboxes_max
        )

    def cpus(self) -> float:
        """Return the processors this process may use, a cgroup's quota included."""
        count = float(len(os.sched_getaffinity(0)))
        for directory in self._own_directories("cpu"):
            quota = _cpu_quota(directory)
            if quota is not None:
                count = min(count, quota)
        return count

    def memory_bytes(self) -> int:
        """Return the memory this process and its sandboxes may use in all."""
        return min(self._read_meminfo()["MemTotal"], self._memory_limit_bytes)

    def memory_bytes_available(self) -> int:
        """Return what the kernel could hand out now, at most 0.1 s old while it can be read."""
        now = time.monotonic()
        if now - self._available_at >= _MEMORY_FRESH_S:
            # Without a free descriptor for a moment, what was read last has to do.
            with contextlib.suppress(OSError):
                self._available_bytes = self._read_meminfo()["MemAvailable"]
            self._available_at = now
        return self._available_bytes

    def _read_meminfo(self) -> dict[str, int]:
        amounts = {}
        for line in self._meminfo.read_text(encoding="ascii").splitlines()[:3]:
            name, _, rest = line.partition(":")
            amounts[name] = int(rest.split()[0]) * 1024
        return amounts

    def _own_limit(self, v2_name: str, v1_name: str, controller: str) -> int:
        limit = _UNLIMITED_BYTES
        for directory in self._own_directories(controller):
            for name in (v2_name, v1_name):
                text = _read(directory / name)
                if text and text != "max":
                    limit = min(limit, int(text))
        return limit

    def _own_directories(self, controller: str) -> list[Path]:
        """Return the cgroups that this process is in, its own and those above it."""
        found: list[Path] = []
        for line in _read(self._own_cgroups).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = self._cgroups / controllers if controllers else self._cgroups
            directory = root / path.strip("/")
            while directory != root and root in directory.parents:
                found.append(directory)
                directory = directory.parent
            found.append(root)
        return found


def _cpu_quota(directory: Path) -> float | None:
    """Return how many processors a cgroup's quota amounts to, or None without one."""
    v2 = _read(directory / "cpu.max").split()
    if v2 and v2[0] != "max":
        return int(v2[0]) / int(v2[1])
    quota = _read(directory / "cpu.cfs_quota_us")
    if quota and int(quota) > 0:
        return int(quota) / int(_read(directory / "cpu.cfs_period_us") or 100_000)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
