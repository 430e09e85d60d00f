"""A paused sandbox stands still in the real kernel, whatever runs in it, and goes on unharmed."""

from __future__ import annotations

import asyncio
import time

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.pausing import PAUSED
from kernel_world import MIB, World


def frozen(world: World, local: str = "a") -> bool:
    return "frozen 1" in (world.cgroup(local) / "cgroup.events").read_text()


async def cpu_s(world: World) -> float:
    return (await world.kernel.usage("a")).cpu_s


async def uses_more_than(world: World, seconds: float) -> None:
    async with asyncio.timeout(20):
        while await cpu_s(world) <= seconds:
            await asyncio.sleep(0.001)


async def test_a_paused_sandbox_uses_no_processor_and_goes_on_where_it_was(world: World) -> None:
    await world.create()
    running = asyncio.create_task(world.shell("while :; do :; done", timeout_s=30))
    await uses_more_than(world, 0.05)
    await world.kernel.pause("a")
    assert frozen(world)
    before = await cpu_s(world)
    await asyncio.sleep(0.1)
    assert await cpu_s(world) - before < 0.005
    await world.kernel.resume("a")
    assert not frozen(world)
    await uses_more_than(world, before + 0.05)
    running.cancel()
    await asyncio.wait({running})


async def test_pausing_and_resuming_are_idempotent(world: World) -> None:
    await world.create()
    for _ in range(2):
        await world.kernel.pause("a")
    for _ in range(2):
        await world.kernel.resume("a")
    assert await world.say("echo alive") == "alive"


async def test_the_time_limit_of_a_command_stands_still_with_it(world: World) -> None:
    await world.create()
    running = asyncio.create_task(world.shell("sleep 0.4; echo done", timeout_s=2.0))
    async with asyncio.timeout(20):
        while len(world.pids()) < 2:
            await asyncio.sleep(0.001)
    await world.kernel.pause("a")
    await asyncio.sleep(2.1)  # longer than the limit, which is what is tried
    assert not running.done()
    await world.kernel.resume("a")
    result = await running
    assert (result.timed_out, result.stdout) == (False, b"done\n")


async def test_a_time_limit_ends_a_command_after_a_pause_too(world: World) -> None:
    await world.create()
    started = time.monotonic()
    running = asyncio.create_task(world.shell("sleep 60", timeout_s=0.3))
    async with asyncio.timeout(20):
        while len(world.pids()) < 2:
            await asyncio.sleep(0.001)
    await world.kernel.pause("a")
    await asyncio.sleep(0.5)
    await world.kernel.resume("a")
    assert (await running).timed_out
    assert time.monotonic() - started < 30


async def test_a_paused_sandbox_is_destroyed_at_once_with_what_runs_in_it(world: World) -> None:
    await world.create()
    running = asyncio.create_task(world.shell("sleep 60"))
    async with asyncio.timeout(20):
        while len(world.pids()) < 2:
            await asyncio.sleep(0.001)
    await world.kernel.pause("a")
    started = time.monotonic()
    await world.kernel.destroy("a")
    assert time.monotonic() - started < 20
    with pytest.raises(DsecError) as caught:
        await running
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_it_stands_still_until_the_last_reason_is_gone(world: World) -> None:
    await world.create()
    freezer = world.kernel._sandboxes["a"].freezer
    await world.kernel.pause("a")
    await freezer.hold("snapshot")
    await world.kernel.resume("a")
    assert frozen(world)
    assert not freezer.holds(PAUSED)
    freezer.release("snapshot")
    assert not frozen(world)


async def test_a_pause_holds_whatever_another_process_does_meanwhile(world: World) -> None:
    await world.create()
    freezer, freeze = world.kernel._sandboxes["a"].freezer, world.cgroup() / "cgroup.freeze"
    async with freezer.borrowed():
        freeze.write_text("1")
        await world.kernel.pause("a")
        freeze.write_text("0")  # the other is done, and does not know of the pause
    assert frozen(world)
    async with freezer.borrowed():
        await world.kernel.resume("a")
        assert frozen(world)  # the other has not finished
    assert not frozen(world)
    async with freezer.borrowed():
        freeze.write_text("1")  # and is killed
    assert not frozen(world)


async def test_memory_that_can_be_had_is_given_back_and_the_content_stays(world: World) -> None:
    await world.create(memory_bytes=256 * MIB, disk_bytes=128 * MIB)
    await world.say("dd if=/dev/zero of=/tmp/big bs=1M count=40 2>/dev/null; echo kept > /tmp/note")
    # What is read of a layer is page cache of the sandbox, for which nothing has to be written.
    read_bytes = int(await world.say("find /usr/lib -type f | xargs cat | wc -c"))
    assert read_bytes > 10 * MIB
    await world.kernel.pause("a")
    held = await world.kernel.usage("a")
    await world.kernel.reclaim("a")
    left = await world.kernel.usage("a")
    assert held.memory_bytes - left.memory_bytes > read_bytes / 2
    await world.kernel.resume("a")
    assert await world.say("cat /tmp/note; stat -c %s /tmp/big") == f"kept\n{40 * MIB}"


async def test_only_a_paused_sandbox_gives_memory_back(world: World) -> None:
    await world.create()
    await world.kernel.reclaim("a")
    assert await world.say("echo alive") == "alive"


async def test_what_is_not_there_cannot_be_paused(world: World) -> None:
    for asking in (world.kernel.pause("x"), world.kernel.resume("x"), world.kernel.reclaim("x")):
        with pytest.raises(DsecError) as caught:
            await asking
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_many_sandboxes_are_paused_and_resumed_side_by_side(world: World) -> None:
    names = [f"s{number}" for number in range(20)]
    for name in names:
        await world.create(name)
    await asyncio.gather(*(world.kernel.pause(name) for name in names))
    assert all(frozen(world, name) for name in names)
    await asyncio.gather(*(world.kernel.resume(name) for name in names))
    for name in names:
        assert await world.say("echo alive", local=name) == "alive"
