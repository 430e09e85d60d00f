"""A daemon that is gone and the next one: the sandboxes live on, with everything in them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.interface import EndCause, SandboxIdentity
from dsec_sandboxd.kernel.linux import LinuxKernel
from dsec_sandboxd.kernel.slots import SlotPool
from kernel_world import (
    NODE,
    UNIFIED,
    Layers,
    World,
    cgroups_left,
    descriptors_of,
    wait_until_dead,
)

DYING_DAEMON = """
import asyncio, json, os, signal, sys
from dataclasses import asdict
from pathlib import Path
from dsec_sandboxd.kernel.interface import CommandSpec, SandboxSpec
from dsec_sandboxd.kernel.linux import LinuxKernel

async def main():
    kernel = LinuxKernel(sys.argv[1])
    await kernel.start()
    await kernel.hold_layer("base", Path(sys.argv[2]))
    for local in sys.argv[4:]:
        await kernel.create(SandboxSpec(local=local, layers=("base",),
            memory_bytes=64 << 20, cpus=1, pids=32, disk_bytes=8 << 20, inodes=100))
        await kernel.exec(local, CommandSpec(argv=("/bin/sh", "-c",
            "echo kept-$$ > /tmp/kept; (while :; do sleep 0.05; done) >/dev/null 2>&1 &")))
    first, look = sys.argv[4], "cat /proc/[0-9]*/comm"
    sleep = CommandSpec(argv=("/bin/sleep", "1000"))
    running = asyncio.ensure_future(kernel.exec(first, sleep))
    while b"sleep" not in (
        await kernel.exec(first, CommandSpec(argv=("/bin/sh", "-c", look)))
    ).stdout.split():
        pass
    print(json.dumps({
        "spawner": kernel._spawner.pid,
        "block": kernel._slots.block,
        "identities": {local: asdict(kernel.identity(local)) for local in sys.argv[4:]},
    }), flush=True)
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    await kernel.close(keep_sandboxes=True)
    await asyncio.wait([running])
    running.exception()

