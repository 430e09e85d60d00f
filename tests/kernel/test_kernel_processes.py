"""Started commands: their streams, terminals, signals, and a second daemon that takes them over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.init import InitClient
from dsec_sandboxd.kernel.interface import CommandSpec, Stream
from dsec_sandboxd.kernel.process import Process, SignalScope
from dsec_sandboxd.kernel.sandbox_commands import _IDLE_DIRECTORIES_SPARE_MAX
from kernel_world import World, descriptors_of


def launch(world: World, *argv: str, spool_fd: int = -1, **changes: Any) -> Process:
    spec = CommandSpec(argv=argv, **changes)
    return world.kernel.launch("a", spec, spool_fd=spool_fd, before=lambda _: None)


async def started(world: World, *argv: str, **changes: Any) -> Process:
    process = launch(world, *argv, **changes)
    await process.started
    return process


async def until(process: Process, text: bytes, stream: Stream = Stream.STDOUT) -> bytes:
    """Return what was printed up to ``text``."""
    said = b""
    async with asyncio.timeout(10):
        while text not in said:
            try:
                if process.terminal >= 0:
                    process.relay()
            except OSError:
                pass
            try:
                data = os.read(process.outputs[stream], 65536)
            except BlockingIOError:
                await asyncio.sleep(0.005)
                continue
            assert data, said
            said += data
    return said


@asynccontextmanager
async def successor(world: World) -> AsyncIterator[InitClient]:
    """Drop the daemon's client of PID 1 and take the same socket with another one."""
    sandbox = world.kernel._sandboxes["a"]
    channel = os.dup(sandbox.init._channel.fileno())
    sandbox.init.close()
    later = InitClient(channel, lambda: None, adopted=True)
    sandbox.init = later
    yield later


async def test_a_process_has_its_streams_and_its_end(world: World) -> None:
    await world.create()
    process = await started(world, "sh", "-c", "read x; echo got $x; exit 3", with_input=True)
    os.write(process.input, b"it\n")
    assert await until(process, b"\n") == b"got it\n"
    assert (await process.exited).exit_code == 3
    process.finish()


async def test_init_lists_every_command_with_its_streams_to_a_later_client(world: World) -> None:
    await world.create()
    spool = os.memfd_create("spool", os.MFD_CLOEXEC)
    os.write(spool, b"0123456789")
    os.lseek(spool, 4, os.SEEK_SET)
    running = await started(
        world, "sh", "-c", "echo up; cat; echo over", with_input=True, spool_fd=spool
    )
    over = await started(world, "sh", "-c", "echo printed; echo err >&2; exit 6")
    typed = await started(world, "sh", "-c", "echo on a tty; read x; echo $x", terminal=(24, 80))
    never = launch(world, "no-such-program")
    with pytest.raises(DsecError):
        await never.exited
    await over.exited
    await until(running, b"up\n")
    numbers = [one.run_id for one in (running, over, typed, never)]
    async with successor(world):
        for one in (running, over, typed, never):
            one.abandon()
        os.close(spool)
        found = {one.run_id: one for one in await world.kernel.processes("a")}
        assert sorted(found) == sorted(numbers)
        again, ended, tty, failed = (found[number] for number in numbers)
        assert (await ended.exited).exit_code == 6
        assert await until(ended, b"\n") == b"printed\n"
        assert await until(ended, b"\n", Stream.STDERR) == b"err\n"
        with pytest.raises(DsecError) as caught:
            await failed.exited
        assert caught.value.code is ErrorCode.NOT_FOUND
        taken = again.take_spool()
        assert os.lseek(taken, 0, os.SEEK_CUR) == 4
        os.close(taken)
        os.write(again.input, b"more")
        again.close_stdin()
        assert await until(again, b"over\n") == b"moreover\n"
        assert (await again.exited).exit_code == 0
        await until(tty, b"on a tty\r\n")
        os.write(tty.terminal, b"typed\n")
        await until(tty, b"typed\r\ntyped\r\n")
        for one in found.values():
            one.finish()
        assert await world.kernel.processes("a") == []
        assert await world.say("echo alive") == "alive"


