"""Devices that one sandbox has and others do not."""

from __future__ import annotations

import os
import stat

import pytest

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.interface import DeviceNode
from kernel_world import World

ZERO = DeviceNode("nvidia0", 1, 5)
CAPABILITY = DeviceNode("nvidia-caps/nvidia-cap21", 1, 3)


async def test_a_sandbox_reads_from_the_devices_it_was_given(world: World) -> None:
    await world.create(devices=(ZERO, CAPABILITY))
    assert await world.say("head -c 3 /dev/nvidia0 | od -An -tx1") == "00 00 00"
    assert await world.say("stat -c %F /dev/nvidia-caps/nvidia-cap21") == "character special file"


async def test_every_user_of_it_may_open_them(world: World) -> None:
    await world.create(devices=(ZERO,))
    assert await world.say("head -c 1 /dev/nvidia0 | wc -c", user="65534") == "1"


async def test_its_neighbour_has_none_of_them(world: World) -> None:
    await world.create("a", devices=(ZERO,))
    await world.create("b")
    assert "nvidia" not in await world.say("ls /dev", local="b")


async def test_it_cannot_make_devices_or_remove_them_itself(world: World) -> None:
    await world.create(devices=(ZERO,))
    made = await world.shell("mknod /dev/mine c 1 5 || mknod /tmp/mine c 1 5")
    assert made.exit_code != 0
    assert (await world.shell("rm /dev/nvidia0")).exit_code != 0


async def test_many_devices_fit_beside_the_files_that_were_asked_for(world: World) -> None:
    devices = tuple(DeviceNode(f"nvidia{number}", 1, 5) for number in range(16))
    await world.create(devices=devices, inodes=64)
    assert await world.say("ls /dev | grep -c nvidia") == "16"


@pytest.mark.parametrize("name", ["../escape", "", f"{'d' * 70}/x"])
async def test_a_name_that_leads_elsewhere_is_refused(world: World, name: str) -> None:
    with pytest.raises(DsecError):
        await world.create(devices=(DeviceNode(name, 1, 5),))
    await world.create("b")


async def test_the_pipes_of_mps_are_seen_in_its_run_directory(world: World) -> None:
    run, pipes = world.directory / "run", world.directory / "pipes"
    (run / "mps").mkdir(parents=True)
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    assert stat.S_ISFIFO((pipes / "control").stat().st_mode)
    await world.create(run_directory=run, mps_pipes=pipes)
    assert await world.say("stat -c %F /run/dsec/mps/control") == "fifo"
    assert (await world.shell("touch /run/dsec/mps/mine")).exit_code != 0
