"""A sandbox that attacks, a neighbour that must not notice, and programs to attack with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
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
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
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


#: What the neighbour does all the time: it forks, and writes to its disk.
BEAT = "while :; do n=$((n+1)); echo $n > /work/next; mv /work/next /work/beat; sleep 0.1; done"
#: What it does at the end: it fills some of its disk and memory, forks, and talks over its network.
WORK = """
import os, socket
block = os.urandom(1 << 20)
with open('/work/more', 'wb') as file:
    for _ in range(8): file.write(block)
assert open('/work/more', 'rb').read() == block * 8
os.unlink('/work/more')
for _ in range(10):
    pid = os.fork()
    if pid == 0: os._exit(7)
    assert os.waitpid(pid, 0)[1] == 7 << 8
with socket.create_server(('127.0.0.1', 0)) as server:
    here = socket.create_connection(server.getsockname()); there, _ = server.accept()
    here.sendall(block[:100000]); here.close()
    assert b''.join(iter(lambda: there.recv(65536), b'')) == block[:100000]
print(open('/work/kept.txt').read())
"""


class AttackWorld(World):
    """Sandbox ``a`` belongs to the attacker; ``neighbour`` to somebody else."""

    def __init__(self, kernel: LinuxKernel, layers: Layers, directory: Path) -> None:
        super().__init__(kernel, layers, directory)
        self.host_name = os.uname().nodename

    @property
    def attack_programs(self) -> Path:
        """Where the attackers' programs are on this host."""
        return self.layers.base.parent / "attackers/attack"

    def spec(self, local: str = "a", **changes: object) -> SandboxSpec:
        changes.setdefault("layers", ("base", "workspace", "toolkit", "attackers"))
        return super().spec(local, **changes)

    async def begin(self) -> None:
        """Create both sandboxes; the neighbour works from now on."""
        await self.create("neighbour", memory_bytes=64 * MIB)
        await self.create("a")
        await self.write("neighbour", "/work/kept.txt", b"kept")
        await self.write("neighbour", "/work/beat", b"0")
        beat = CommandSpec(argv=("/bin/sh", "-c", BEAT))
        self._beating = asyncio.create_task(self.kernel.exec("neighbour", beat))

    async def end(self) -> None:
        """Have the neighbour stop, and nothing else of it be there."""
        self._beating.cancel()
        await asyncio.wait([self._beating])
        async with asyncio.timeout(20):  # an answered file operation may still be on its way out
            while self.pids("neighbour") != [self.init_pid("neighbour")]:
                await asyncio.sleep(0.01)

    async def _check_beat(self) -> None:
        """Assert that the neighbour's command goes on."""
        before = await self.read("neighbour", "/work/beat")
        async with asyncio.timeout(20):
            while await self.read("neighbour", "/work/beat") == before:
                assert not self._beating.done(), self._beating.result()
                await asyncio.sleep(0.02)

    def command(self, *argv: str, timeout_s: float = 60.0, user: str = "0") -> CommandSpec:
        """Return a command that ends by itself or at its time."""
        return CommandSpec(argv=argv, timeout_s=timeout_s, user=user)

    async def exec_until_output(
        self, command: CommandSpec, *, local: str = "a"
    ) -> asyncio.Task[CommandResult]:
        """Start a command; return it as soon as it has printed something."""
        printed = asyncio.Event()

        def on_output(_stream: Stream, _data: bytes) -> None:
            printed.set()

        running = asyncio.create_task(self.kernel.exec(local, command, on_output))
        async with asyncio.timeout(10):
            await printed.wait()
        return running

    @contextlib.asynccontextmanager
    async def holding(
        self, code: str, *, local: str = "a", timeout_s: float = 60.0
    ) -> AsyncIterator[str]:
        """Run Python that takes something, prints a line and waits; yield the line meanwhile.

        The line is empty when the kernel ended it before, for want of memory.
        """
        printed, told = bytearray(), asyncio.Event()

        def on_output(stream: Stream, data: bytes) -> None:
            if stream is Stream.STDOUT:
                printed.extend(data)
                if b"\n" in printed:
                    told.set()

        running = asyncio.create_task(
            self.kernel.exec(
                local, self.command("python3", "-c", code, timeout_s=timeout_s), on_output
            )
        )
        waiting = asyncio.create_task(told.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                result = running.result()
                assert result.oom or result.signal == 9, result
            yield printed.decode().split("\n")[0]
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.wait([running, waiting])

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
        await self._check_beat()
        assert await self.python(WORK, local="neighbour") == "kept"
        assert await self.read("neighbour", "/work/kept.txt") == b"kept"
        await self.end()
        await self.create("later")
        later = await self.kernel.exec("later", CommandSpec(argv=("/bin/echo", "works")))
        assert later.stdout == b"works\n", later
        await self.kernel.destroy("later")
        assert os.uname().nodename == self.host_name