async def test_the_input_stays_open_when_its_daemon_is_gone(world: World) -> None:
    await world.create()
    spool = os.memfd_create("spool", os.MFD_CLOEXEC)
    process = await started(world, "sh", "-c", "cat; echo end", with_input=True, spool_fd=spool)
    os.close(spool)
    async with successor(world):
        process.abandon()
        await world.say("sleep 0.1")
        (again,) = await world.kernel.processes("a")
        assert not again.exited.done()
        again.close_stdin()
        assert await until(again, b"end\n") == b"end\n"
        again.finish()


async def test_a_terminal_is_the_sandboxs_own_and_its_users(world: World) -> None:
    await world.create()
    process = await started(
        world, "sh", "-c", "tty; stat -c %u $(tty); stty size; cat", terminal=(33, 101), user="dev"
    )
    said = await until(process, b"33 101\r\n")
    assert b"/dev/pts/" in said
    assert b"1000\r\n" in said
    process.resize(50, 60)
    process.kill()
    assert (await process.exited).signal == 9
    process.finish()
    # Nothing of it can have become this process's own terminal.
    with pytest.raises(OSError, match="No such device"):
        os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)


async def test_terminals_end_and_their_descriptors_with_them(world: World) -> None:
    await world.create()
    await world.say("true")
    await world.kernel.stat("a", "/")
    init = world.init_pid()
    before = descriptors_of(init)
    for _ in range(40):
        process = await started(world, "true", terminal=(24, 80))
        await process.exited
        process.finish()
    await world.kernel.stat("a", "/")
    assert descriptors_of(init) == before


async def test_a_terminal_hangs_up_when_it_is_finished(world: World) -> None:
    await world.create()
    process = await started(
        world,
        "sh",
        "-c",
        "trap 'echo hung > /tmp/up; exit' HUP; echo on; while :; do sleep .05; done",
        terminal=(24, 80),
    )
    await until(process, b"on\r\n")
    process.finish()
    await world.say("until test -e /tmp/up; do sleep .05; done")


async def test_signals_reach_nothing_outside_the_command(world: World) -> None:
    await world.create()
    one = await started(world, "sleep", "1000")
    other = await started(world, "sleep", "1000")
    one.signal(9, SignalScope.TREE)
    assert (await one.exited).signal == 9
    assert not other.exited.done()
    other.signal(15, SignalScope.DESCENDANTS)
    other.signal(0, SignalScope.TREE)
    other.signal(999, SignalScope.TREE)
    assert not other.exited.done()
    assert await world.say("echo alive") == "alive"
    one.signal(9, SignalScope.MAIN)
    other.kill()
    await other.exited
    one.finish()
    other.finish()


async def test_a_user_opens_its_own_standard_streams_again(world: World) -> None:
    await world.create()
    assert await world.say("echo x > /dev/stdout", user="dev") == "x"
    piped = await world.shell("cat /dev/stdin > /dev/stderr", user="dev", stdin=b"in")
    assert piped.stderr == b"in"


async def test_commands_get_the_usual_limit_of_descriptors(world: World) -> None:
    await world.create()
    assert await world.say("ulimit -n") == "1024"


async def test_ten_thousand_short_commands_leave_nothing(world: World) -> None:
    await world.create(pids=512)
    await world.say("true")
    await world.kernel.stat("a", "/")
    init = world.init_pid()
    before, own = descriptors_of(init), descriptors_of()
    for _ in range(100):
        results = await asyncio.gather(*(world.run("true") for _ in range(100)))
        assert all(result.exit_code == 0 for result in results)
    await world.run("true")
    await world.kernel.stat("a", "/")
    assert descriptors_of(init) == before
    assert len(descriptors_of()) <= len(own) + _IDLE_DIRECTORIES_SPARE_MAX
    assert len(world.kernel._sandboxes["a"].init._commands) == 0
    directories = [path for path in world.cgroup().iterdir() if path.is_dir()]
    assert len(directories) <= 110