asyncio.run(main())
"""


#: Counts in a file for as long as it runs.
COUNTING = "i=0; while :; do i=$((i + 1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done"


class Left:
    """What a daemon left: its word on each sandbox, and the block of ids."""

    def __init__(self, said: dict[str, object]) -> None:
        self.block = said["block"]
        identities = said["identities"]
        assert isinstance(identities, dict)
        self.identities = {
            local: SandboxIdentity(**identity) for local, identity in identities.items()
        }


async def dead_daemon(layers: Layers, how: str, *locals_: str) -> Left:
    """Run a daemon that makes sandboxes and ends without them."""
    import json  # noqa: PLC0415  only here

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DYING_DAEMON,
        NODE,
        str(layers.base),
        how,
        *locals_,
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == (-signal.SIGKILL if how == "kill" else 0)
    said = json.loads(output)
    wait_until_dead(said["spawner"])
    return Left(said)


@asynccontextmanager
async def next_daemon(layers: Layers, directory: Path) -> AsyncIterator[World]:
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        for digest, image in layers.items():
            await kernel.hold_layer(digest, image)
        yield World(kernel, layers, directory)
    finally:
        await kernel.close()


@pytest.mark.parametrize("how", ["kill", "leave"])
async def test_sandboxes_live_on_under_the_next_daemon_with_processes_and_files(
    layers: Layers, tmp_path: Path, how: str
) -> None:
    left = await dead_daemon(layers, how, "x", "y")
    async with next_daemon(layers, tmp_path) as world:
        before = {local: world.pids(local) for local in ("x", "y")}
        assert all(before.values())
        assert await world.kernel.adopt(left.identities) == {}
        assert await world.kernel.recover() == []
        for local in ("x", "y"):
            assert set(before[local]) <= {*world.pids(local), *before[local]}
            assert before[local][0] in world.pids(local)
            assert (await world.say("cat /tmp/kept", local=local)).startswith("kept-")
            assert world.kernel.identity(local) == left.identities[local]
        comms = await world.say("cat /proc/[0-9]*/comm 2>/dev/null; true", local="x")
        assert "sleep" in comms.split()
        usage = await world.kernel.usage("x")
        assert usage.memory_bytes > 0
        await world.create("z")
        assert world.kernel.identity("z").base_id not in {
            identity.base_id for identity in left.identities.values()
        }


async def test_an_adopted_sandbox_costs_no_more_descriptors_than_a_new_one(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x", "y")
    async with next_daemon(layers, tmp_path) as world:
        before = len(descriptors_of())
        spawner = world.kernel._spawner
        assert spawner is not None
        held = len(descriptors_of(spawner.pid))
        assert await world.kernel.adopt(left.identities) == {}
        for local in ("x", "y"):
            await world.say("true", local=local)
        assert len(descriptors_of()) - before <= 2 * 6
        assert len(descriptors_of(spawner.pid)) - held <= 2 * 6
        await world.kernel.destroy("x")
        await world.kernel.destroy("y")
        assert len(descriptors_of()) - before <= 1  # one is kept in reserve


async def paused_daemon(layers: Layers, directory: Path) -> SandboxIdentity:
    """Leave a paused sandbox, in which one command counts and another was never begun."""
    async with next_daemon(layers, directory) as world:
        await world.create("a")
        identity = world.kernel.identity("a")
        counting = asyncio.ensure_future(world.shell(COUNTING, timeout_s=0))
        while not count_in(world):
            await asyncio.sleep(0.001)
        (world.cgroup() / "cgroup.freeze").write_text("1")  # as a pause that PID 1 loses against
        begun = asyncio.ensure_future(world.shell("echo > /tmp/begun; sleep 60", timeout_s=0))
        await asyncio.sleep(0)
        await world.kernel.pause("a")
        await world.kernel.close(keep_sandboxes=True)
        for left in await asyncio.gather(counting, begun, return_exceptions=True):
            assert isinstance(left, DsecError)
    return identity


def count_in(world: World) -> str:
    """Return how far the command in the sandbox has counted, without waking anything."""
    count = Path(f"/proc/{world.init_pid()}/root/tmp/count")
    return count.read_text() if count.exists() else ""


async def goes_on(world: World) -> None:
    """Return when the command in the sandbox has counted further, and the other one has begun."""
    before = count_in(world)
    async with asyncio.timeout(20):
        while count_in(world) == before:
            await asyncio.sleep(0.001)
        while (await world.shell("test -e /tmp/begun")).exit_code != 0:
            await asyncio.sleep(0.001)


async def test_nothing_but_pid_1_runs_in_a_paused_sandbox_while_it_is_taken_over(
    layers: Layers, tmp_path: Path
) -> None:
    identity = await paused_daemon(layers, tmp_path)
    async with next_daemon(layers, tmp_path) as world:
        before = count_in(world)
        assert await world.kernel.adopt({"a": identity}, {"a"}) == {}
        left = await world.kernel.processes("a")  # PID 1 answers, and begins what it was told to
        assert [process.exited.done() for process in left] == [False, False]
        for turn in range(50):
            await asyncio.sleep(0.001)
            assert count_in(world) == before, turn
        await world.kernel.pause("a")
        assert "frozen 1" in (world.cgroup() / "cgroup.events").read_text()
        assert count_in(world) == before
        await world.kernel.resume("a")
        await goes_on(world)
        for process in left:
            process.kill()
            process.finish()


@pytest.mark.parametrize("again", [("a",), ()])
async def test_a_paused_sandbox_that_two_daemons_leave_in_the_middle_goes_on_when_it_is_let(
    layers: Layers, tmp_path: Path, again: tuple[str, ...]
) -> None:
    identity = await paused_daemon(layers, tmp_path)
    async with next_daemon(layers, tmp_path) as world:
        before = count_in(world)
        assert await world.kernel.adopt({"a": identity}, {"a"}) == {}
        await world.kernel.close(keep_sandboxes=True)
    async with next_daemon(layers, tmp_path) as world:
        assert count_in(world) == before
        assert await world.kernel.adopt({"a": identity}, again) == {}
        if again:
            assert count_in(world) == before
            await world.kernel.resume("a")
        await goes_on(world)


async def test_answers_to_the_dead_daemons_requests_are_not_taken_for_the_next_ones(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    async with next_daemon(layers, tmp_path) as world:
        assert await world.kernel.adopt(left.identities) == {}
        for turn in range(20):
            assert await world.say(f"echo {turn}", local="x") == str(turn)
        # The dead daemon's command ends now, and its answer comes to us.
        await world.shell("kill $(pidof sleep 2>/dev/null) 2>/dev/null; killall sleep", local="x")
        for turn in range(20):
            assert await world.say(f"echo {turn}", local="x") == str(turn)


async def test_the_end_of_a_command_that_the_dead_daemon_had_not_read_is_told_to_the_next(
    layers: Layers, tmp_path: Path
) -> None:
    async with next_daemon(layers, tmp_path) as world:
        await world.create("a")
        identity = world.kernel.identity("a")
        running = asyncio.ensure_future(world.shell("echo out; echo err >&2; exit 3"))
        await asyncio.sleep(0)
        channel = world.kernel._require("a").init._channel
        asyncio.get_running_loop().remove_reader(channel.fileno())
        assert select.select([channel], [], [], 10.0)[0], "PID 1 tells that it has ended"
        await world.kernel.close(keep_sandboxes=True)
        await asyncio.wait([running])
        running.exception()
    async with next_daemon(layers, tmp_path) as world:
        assert await world.kernel.adopt({"a": identity}) == {}
        assert await world.kernel.processes("a") == []
        (result,) = world.kernel.overheard("a").values()
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert world.kernel.overheard("a") == {}
        await world.kernel.destroy("a")


async def test_an_adopted_sandbox_that_ends_by_itself_is_reported(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    async with next_daemon(layers, tmp_path) as world:
        assert await world.kernel.adopt(left.identities) == {}
        os.kill(world.init_pid("x"), signal.SIGKILL)
        event = await anext(world.kernel.ended())
        assert (event.local, event.cause) == ("x", EndCause.KILLED)
        assert cgroups_left() == []


async def test_an_adopted_sandbox_out_of_memory_is_told_as_such(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    async with next_daemon(layers, tmp_path) as world:
        assert await world.kernel.adopt(left.identities) == {}
        result = await world.run("python3", "-c", "b'x' * (200 << 20)", local="x")
        assert result.oom


async def test_who_ended_meanwhile_is_lost_with_a_reason_and_its_remains_removed(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x", "y")
    init = int((UNIFIED / f"dsec-{NODE}/x/cgroup.procs").read_text().split()[0])
    os.kill(init, signal.SIGKILL)
    wait_until_dead(init)
    async with next_daemon(layers, tmp_path) as world:
        lost = await world.kernel.adopt(left.identities)
        assert list(lost) == ["x"]
        assert "PID 1" in lost["x"]
        assert await world.kernel.recover() == ["x"]
        assert await world.say("echo lives", local="y") == "lives"


async def test_another_process_under_the_same_number_is_not_taken_for_the_sandbox(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x", "y")
    swapped = {"x": left.identities["y"], "y": left.identities["x"]}
    async with next_daemon(layers, tmp_path) as world:
        assert sorted(await world.kernel.adopt(swapped)) == ["x", "y"]
        assert await world.kernel.recover() == ["x", "y"]
        assert cgroups_left() == []


async def test_no_other_daemon_is_given_ids_that_living_sandboxes_have(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    other = SlotPool("another-node", UNIFIED)
    try:
        assert other.block != left.block
    finally:
        other.close()
    async with next_daemon(layers, tmp_path) as world:
        slots = world.kernel._slots
        assert slots is not None
        assert slots.block == left.block
        assert await world.kernel.adopt(left.identities) == {}


async def test_a_daemon_that_only_looks_at_the_block_does_not_cost_the_sandboxes(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    claim.bind(f"\0dsec-id-block-{left.block}")
    timer = threading.Timer(0.3, claim.close)
    timer.start()
    async with next_daemon(layers, tmp_path) as world:
        timer.join()
        assert await world.kernel.adopt(left.identities) == {}


async def test_sandboxes_whose_ids_another_daemon_has_end_with_that_reason(
    layers: Layers, tmp_path: Path
) -> None:
    left = await dead_daemon(layers, "kill", "x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        claim.bind(f"\0dsec-id-block-{left.block}")
        async with next_daemon(layers, tmp_path) as world:
            lost = await world.kernel.adopt(left.identities)
            assert "another sandbox or daemon" in lost["x"]
            assert await world.kernel.recover() == ["x"]
            assert cgroups_left() == []


async def test_a_new_spawner_holds_again_what_the_killed_one_held_of_living_sandboxes(
    world: World,
) -> None:
    await world.create("a")
    spawner = await world.kernel._living_spawner()
    os.kill(spawner.pid, signal.SIGKILL)
    replaced = await world.kernel._living_spawner()
    while replaced is spawner:
        await asyncio.sleep(0.001)
        replaced = await world.kernel._living_spawner()
    links = {
        os.readlink(f"/proc/{replaced.pid}/fd/{name}") for name in descriptors_of(replaced.pid)
    }
    network = os.readlink(f"/proc/{world.init_pid('a')}/ns/net")
    assert network in links
    assert await world.say("echo lives", local="a") == "lives"


async def test_commands_and_files_of_a_sandbox_cannot_reach_what_its_pid_1_keeps(
    world: World,
) -> None:
    await world.create("a")
    assert await world.say("ls /proc/self/fd | tr '\\n' ' '") in {"0 1 2 3", "0 1 2 3 "}
    for descriptor in (3, 4, 5):
        result = await world.shell(f"readlink /proc/1/fd/{descriptor}; ls /proc/1/fd/")
        assert result.exit_code != 0
        assert result.stdout == b""
