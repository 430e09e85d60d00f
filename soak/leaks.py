"""What a platform still holds on the machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def cgroups(nodes: Sequence[str]) -> set[str]:
    """Return the cgroups of these nodes, in every hierarchy."""
    tops = [
        top
        for node in nodes
        for pattern in ("", "*/")
        for top in _CGROUPS.glob(f"{pattern}dsec-{node}")
    ]
    return {folder for top in tops for folder, _, _ in os.walk(top)}


def living(node: str) -> set[str]:
    """Return the names of a node's sandboxes that have cgroups."""
    top = f"dsec-{node}"
    return {Path(one).name for one in cgroups([node]) if Path(one).parent.name == top}


def processes_in(nodes: Sequence[str]) -> set[str]:
    """Return the processes in these nodes' cgroups."""
    found = set()
    for folder in cgroups(nodes):
        try:
            pids = Path(folder, "cgroup.procs").read_text().split()
        except OSError:
            continue
        found |= {f"{pid} {_comm(pid)} in {folder}" for pid in pids}
    return found


def processes_naming(*words: str) -> set[str]:
    """Return other processes whose command line names one of these."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(word in line for word in words):
            found.add(f"{entry.name} {line[:120]}")
    return found


def mounts(*words: str, pid: int | str = "self") -> set[str]:
    """Return the mounts that a process sees; with words, those that name one of them."""
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    except OSError:
        return set()
    return {line for line in lines if not words or any(word in line for word in words)}


def sockets(*words: str) -> set[str]:
    """Return the unix sockets whose name holds one of these."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if any(word in line for word in words)}


def files_below(directory: Path) -> set[str]:
    """Return every path below a directory."""
    return {
        str(Path(folder, name).relative_to(directory))
        for folder, directories, names in os.walk(directory)
        for name in (*directories, *names)
    }


def descriptors(pid: int) -> Counter[str]:
    """Return what a process has open, by kind."""
    found: Counter[str] = Counter()
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return found
    for entry in entries:
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        kind, colon, _ = target.partition(":")
        found[kind if colon and not kind.startswith("/") else "file"] += 1
    return found


def _comm(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
