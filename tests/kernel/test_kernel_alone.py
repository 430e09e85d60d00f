"""A command that runs alone in a paused sandbox: all else stands still, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec
from dsec_sandboxd.kernel.linux import LinuxKernel
from dsec_sandboxd.kernel.pausing import ALONE, PAUSED
from kernel_world import NODE, World

#: Counts in a file for as long as it runs.
COUNTING = "i=0; while :; do i=$((i + 1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done"


async def alone(world: World, text: str, *, timeout_s: float = 30.0) -> CommandResult:
    """Run a shell line alone in the paused sandbox."""
    command = CommandSpec(argv=("/bin/sh", "-c", text), timeout_s=timeout_s)
    return await world.kernel.run_alone("a", command)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


async def started(world: World, text: str = COUNTING) -> asyncio.Task[CommandResult]:
    """Create a sandbox, start a command that writes the count, and return when it has."""
    await world.create()
    running = asyncio.create_task(world.shell(text, timeout_s=0))
    async with asyncio.timeout(20):
        while not await world.say("cat /tmp/count 2> /dev/null || true"):
            await asyncio.sleep(0.001)
    return running


async def goes_on(world: World, since: str) -> None:
    """Return when the count is another."""
    async with asyncio.timeout(20):
        while await world.say("cat /tmp/count") in {since, ""}:
            await asyncio.sleep(0.001)


async def ended(running: asyncio.Task[CommandResult]) -> None:
    running.cancel()
    await asyncio.wait({running})


#: Takes long enough for whoever runs beside it to be seen.
BUSY = "i=0; while [ $i -lt 100 ]; do i=$((i + 1)); cat /etc/passwd > /dev/null; done"

#: Reads the count, gives whoever counts a hundred turns, and reads it again.
LOOKING = f'a=$(cat /tmp/count); {BUSY}; b=$(cat /tmp/count); echo "$a $b"'


async def test_what_ran_before_stands_still_while_a_command_runs_alone(world: World) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    result = await alone(world, LOOKING)
    before, after = result.stdout.split()
    assert (result.exit_code, before) == (0, after)
    assert "frozen 1" in (world.cgroup() / "cgroup.events").read_text()
    await world.kernel.resume("a")
    await goes_on(world, before.decode())
    await ended(running)


async def test_what_it_writes_is_there_when_the_others_go_on(world: World) -> None:
    text = "echo 0 > /tmp/count; until [ -e /tmp/fresh ]; do :; done; cat /tmp/fresh"
    running = await started(world, text)
    await world.kernel.pause("a")
    assert (await alone(world, "echo new > /tmp/fresh; exit 3")).exit_code == 3
    await world.kernel.resume("a")
    assert (await running).stdout == b"new\n"


async def test_one_that_takes_too_long_is_killed_with_all_it_started(world: World) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    others = set(world.pids())
    result = await alone(world, "sleep 60 & sleep 60", timeout_s=0.2)
    assert (result.timed_out, result.exit_code) == (True, None)
    await until(lambda: set(world.pids()) == others)
    await world.kernel.resume("a")
    await goes_on(world, "")
    await ended(running)


async def test_a_caller_that_gives_up_leaves_the_sandbox_paused(world: World) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    others = set(world.pids())
    waiting = asyncio.create_task(alone(world, "sleep 60"))
    await until(lambda: set(world.pids()) > others)
    waiting.cancel()
    await asyncio.wait({waiting})
    await until(lambda: set(world.pids()) == others)
    assert "frozen 1" in (world.cgroup() / "cgroup.events").read_text()
    await world.kernel.resume("a")
    await goes_on(world, "")
    await ended(running)


async def test_what_it_leaves_behind_stands_still_and_goes_on_with_the_others(
    world: World,
) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    left = "setsid sh -c 'until [ -e /tmp/go ]; do :; done; echo went > /tmp/went' > /dev/null 2>&1"
    assert (await alone(world, f"{left} &")).exit_code == 0
    await world.kernel.resume("a")
    await world.say("echo > /tmp/go; until [ -e /tmp/went ]; do :; done")
    await ended(running)


async def test_what_was_begun_and_stopped_before_it_ran_does_not_run_beside_it(
    world: World,
) -> None:
    await world.create()
    await world.say("true")
    (world.cgroup() / "cgroup.freeze").write_text("1")  # as a pause that PID 1 loses against
    running = asyncio.create_task(world.shell(COUNTING, timeout_s=0))
    await asyncio.sleep(0)
    await world.kernel.pause("a")
    result = await alone(world, f"cat /tmp/count 2> /dev/null; {BUSY}; cat /tmp/count")
    assert (result.exit_code, result.stdout) == (1, b"")
    await world.kernel.resume("a")
    async with asyncio.timeout(20):
        while not await world.say("cat /tmp/count 2> /dev/null || true"):
            await asyncio.sleep(0.001)
    await ended(running)


async def test_it_may_begin_where_another_command_has_ended(world: World) -> None:
    await world.create()
    for _ in range(3):
        await asyncio.gather(*(world.say("true") for _ in range(8)))
        await world.kernel.pause("a")
        assert (await alone(world, "true", timeout_s=20)).exit_code == 0
        await world.kernel.resume("a")


async def test_nothing_runs_alone_in_a_sandbox_that_runs_or_is_copied(world: World) -> None:
    await world.create()
    for reasons in ((), (PAUSED, "copied")):
        for reason in reasons:
            await world.kernel._sandboxes["a"].freezer.hold(reason)
        with pytest.raises(DsecError) as caught:
            await alone(world, "true")
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_sandbox_that_ends_meanwhile_ends_the_command_too(world: World) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    others = set(world.pids())
    waiting = asyncio.create_task(alone(world, "sleep 60"))
    await until(lambda: set(world.pids()) > others)
    await world.kernel.destroy("a")
    with pytest.raises(DsecError):
        await waiting
    await asyncio.wait({running})


@contextlib.asynccontextmanager
async def daemon_killed(
    world: World, stopped: Sequence[Path], *calls: asyncio.Task[CommandResult]
) -> AsyncIterator[None]:
    """Have the next daemon take over from one that was killed while a command ran alone."""
    identity = world.kernel.identity("a")
    mark = world.cgroup() / f"exec-{ALONE}"
    assert mark.exists()
    # As one that is killed: nothing of what it does after this reaches the sandbox.
    await world.kernel.close(keep_sandboxes=True)
    await asyncio.wait(calls)
    for directory in stopped:
        (directory / "cgroup.freeze").write_text("1")
    mark.mkdir(exist_ok=True)
    heir = LinuxKernel(NODE)
    await heir.start()
    try:
        assert await heir.adopt({"a": identity}) == {}
        world.kernel = heir
        yield
        assert not mark.exists()
    finally:
        await heir.close()


async def test_the_next_daemon_ends_what_ran_alone_and_lets_the_others_go_on(
    world: World,
) -> None:
    running = await started(world)
    await world.kernel.pause("a")
    others = set(world.pids())
    waiting = asyncio.create_task(alone(world, "sleep 60"))
    await until(lambda: set(world.pids()) > others)
    pids = set(world.pids())
    stopped = [one for one in world.cgroup().glob("exec-*") if "1" in text(one / "cgroup.freeze")]
    assert stopped
    async with daemon_killed(world, stopped, waiting, running):
        await until(lambda: not pids - others & set(world.pids()))
        assert [text(one / "cgroup.freeze") for one in stopped] == ["0\n"] * len(stopped)
        before = await world.say("cat /tmp/count")
        await goes_on(world, before)


async def test_the_next_daemon_ends_what_ran_alone_where_nothing_else_did(world: World) -> None:
    await world.create()
    await world.say("true")
    await world.kernel.pause("a")
    (init,) = world.pids()
    waiting = asyncio.create_task(alone(world, "sleep 60"))
    await until(lambda: len(world.pids()) > 1)
    async with daemon_killed(world, (), waiting):
        await until(lambda: world.pids() == [init])


async def test_the_next_daemon_ends_nothing_that_did_not_run_alone(world: World) -> None:
    await world.create()
    running = {await started_beside(world) for _ in range(2)}
    pids = set(world.pids())
    await world.kernel.pause("a")
    waiting = asyncio.create_task(alone(world, "sleep 60"))
    await until(lambda: set(world.pids()) > pids)
    waiting.cancel()
    await asyncio.wait({waiting})
    await until(lambda: set(world.pids()) == pids)
    identity = world.kernel.identity("a")
    await world.kernel.close(keep_sandboxes=True)
    await asyncio.wait(running)
    # As one that was killed while it stopped the others, or let them go: some are, some are not.
    commands = [one for one in world.cgroup().glob("exec-*") if text(one / "cgroup.procs")]
    (commands[0] / "cgroup.freeze").write_text("1")
    heir = LinuxKernel(NODE)
    await heir.start()
    try:
        assert await heir.adopt({"a": identity}) == {}
        assert (len(commands), set(world.pids())) == (2, pids)
    finally:
        await heir.close()


async def started_beside(world: World) -> asyncio.Task[CommandResult]:
    """Start another command, and return when it runs."""
    before = len(world.pids())
    task = asyncio.create_task(world.shell("sleep 60", timeout_s=0))
    await until(lambda: len(world.pids()) > before)
    return task


def text(path: object) -> str:
    with open(str(path)) as file:  # noqa: PTH123  a file of the kernel's
        return file.read()
