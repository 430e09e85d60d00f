"""Processors, NUMA nodes, disk and kernel of this machine, read from the kernel."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec_common.wire.node import Machine, NumaNode

_FILE_SYSTEMS: Final = ("erofs", "overlay", "fuse", "btrfs", "xfs")
_FEATURES: Final = {
    "btf": "sys/kernel/btf/vmlinux",
    "kvm": "dev/kvm",
    "psi": "proc/pressure/memory",
    "swap": "proc/swaps",
}


def read_machine(state_path: Path, root: Path = Path("/")) -> Machine:
    """Return what this machine is made of.

    Args:
        state_path: what is on the disk that is told of; it need not be there yet.
        root: another root of ``/proc``, ``/sys`` and ``/dev``, for tests.
    """
    processors = _processors(root)
    return Machine(
        processor_model=next((it["model name"] for it in processors if "model name" in it), ""),
        sockets=len({it.get("physical id", "0") for it in processors}),
        cores=len(
            {(it.get("physical id", "0"), it.get("core id", it["processor"])) for it in processors}
        ),
        threads=len(processors),
        numa=tuple(_numa_nodes(root)),
        disk_bytes=disk_bytes(state_path)[0],
        kernel=platform.release(),
        features=tuple(_features(root)),
    )


def disk_bytes(path: Path) -> tuple[int, int]:
    """Return the size of the file system that a path is on, or will be, and what is free of it."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _processors(root: Path) -> list[dict[str, str]]:
    """Return the paragraphs of ``/proc/cpuinfo`` that are of a processor."""
    found = []
    for paragraph in _read(root / "proc/cpuinfo").split("\n\n"):
        fields = (line.partition(":") for line in paragraph.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in fields}
        if "processor" in facts:
            found.append(facts)
    return found


def _numa_nodes(root: Path) -> Iterable[NumaNode]:
    directories = (root / "sys/devices/system/node").glob("node[0-9]*")
    for directory in sorted(directories, key=lambda it: int(it.name.removeprefix("node"))):
        total = [line for line in _read(directory / "meminfo").splitlines() if "MemTotal" in line]
        yield NumaNode(
            number=int(directory.name.removeprefix("node")),
            processors=_ranges(_read(directory / "cpulist")),
            memory_bytes=int(total[0].split()[-2]) * 1024 if total else 0,
        )


def _ranges(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _features(root: Path) -> Iterable[str]:
    known = _read(root / "proc/filesystems").split()
    modules = _read(root / "sys/kernel/security/lsm").split(",")
    present = {name for name, path in _FEATURES.items() if (root / path).exists()}
    present |= {name for name in _FILE_SYSTEMS if name in known}
    if "cgroup2" in _read(root / "proc/self/mounts").split():
        present.add("cgroup2")
    if "landlock" in modules:
        present.add("landlock")
    if len(_read(root / "proc/swaps").splitlines()) <= 1:
        present.discard("swap")
    return sorted(present)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
