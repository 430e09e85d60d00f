"""A sandbox that attacks, a neighbour that must not notice, and programs to attack with."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, OpenMode, SandboxSpec, Stream
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import MIB, Layers, World, make_image

ATTACKERS = Path(__file__).parent.parent / "security" / "attackers"
#: A preamble for attacks in Python that call the kernel directly.
CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return 'done' if result >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(what, action):
    try: print(what, 'done', action())
    except OSError as error: print(what, errno.errorcode[error.errno])
"""


def build_attackers(directory: Path) -> Path:
    """Compile every attacker into a layer's ``/attack``; return the image."""
    tree = directory / "attackers"
    programs = tree / "attack"
    programs.mkdir(parents=True)
    for source in ATTACKERS.glob("*.c"):
        output = programs / source.stem
        subprocess.run(
            ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o", output, source],
            check=True,
        )
    return make_image(tree, directory / "attackers.erofs")


class AttackWorld(World):
    """Sandbox ``a`` belongs to the attacker; ``neighbour`` to somebody else."""

    def __init__(self, kernel: LinuxKernel, layers: Layers, directory: Path) -> None:
        super().__init__(kernel, layers, directory)
        self.host_name = os.uname().nodename

    def spec(self, local: str = "a", **changes: object) -> SandboxSpec:
        changes.setdefault("layers", ("base", "workspace", "toolkit", "attackers"))
        return super().spec(local, **changes)

    async def begin(self) -> None:
        """Create both sandboxes."""
        await self.create("neighbour", memory_bytes=64 * MIB)
        await self.create("a")
        await self.write("neighbour", "/work/kept.txt", b"kept")

    async def exec_until_output(self, command: CommandSpec) -> asyncio.Task[CommandResult]:
        """Start a command in ``a``; return it as soon as it has printed something."""
        printed = asyncio.Event()

        def on_output(_stream: Stream, _data: bytes) -> None:
            printed.set()

        running = asyncio.create_task(self.kernel.exec("a", command, on_output))
        async with asyncio.timeout(10):
            await printed.wait()
        return running

    async def write(self, local: str, path: str, content: bytes) -> None:
        """Write a file as the platform does."""
        descriptor = await self.kernel.open_file(local, path, OpenMode.WRITE)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)

    async def read(self, local: str, path: str, *, user: str = "0") -> bytes:
        """Read the beginning of a file as the platform does."""
        descriptor = await self.kernel.open_file(local, path, OpenMode.READ, user=user)
        try:
            return os.read(descriptor, MIB)
        finally:
            os.close(descriptor)

    async def check_unharmed(self) -> None:
        """Assert that neighbour, node and host are as before."""
        said = await self.run("/bin/sh", "-c", "cat /work/kept.txt", local="neighbour")
        assert (said.exit_code, said.stdout) == (0, b"kept"), said
        assert await self.read("neighbour", "/work/kept.txt") == b"kept"
        async with asyncio.timeout(5):  # an answered file operation may still be on its way out
            while self.pids("neighbour") != [self.init_pid("neighbour")]:
                await asyncio.sleep(0.01)
        await self.create("later")
        later = await self.kernel.exec("later", CommandSpec(argv=("/bin/echo", "works")))
        assert later.stdout == b"works\n", later
        await self.kernel.destroy("later")
        assert os.uname().nodename == self.host_name
