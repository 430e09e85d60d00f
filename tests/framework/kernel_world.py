"""Layers and shorthand for tests that run real sandboxes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec.rootfs import build_host_rootfs
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, SandboxSpec
from dsec_sandboxd.kernel.linux import LinuxKernel

MIB = 1 << 20
NODE = f"kernel-{os.getpid()}"
PROGRAMS = ["setsid", "yes", "mknod", "mount", "sync", "stat", "readlink", "nohup", "seq", "dd"]
UNIFIED = Path("/sys/fs/cgroup/unified")


@dataclass(frozen=True)
class Layers:
    """Image files by what they are for."""

    base: Path
    workspace: Path
    toolkit: Path

    def items(self) -> list[tuple[str, Path]]:
        return [("base", self.base), ("workspace", self.workspace), ("toolkit", self.toolkit)]


def make_image(tree: Path, image: Path) -> Path:
    """Pack a tree into an EROFS image."""
    subprocess.run(["mkfs.erofs", image, tree], check=True, capture_output=True)
    return image


def build_layers(directory: Path) -> Layers:
    """Make a base with the host's shell and Python, a workspace and a toolkit."""
    base = directory / "base"
    build_host_rootfs(base, programs=PROGRAMS)
    (base / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1000::/home/dev:/bin/sh\n"
    )
    (base / "etc/group").write_text("root:x:0:\ndev:x:1000:\nvideo:x:44:games,dev\n")
    (base / "home/dev").mkdir(parents=True)
    os.chown(base / "home/dev", 1000, 1000)
    secret = base / "root/secret"
    secret.write_text("for root")
    secret.chmod(0o600)
    workspace = directory / "workspace"
    (workspace / "work").mkdir(parents=True)
    (workspace / "work/code.txt").write_text("from the workspace")
    (workspace / "work/both.txt").write_text("lower")
    toolkit = directory / "toolkit"
    (toolkit / "work").mkdir(parents=True)
    (toolkit / "work/both.txt").write_text("upper")
    # A hostile layer: links where the mount points go.
    (toolkit / "run").symlink_to("/etc")
    (toolkit / "proc").symlink_to("/etc")
    return Layers(
        make_image(base, directory / "base.erofs"),
        make_image(workspace, directory / "workspace.erofs"),
        make_image(toolkit, directory / "toolkit.erofs"),
    )


class World:
    """A started kernel that holds the layers."""

    def __init__(self, kernel: LinuxKernel, layers: Layers, directory: Path) -> None:
        self.kernel = kernel
        self.layers = layers
        self.directory = directory

    def spec(self, local: str = "a", **changes: Any) -> SandboxSpec:
        """Return a small sandbox's specification."""
        values: dict[str, Any] = {
            "local": local,
            "layers": ("base", "workspace", "toolkit"),
            "memory_bytes": 128 * MIB,
            "cpus": 1.0,
            "pids": 64,
            "disk_bytes": 32 * MIB,
            "inodes": 4096,
        }
        return SandboxSpec(**values | changes)

    async def create(self, local: str = "a", **changes: Any) -> None:
        await self.kernel.create(self.spec(local, **changes))

    async def run(self, *argv: str, local: str = "a", **changes: Any) -> CommandResult:
        """Run a program."""
        changes.setdefault("timeout_s", 30.0)
        return await self.kernel.exec(local, CommandSpec(argv=argv, **changes))

    async def shell(self, text: str, *, local: str = "a", **changes: Any) -> CommandResult:
        """Run a shell line."""
        return await self.run("/bin/sh", "-c", text, local=local, **changes)

    async def say(self, text: str, **changes: Any) -> str:
        """Run a shell line that must succeed; return its output."""
        result = await self.shell(text, **changes)
        assert result.exit_code == 0, result
        return result.stdout.decode().strip()

    async def python(
        self, code: str, *, env: Mapping[str, str] | None = None, **changes: Any
    ) -> str:
        """Run Python inside; it must succeed; return its output."""
        result = await self.run("python3", "-c", code, env=dict(env or {}), **changes)
        assert result.exit_code == 0, result.stderr.decode(errors="replace")
        return result.stdout.decode().strip()

    def cgroup(self, local: str = "a") -> Path:
        return UNIFIED / f"dsec-{NODE}" / local

    def init_pid(self, local: str = "a") -> int:
        """Return the host's number of a sandbox's PID 1."""
        return int((self.cgroup(local) / "cgroup.procs").read_text().split()[0])

    def pids(self, local: str = "a") -> list[int]:
        """Return the host's numbers of a sandbox's processes."""
        found: list[int] = []
        for listing in self.cgroup(local).rglob("cgroup.procs"):
            found += [int(line) for line in listing.read_text().split()]
        return found


def descriptors_of(pid: int | str = "self") -> list[str]:
    """Return the numbers of a process's descriptors, sorted."""
    return sorted(path.name for path in Path(f"/proc/{pid}/fd").iterdir())


def read(path: str) -> str:
    """Return a file's text. Files of the kernel answer at once, so this is no blocking call."""
    return Path(path).read_text()


def read_bytes(path: Path) -> bytes:
    """Return a small file's content, without waiting for anything."""
    return path.read_bytes()


def exists(path: str) -> bool:
    """Return whether this host has a file."""
    return Path(path).exists()


def cgroups_left(node: str = NODE) -> list[str]:
    """Return this node's cgroup directories of sandboxes, in every tree."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/dsec-{node}/*/")]


def wait_until_dead(pid: int, timeout_s: float = 20.0) -> None:
    """Return once a process that is not our child is gone."""
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.002)
