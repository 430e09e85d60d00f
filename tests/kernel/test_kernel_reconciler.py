"""What belongs to nobody is found and removed; what belongs to somebody is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_sandboxd.kernel.interface import Orphan
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import NODE, Layers, World, cgroups_left

ROOT = Path("/sys/fs/cgroup")
TREES = [path.parent for path in sorted(ROOT.glob("*/cgroup.procs"))]
CONTROLLED = [tree for tree in TREES if tree.name in {"memory", "cpu", "cpu,cpuacct", "pids"}]


def trees_of(node: str) -> list[Path]:
    return [path for path in ROOT.glob(f"*/dsec-{node}") if path.is_dir()]


def every_layer(_: str) -> bool:
    return True


def live_in(*directories: Path) -> subprocess.Popen[bytes]:
    """Start a process that enters cgroups by itself."""
    script = "".join(f"echo $$ > {directory}/cgroup.procs; " for directory in directories)
    process = subprocess.Popen(["sh", "-c", f"{script} echo in; exec sleep 1000"], stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    process.stdout.close()
    return process


@pytest.fixture
def neighbour() -> Iterator[list[Path]]:
    """Another node's cgroups, one with a process, that have to stay."""
    name = f"{NODE}-neighbour"
    made = []
    for tree in {path.parent for path in ROOT.glob("*/dsec-*")}:
        directory = tree / f"dsec-{name}" / "theirs"
        directory.mkdir(parents=True)
        made.append(directory)
    process = live_in(*made)
    yield made
    process.kill()
    process.wait()
    for directory in made:
        directory.rmdir()
        directory.parent.rmdir()


async def test_cgroups_and_processes_of_nobody_are_removed_in_every_tree(
    world: World, neighbour: list[Path]
) -> None:
    await world.create("mine")
    planted = []
    processes = []
    for number, tree in enumerate(trees_of(NODE)):
        directory = tree / f"orphan-{number}"
        (directory / "exec-1" / "deep").mkdir(parents=True)
        planted.append(directory)
        processes.append(live_in(directory / "exec-1"))
        processes.append(live_in(directory))
        (tree / "empty").mkdir()
    found = await world.kernel.reconcile(every_layer)
    for process in processes:
        assert process.wait(5) == -9
    names = {orphan.name for orphan in found if orphan.kind == "cgroup"}
    assert names == {*(path.name for path in planted), "empty"}
    assert {orphan.name for orphan in found if orphan.kind == "process"} >= {
        str(process.pid) for process in processes
    } - {"0"}
    assert not any(path.exists() for path in planted)
    assert all(path.exists() for path in neighbour)
    assert await world.say("echo here", local="mine") == "here"
    assert await world.kernel.reconcile(every_layer) == []


async def test_slots_and_layers_of_nobody_are_given_back(world: World) -> None:
    await world.create("mine")
    slots = world.kernel._slots
    assert slots is not None
    lost = slots.take()
    found = await world.kernel.reconcile(lambda digest: digest != "toolkit")
    assert set(found) == {Orphan("writable_layer", str(lost)), Orphan("layer", "toolkit")}
    assert slots.take() == lost
    slots.give_back(lost)
    assert await world.say("cat /work/both.txt", local="mine") == "upper"


async def test_creations_in_flight_and_living_sandboxes_are_never_touched(world: World) -> None:
    stop = False

    async def search() -> int:
        turns = 0
        while not stop:
            assert await world.kernel.reconcile(every_layer) == []
            turns += 1
            await asyncio.sleep(0)
        return turns

    searching = asyncio.ensure_future(search())
    for _ in range(10):
        await asyncio.gather(*(world.create(f"s{number}") for number in range(4)))
        for number in range(4):
            assert await world.say("echo here", local=f"s{number}") == "here"
        await asyncio.gather(*(world.kernel.destroy(f"s{number}") for number in range(4)))
    stop = True
    assert await searching > 10


async def test_a_frozen_orphan_is_removed_too(layers: Layers, tmp_path: Path) -> None:
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        directory = ROOT / "unified" / f"dsec-{NODE}" / "frozen"
        if not directory.parent.is_dir():
            directory = ROOT / f"dsec-{NODE}" / "frozen"
        directory.mkdir()
        process = live_in(directory)
        (directory / "cgroup.freeze").write_text("1")
        assert await kernel.recover() == ["frozen"]
        assert process.wait(5) == -9
        assert cgroups_left() == []
        assert "frozen" not in os.listdir(directory.parent)  # noqa: PTH208  a cgroup
    finally:
        await kernel.close()
