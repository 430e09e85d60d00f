"""Parts that fail or die: what is told, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel import spawner as spawner_module
from dsec_sandboxd.kernel.cgroups import LimitText
from dsec_sandboxd.kernel.interface import EndCause, SandboxEnded
from dsec_sandboxd.kernel.linux import PROGRAMS, LinuxKernel
from kernel_world import (
    NODE,
    UNIFIED,
    Layers,
    World,
    cgroups_left,
    descriptors_of,
    wait_until_dead,
)


async def failure_of(work: Awaitable[None]) -> DsecError | None:
    """Return the typed error that some work ends with, or None."""
    try:
        await work
    except DsecError as error:
        return error
    return None


async def test_a_name_that_a_cgroup_has_is_a_conflict_and_that_one_stays(world: World) -> None:
    driver = world.kernel._require_driver()
    for parent in driver.parents():
        other = Path(parent) / "a"
        other.mkdir()
        error = await failure_of(world.create("a"))
        assert error is not None
        assert error.code is ErrorCode.CONFLICT
        assert [path for path in driver.parents() if (Path(path) / "a").exists()] == [parent]
        other.rmdir()
    await world.create("a")
    assert await world.say("echo fine") == "fine"


async def test_a_limit_that_the_kernel_has_no_file_for_is_unsupported_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = world.kernel._require_driver()
    limit_texts = driver.limit_texts
    for tree in range(len(driver.parents())):
        monkeypatch.setattr(
            driver,
            "limit_texts",
            lambda limits, tree=tree: [*limit_texts(limits), LimitText(tree, "no.such", b"1")],
        )
        error = await failure_of(world.create())
        assert error is not None
        assert error.code is ErrorCode.UNSUPPORTED
        assert "no.such" in error.message
        assert cgroups_left() == []


async def test_a_spawner_out_of_descriptors_refuses_and_leaves_nothing(world: World) -> None:
    spawner = await world.kernel._living_spawner()
    limits = resource.prlimit(spawner.pid, resource.RLIMIT_NOFILE)
    refused = 0
    for most in range(8, 40, 2):
        resource.prlimit(spawner.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            error = await failure_of(world.create())
        finally:
            resource.prlimit(spawner.pid, resource.RLIMIT_NOFILE, limits)
        if error is not None:
            refused += 1
            assert error.code is ErrorCode.EXHAUSTED, (most, error)
        await world.kernel.destroy("a")
        assert cgroups_left() == [], most
    assert refused
    await world.create()
    assert await world.say("echo fine") == "fine"


async def test_an_init_that_cannot_be_executed_is_an_error_without_leftovers(
    tmp_path: Path, layers: Layers
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(PROGRAMS / "spawner", programs / "spawner")
    (programs / "pid1").write_text("not a program")
    kernel = LinuxKernel(NODE, programs)
    await kernel.start()
    world = World(kernel, layers, tmp_path)
    await kernel.hold_layer("base", layers.base)
    try:
        with pytest.raises(DsecError) as caught:
            await kernel.create(world.spec(layers=("base",)))
        assert caught.value.details["operation"] == "exec_init"
        assert cgroups_left() == []
    finally:
        await kernel.close()


async def test_missing_programs_say_what_to_do(tmp_path: Path) -> None:
    kernel = LinuxKernel(NODE, tmp_path)
    with pytest.raises(DsecError) as caught:
        await kernel.start()
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert "make" in caught.value.message


async def test_a_daemon_out_of_descriptors_refuses_and_recovers(world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors_of())) + 24, hard))
    taken: list[int] = []
    refused = 0
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for spare in range(20):
            error = await failure_of(world.create())
            assert error is None or error.code is ErrorCode.EXHAUSTED, (spare, error)
            refused += error is not None
            os.close(taken.pop())
            await world.kernel.destroy("a")
            assert cgroups_left() == [], (spare, error)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < refused < 20
    await world.create()
    assert await world.say("echo fine") == "fine"


async def test_a_killed_spawner_is_replaced_and_sandboxes_live_on(world: World) -> None:
    await world.create("a")
    spawner = world.kernel._spawner
    assert spawner is not None
    os.kill(spawner.pid, signal.SIGKILL)
    assert await world.say("cat /work/code.txt", local="a") == "from the workspace"
    for _ in range(3):
        error = await failure_of(world.create("b"))
        if error is None:
            break
        assert error.code is ErrorCode.UNAVAILABLE  # the death was noticed by this request
    assert await world.say("cat /work/code.txt", local="b") == "from the workspace"
    await world.kernel.destroy("a")


async def test_a_spawner_killed_while_it_creates_leaves_nothing(world: World) -> None:
    for turns in range(6):
        spawner = await world.kernel._living_spawner()
        creating = asyncio.ensure_future(world.create())
        for _ in range(turns):
            await asyncio.sleep(0)
        os.kill(spawner.pid, signal.SIGKILL)
        error = await failure_of(creating)
        if error is not None:
            assert error.code in {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL}
            assert cgroups_left() == []
        await world.kernel.destroy("a")


async def test_nobody_asks_a_new_spawner_for_what_it_has_not_been_given_yet(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.create(name)

    async def copy(name: str) -> None:
        copied = await world.kernel.snapshot(name, size_bytes=8 << 20, inodes=1000)
        os.close(copied.mount_fd)

    for _ in range(3):
        spawner = await world.kernel._living_spawner()
        os.kill(spawner.pid, signal.SIGKILL)
        while spawner.alive:
            await asyncio.sleep(0)
        # The first of these starts another; the others come while it is given layers and sandboxes.
        await asyncio.gather(*(copy(name) for name in ("c", "b", "a")), world.create("d"))
        assert await world.say("cat /work/code.txt", local="d") == "from the workspace"
        await world.kernel.destroy("d")


async def test_layers_are_still_held_when_a_new_spawner_dies_before_it_has_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create("a")
    held = world.kernel._layers.digests()
    spawner = await world.kernel._living_spawner()
    started = spawner_module.Spawner.start

    async def start_and_kill(*programs: Path) -> spawner_module.Spawner:
        monkeypatch.undo()
        next_one = await started(*programs)
        os.kill(next_one.pid, signal.SIGKILL)
        return next_one

    monkeypatch.setattr(spawner_module.Spawner, "start", start_and_kill)
    os.kill(spawner.pid, signal.SIGKILL)
    while spawner.alive:
        await asyncio.sleep(0)
    with pytest.raises(DsecError) as caught:
        await world.kernel._living_spawner()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert world.kernel._layers.digests() == held
    await world.create("b")
    assert await world.say("cat /work/code.txt", local="b") == "from the workspace"


async def test_a_spawner_that_hangs_is_replaced_and_what_waited_is_told_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create("a")
    spawner = await world.kernel._living_spawner()
    os.kill(spawner.pid, signal.SIGKILL)  # the next one knows the short patience only
    monkeypatch.setattr(spawner_module, "STUCK_AFTER_S", 0.3)
    while (replaced := await world.kernel._living_spawner()) is spawner:
        await asyncio.sleep(0.001)
    await world.say("true", local="a")
    os.kill(replaced.pid, signal.SIGSTOP)
    began = asyncio.get_running_loop().time()
    errors = await asyncio.gather(*(failure_of(world.create(name)) for name in ("b", "c")))
    assert asyncio.get_running_loop().time() - began < 5
    assert all(error is not None and error.code is ErrorCode.TIMEOUT for error in errors), errors
    assert all(error is not None and error.retryable for error in errors)
    assert [Path(path).name for path in cgroups_left()].count("a") == len(cgroups_left())
    monkeypatch.undo()
    await world.create("b")
    assert await world.say("echo again", local="b") == "again"
    assert await world.say("echo still", local="a") == "still"


async def test_a_layer_that_is_deleted_while_in_use_costs_no_living_sandbox(world: World) -> None:
    image = world.directory / "gone.erofs"
    shutil.copy(world.layers.base, image)
    await world.kernel.hold_layer("gone", image)
    await world.create("a", layers=("gone", "workspace"))
    image.unlink()
    assert await world.say("cat /work/code.txt", local="a") == "from the workspace"
    await world.create("b", layers=("gone",))
    assert await world.say("echo /bin/sh", local="b") == "/bin/sh"
    spawner = await world.kernel._living_spawner()
    os.kill(spawner.pid, signal.SIGKILL)
    while await world.kernel._living_spawner() is spawner:
        await asyncio.sleep(0.001)
    error = await failure_of(world.create("c", layers=("gone",)))
    assert error is not None
    assert error.code is ErrorCode.LAYER_ERROR
    assert await world.say("cat /work/code.txt", local="a") == "from the workspace"
    shutil.copy(world.layers.base, image)
    await world.kernel.hold_layer("gone", image)
    await world.create("c", layers=("gone",))
    assert await world.say("echo back", local="c") == "back"


async def test_a_killed_init_is_reported_with_its_cause_and_cleared_away(world: World) -> None:
    await world.create("a")
    await world.create("b")
    running = asyncio.ensure_future(world.run("sleep", "1000"))
    await world.say("true")
    os.kill(world.init_pid(), signal.SIGKILL)
    with pytest.raises(DsecError) as caught:
        await running
    assert caught.value.code is ErrorCode.UNAVAILABLE
    events = world.kernel.ended()
    event = await anext(events)
    assert (event.local, event.cause) == ("a", EndCause.KILLED)
    assert not world.cgroup().exists()
    assert await world.say("echo alive", local="b") == "alive"
    await world.create("a")


async def test_destroy_is_not_reported_as_an_end(world: World) -> None:
    await world.create()
    await world.kernel.destroy("a")
    await world.kernel.close()
    seen: list[SandboxEnded] = [event async for event in world.kernel.ended()]
    assert seen == []


CRASHING_DAEMON = """
import asyncio, os, signal, sys
from pathlib import Path
from dsec_sandboxd.kernel.interface import CommandSpec, SandboxSpec
from dsec_sandboxd.kernel.linux import LinuxKernel

async def main():
    kernel = LinuxKernel(sys.argv[1])
    await kernel.start()
    await kernel.hold_layer("base", Path(sys.argv[2]))
    for local in ("x", "y"):
        await kernel.create(SandboxSpec(local=local, layers=("base",), memory_bytes=64 << 20,
            cpus=1, pids=32, disk_bytes=8 << 20, inodes=100))
    await kernel.exec("x", CommandSpec(argv=("/bin/sh", "-c", "sleep 1000 >/dev/null 2>&1 &")))
    print(kernel._spawner.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_a_crashed_daemon_left_is_recovered_and_its_spawner_is_gone(
    layers: Layers,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASHING_DAEMON, NODE, str(layers.base), stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    wait_until_dead(int(output))
    left = [
        int(pid)
        for path in UNIFIED.glob(f"dsec-{NODE}/**/cgroup.procs")
        for pid in path.read_text().split()
    ]
    assert len(left) == 3
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        assert await kernel.recover() == ["x", "y"]
        assert await kernel.recover() == []
        for pid in left:
            wait_until_dead(pid)
        assert cgroups_left() == []
    finally:
        await kernel.close()
