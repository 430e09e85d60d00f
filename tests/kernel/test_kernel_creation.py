"""Sandboxes come to be, are apart from each other, and go away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import MIB, NODE, UNIFIED, World, cgroups_left, descriptors_of, read


async def test_a_sandbox_sees_its_layers_with_the_highest_on_top(world: World) -> None:
    await world.create()
    assert await world.say("cat /work/code.txt; echo; cat /work/both.txt") == (
        "from the workspace\nupper"
    )


async def test_two_sandboxes_do_not_see_each_others_files_or_processes(world: World) -> None:
    await world.create("a")
    await world.create("b")
    await world.say("echo mine > /work/mine; (sleep 100 >/dev/null 2>&1 &)", local="a")
    assert await world.say("ls /work", local="b") == "both.txt\ncode.txt"
    assert "sleep" not in await world.say("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", local="b")


async def test_layers_stay_unchanged_when_a_sandbox_writes_and_deletes(world: World) -> None:
    await world.create("a")
    await world.say("rm -r /work && mkdir /work && echo new > /work/both.txt")
    await world.create("b")
    assert await world.say("cat /work/both.txt", local="b") == "upper"


async def test_a_layer_cannot_redirect_the_mount_points_with_links(world: World) -> None:
    await world.create()
    assert (
        await world.say("readlink /proc/self/exe; ls -d /run/dsec")
        == "/usr/bin/readlink\n/run/dsec"
    )


async def test_the_run_directory_is_seen_read_only(world: World) -> None:
    run = world.directory / "run"
    run.mkdir()
    (run / "note").write_text("from the host")
    await world.create(run_directory=run)
    assert await world.say("cat /run/dsec/note") == "from the host"
    refused = await world.shell("echo no > /run/dsec/new")
    assert refused.exit_code != 0
    assert not (run / "new").exists()


async def test_sixteen_layers_are_possible_and_seventeen_are_refused(world: World) -> None:
    names = [f"more-{index}" for index in range(15)]
    for name in names:
        await world.kernel.hold_layer(name, world.layers.workspace)
    await world.create(layers=("base", *names))
    assert await world.say("cat /work/code.txt") == "from the workspace"
    with pytest.raises(DsecError) as caught:
        await world.create("b", layers=("base", "toolkit", *names))
    assert caught.value.code is ErrorCode.INVALID


async def test_a_living_sandbox_keeps_a_released_layer(world: World) -> None:
    await world.create()
    for digest in ("base", "workspace", "toolkit"):
        await world.kernel.release_layer(digest)
    assert await world.say("cat /work/code.txt") == "from the workspace"
    with pytest.raises(DsecError) as caught:
        await world.create("b")
    assert caught.value.code is ErrorCode.LAYER_ERROR


async def test_holding_a_layer_twice_changes_nothing(world: World) -> None:
    await world.kernel.hold_layer("base", world.layers.base)
    await world.create(layers=("base",))
    assert await world.say("echo fine") == "fine"


async def test_a_file_that_is_no_image_is_a_layer_error(world: World) -> None:
    wrong = world.directory / "wrong.erofs"
    wrong.write_bytes(b"not an image" * 1000)
    for path in (wrong, world.directory / "absent"):
        with pytest.raises(DsecError) as caught:
            await world.kernel.hold_layer("wrong", path)
        assert caught.value.code is ErrorCode.LAYER_ERROR


async def test_the_same_id_twice_is_a_conflict_and_leaves_the_first_alone(world: World) -> None:
    await world.create()
    with pytest.raises(DsecError) as caught:
        await world.create()
    assert caught.value.code is ErrorCode.CONFLICT
    assert await world.say("echo alive") == "alive"


@pytest.mark.parametrize(
    "changes",
    [
        {"local": ""},
        {"local": "../x"},
        {"local": "a.b"},
        {"local": "a*"},
        {"local": "a b"},
        {"local": "x" * 300},
        {"layers": ()},
        {"memory_bytes": 0},
        {"memory_bytes": -1},
        {"disk_bytes": 0},
        {"disk_bytes": 256 * MIB},
        {"inodes": 0},
        {"pids": 0},
        {"cpus": 0.0},
        {"cpus": float("nan")},
        {"hostname": "a\nb"},
        {"hostname": "x" * 64},
    ],
)
async def test_an_impossible_specification_is_invalid(
    world: World, changes: dict[str, Any]
) -> None:
    with pytest.raises(DsecError) as caught:
        await world.kernel.create(world.spec(**changes))
    assert caught.value.code is ErrorCode.INVALID


async def test_destroying_twice_or_the_unknown_is_fine(world: World) -> None:
    await world.create()
    await asyncio.gather(world.kernel.destroy("a"), world.kernel.destroy("a"))
    await world.kernel.destroy("a")
    await world.kernel.destroy("never-was")
    assert cgroups_left() == []
    with pytest.raises(DsecError) as caught:
        await world.say("true")
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_an_id_range_is_used_again_by_a_clean_sandbox(world: World) -> None:
    for _ in range(5):
        await world.create()
        assert await world.say("ls /tmp; echo x > /tmp/left; echo y > /dev/shm/left") == ""
        await world.kernel.destroy("a")


async def test_many_sandboxes_at_once_are_created_and_destroyed(world: World) -> None:
    names = [f"s{index}" for index in range(24)]
    await asyncio.gather(*(world.create(name) for name in names))
    said = await asyncio.gather(*(world.say(f"echo {name}", local=name) for name in names))
    assert said == names
    await asyncio.gather(*(world.kernel.destroy(name) for name in names))
    assert cgroups_left() == []


async def test_cancelling_a_creation_leaves_nothing(world: World) -> None:
    for turns in range(8):
        creating = asyncio.ensure_future(world.create())
        for _ in range(turns):
            await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert cgroups_left() == []
    await world.create()


async def test_two_daemons_on_one_host_use_different_ids(world: World) -> None:
    other = LinuxKernel(f"{NODE}-other")
    await other.start()
    try:
        await world.create()
        await other.hold_layer("base", world.layers.base)
        await other.create(world.spec(layers=("base",)))
        inits = [
            read(f"{UNIFIED}/dsec-{node}/a/cgroup.procs").split()[0]
            for node in (NODE, f"{NODE}-other")
        ]
        maps = [read(f"/proc/{init}/uid_map").split()[1] for init in inits]
        assert len(set(maps)) == 2
    finally:
        await other.close()


async def test_usage_tells_memory_processor_time_and_processes(world: World) -> None:
    await world.create()
    await world.say("head -c 8388608 /dev/zero > /tmp/file; (sleep 100 >/dev/null 2>&1 &)")
    usage = await world.kernel.usage("a")
    assert usage.memory_bytes >= 8 * MIB
    assert usage.memory_peak_bytes >= usage.memory_bytes
    assert usage.pids == 2
    assert usage.cpu_s > 0


async def test_the_descriptors_of_a_sandbox_are_few(world: World) -> None:
    await world.create("first")
    before = len(descriptors_of())
    for name in ("b", "c"):
        await world.create(name)
        await world.say("true", local=name)
    assert (len(descriptors_of()) - before) / 2 <= 6


async def test_a_second_daemon_of_the_same_name_is_refused_and_the_first_goes_on(
    world: World,
) -> None:
    await world.create()
    second = LinuxKernel(NODE)
    with pytest.raises(DsecError, match="another name") as caught:
        await second.start()
    assert caught.value.code is ErrorCode.CONFLICT
    await second.close()
    assert (await world.shell("echo alive")).stdout == b"alive\n"
