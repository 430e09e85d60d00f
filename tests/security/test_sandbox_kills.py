"""Daemons and sandboxes killed at any moment: nothing of them stays, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attack_world import AttackWorld
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandSpec, SandboxSpec
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import MIB, NODE, Layers, cgroups_left, wait_until_dead

BUSY_DAEMON = """
import asyncio, sys
from pathlib import Path
from dsec_sandboxd.kernel.interface import CommandSpec, OpenMode, SandboxSpec
from dsec_sandboxd.kernel.linux import LinuxKernel

async def use(kernel, local):
    while True:
        await kernel.create(SandboxSpec(local=local, layers=("base",), memory_bytes=64 << 20,
            cpus=1, pids=32, disk_bytes=8 << 20, inodes=100))
        work = "sleep 1000 >/dev/null 2>&1 & sleep 0.01"
        await kernel.exec(local, CommandSpec(argv=("/bin/sh", "-c", work)))
        await kernel.stat(local, "/tmp")
        await kernel.destroy(local)

async def main():
    kernel = LinuxKernel(sys.argv[1])
    await kernel.start()
    await kernel.recover()
    await kernel.hold_layer("base", Path(sys.argv[2]))
    print(kernel._spawner.pid, flush=True)
    await asyncio.gather(*(use(kernel, f"s{number}") for number in range(4)))

asyncio.run(main())
"""


async def _kill_a_busy_daemon(layers: Layers, after_s: float) -> int:
    """Run a daemon that creates, uses and deletes all the time; return its spawner's pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BUSY_DAEMON, NODE, str(layers.base), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    first_line = await process.stdout.readline()
    if not first_line:
        await process.communicate()
        pytest.fail("the daemon did not start: its standard error says why")
    spawner = int(first_line)
    # The moment is the point of the test: whatever the daemon does then is cut short.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), after_s)
    assert process.returncode is None, "the daemon failed before it was killed"
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    return spawner


@contextlib.asynccontextmanager
async def _kernel_after_the_crash(layers: Layers) -> AsyncIterator[LinuxKernel]:
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        await kernel.hold_layer("base", layers.base)
        yield kernel
    finally:
        await kernel.close()


def _pids_left() -> list[int]:
    return [
        int(pid)
        for path in Path("/sys/fs/cgroup").glob(f"**/dsec-{NODE}/**/cgroup.procs")
        for pid in path.read_text().split()
    ]


def _directories_of_the_node() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/dsec-{NODE}"))


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_killed_daemon_was_doing_nothing_of_it_stays(
    images: tuple[Layers, Path], seed: int
) -> None:
    layers, _ = images
    spawner = await _kill_a_busy_daemon(layers, random.Random(seed).uniform(0.0, 0.4))  # noqa: S311  a moment, no secret
    wait_until_dead(spawner)
    pids = _pids_left()
    async with _kernel_after_the_crash(layers) as kernel:
        await kernel.recover()
        for pid in pids:
            wait_until_dead(pid)
        assert cgroups_left() == []
        assert await kernel.recover() == []
        spec = SandboxSpec(
            local="s0",
            layers=("base",),
            memory_bytes=64 * MIB,
            cpus=1,
            pids=32,
            disk_bytes=8 * MIB,
            inodes=100,
        )
        await kernel.create(spec)
        said = await kernel.exec("s0", CommandSpec(argv=("/bin/echo", "works")))
        assert said.stdout == b"works\n"
    assert _directories_of_the_node() == []


async def test_a_sandbox_killed_at_any_moment_of_its_birth_holds_up_no_other(
    arena: AttackWorld,
) -> None:
    kill_file = arena.cgroup("born") / "cgroup.kill"
    stop = threading.Event()

    def kill_all_the_time() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # not yet, or no longer there
                kill_file.write_text("1")

    killer = threading.Thread(target=kill_all_the_time)
    killer.start()
    try:
        async with asyncio.timeout(60):
            for _ in range(60):
                try:
                    await arena.create("born")
                except DsecError as error:
                    assert error.code in {ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE}  # noqa: PT017  some may live
                await arena.kernel.destroy("born")
    finally:
        stop.set()
        killer.join()
