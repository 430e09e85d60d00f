"""What a living sandbox is lent, and what is left of it when it was taken back: nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandSpec, DeviceNode
from dsec_sandboxd.kernel.lending import LentMount
from kernel_world import MIB, World

CARD = DeviceNode("nvidia0", 1, 5)
CAPABILITY = DeviceNode("nvidia-caps/nvidia-cap3", 1, 9)


async def with_place(world: World, name: str = "data") -> Path:
    """Make a sandbox with a run directory, and a place for a mount in it."""
    run = world.directory / "run"
    place = run / "actions" / name
    place.mkdir(parents=True)
    await world.create(run_directory=run)
    return place


def mount(place: Path, **what: object) -> LentMount:
    path = f"/run/dsec/{place.parent.name}/{place.name}"
    return LentMount(place=place, path=path, **what)  # type: ignore[arg-type]


def volume(place: Path, size_bytes: int = MIB) -> LentMount:
    return mount(place, size_bytes=size_bytes, inodes=64)


async def test_a_device_that_is_lent_can_be_read_and_then_is_gone(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD, CAPABILITY])
    assert await world.say("head -c 2 /dev/nvidia0 | od -An -tx1", user="65534") == "00 00"
    assert await world.say("head -c 2 /dev/nvidia-caps/nvidia-cap3 | wc -c") == "2"
    await world.kernel.take_devices("a", [CARD, CAPABILITY])
    assert "nvidia" not in await world.say("ls /dev")


async def test_lending_and_taking_again_changes_nothing(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD])
    await world.kernel.lend_devices("a", [CARD])
    assert await world.say("head -c 1 /dev/nvidia0 | wc -c") == "1"
    await world.kernel.take_devices("a", [CARD])
    await world.kernel.take_devices("a", [CARD])
    assert "nvidia" not in await world.say("ls /dev")


async def test_who_holds_a_device_ends_and_others_go_on(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD])
    holder = asyncio.create_task(world.shell("exec 3</dev/nvidia0; echo >/held; sleep 60"))
    other = asyncio.create_task(
        world.shell("echo >/other; while [ ! -e /done ]; do sleep 0.1; done")
    )
    await world.say("while [ ! -e /held ] || [ ! -e /other ]; do sleep 0.02; done")
    await world.kernel.take_devices("a", [CARD])
    assert (await holder).signal == 9
    await world.say("touch /done")
    assert (await other).exit_code == 0


async def test_who_has_a_device_mapped_ends(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD])
    code = (
        "import mmap, os, time; f = os.open('/dev/nvidia0', os.O_RDWR);"
        "m = mmap.mmap(f, 4096, mmap.MAP_PRIVATE); os.close(f); open('/held', 'w').close();"
        "time.sleep(60)"
    )
    holder = asyncio.create_task(world.run("python3", "-c", code))
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    await world.kernel.take_devices("a", [CARD])
    assert (await holder).signal == 9


async def test_a_thread_with_descriptors_of_its_own_is_found(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD])
    code = (
        "import ctypes, os, threading, time\n"
        "def hide():\n"
        "    assert ctypes.CDLL(None).close_range(9000, 9001, 2) == 0\n"
        "    os.open('/dev/nvidia0', os.O_RDONLY)\n"
        "    open('/held', 'w').close()\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=hide).start()\n"
        "time.sleep(60)\n"
    )
    holder = asyncio.create_task(world.run("python3", "-c", code))
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    await world.kernel.take_devices("a", [CARD])
    assert (await holder).signal == 9


async def test_a_volume_is_written_by_anybody_and_full_at_its_size(world: World) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", volume(place))
    inside = "/run/dsec/actions/data"
    await world.say(f"echo mine > {inside}/file", user="65534")
    assert await world.say(f"stat -c %u {inside} {inside}/file") == "0\n65534"
    full = await world.shell(f"dd if=/dev/zero of={inside}/more bs=1M count=2")
    assert b"No space left" in full.stderr
    await world.kernel.take_mounts("a", [place])
    assert (await world.shell(f"ls {inside}")).exit_code != 0
    assert not place.exists()


async def test_who_works_in_a_volume_ends_with_it(world: World) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", volume(place))
    holder = asyncio.create_task(world.shell("echo >/held; cd /run/dsec/actions/data; sleep 60"))
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    await asyncio.sleep(0.1)  # until it is there; earlier it could not go there any more
    await world.kernel.take_mounts("a", [place])
    assert (await holder).signal == 9 or (await holder).exit_code != 0


async def test_a_layer_is_seen_and_cannot_be_written(world: World) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", mount(place, layer="workspace"))
    inside = "/run/dsec/actions/data"
    assert await world.say(f"cat {inside}/work/code.txt") == "from the workspace"
    assert await world.say(f"stat -c %u {inside}/work/code.txt") == "0"
    assert (await world.shell(f"touch {inside}/mine")).exit_code != 0
    await world.kernel.take_mounts("a", [place])
    assert (await world.shell(f"ls {inside}")).exit_code != 0


async def test_a_directory_of_the_host_is_seen_read_only(world: World) -> None:
    place = await with_place(world, "mps")
    pipes = world.directory / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    await world.kernel.lend_mount("a", mount(place, given=pipes))
    assert await world.say("stat -c %F /run/dsec/actions/mps/control") == "fifo"
    assert (await world.shell("touch /run/dsec/actions/mps/mine")).exit_code != 0


@pytest.mark.parametrize(
    "name", ["elsewhere", "a\xa0b", "a\x0cb\x0cc", "a\rb\rc", "a\u2028b\u2028c"]
)
async def test_a_volume_goes_with_its_place_also_when_root_has_moved_what_is_above(
    world: World, name: str
) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", volume(place))
    await world.say(f"mv /run '/{name}' && touch '/{name}/dsec/actions/data/kept'")
    holder = asyncio.create_task(
        world.shell(f"exec 3<'/{name}/dsec/actions/data/kept'; echo >/held; sleep 60")
    )
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    await world.kernel.take_mounts("a", [place])
    assert (await holder).signal == 9
    assert (await world.shell(f"ls '/{name}/dsec/actions/data'")).exit_code != 0


async def test_users_of_a_volume_whose_place_is_gone_are_found_by_its_number(
    world: World,
) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", volume(place))
    holder = asyncio.create_task(
        world.shell("cd /run/dsec/actions/data; exec 3>kept; cd /; echo >/held; sleep 60")
    )
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    numbers = await world.kernel.volumes("a", [place])
    place.rmdir()  # as a daemon did that was killed then
    await world.kernel.take_mounts("a", [place])
    assert not holder.done()
    await world.kernel.take_mounts("a", [place], numbers)
    assert (await holder).signal == 9


async def test_users_of_a_volume_that_has_the_number_of_one_that_is_gone_go_on(
    world: World,
) -> None:
    place = await with_place(world)
    await world.kernel.lend_mount("a", volume(place))
    numbers = await world.kernel.volumes("a", [place])
    user = asyncio.create_task(
        world.shell(
            "cd /run/dsec/actions/data; echo >/held; while [ ! -e /done ]; do sleep 0.1; done"
        )
    )
    await world.say("while [ ! -e /held ]; do sleep 0.02; done")
    await world.kernel.take_mounts("a", [place.parent / "earlier"], numbers)
    await world.say("touch /done")
    assert (await user).exit_code == 0


@pytest.mark.parametrize("trick", ["ln -s /proc /run", "mkdir -p /run/dsec/actions/data"])
async def test_nothing_is_mounted_elsewhere_when_root_inside_has_moved_the_place(
    world: World, trick: str
) -> None:
    place = await with_place(world)
    await world.say(f"mv /run /elsewhere && {trick}")
    with pytest.raises(DsecError):
        await world.kernel.lend_mount("a", volume(place))
    assert "dsec-volume" not in await world.say("cat /proc/mounts")


async def test_an_adopted_sandbox_is_lent_to_and_taken_from(world: World) -> None:
    await world.create()
    os.kill(world.kernel._spawner.pid, 9)  # type: ignore[union-attr]
    with pytest.raises(DsecError):
        await world.kernel.lend_devices("a", [CARD])
    await world.kernel.lend_devices("a", [CARD])
    assert await world.say("head -c 1 /dev/nvidia0 | wc -c") == "1"


async def test_nothing_is_lent_to_a_sandbox_that_is_not_there(world: World) -> None:
    with pytest.raises(DsecError) as caught:
        await world.kernel.lend_devices("a", [CARD])
    assert caught.value.code is ErrorCode.NOT_FOUND
    await world.kernel.take_devices("a", [CARD])
    await world.kernel.take_mounts("a", [world.directory / "no" / "place"])


async def test_a_killed_command_is_not_needed_for_a_device_to_come_back(world: World) -> None:
    await world.create()
    await world.kernel.lend_devices("a", [CARD])
    spec = CommandSpec(argv=("/bin/sh", "-c", "setsid sleep 60 </dev/nvidia0 & exit 0"))
    assert (await world.kernel.exec("a", spec)).exit_code == 0
    await world.kernel.take_devices("a", [CARD])
    assert await world.say("cat /proc/[0-9]*/comm | grep -c sleep || true") == "0"
