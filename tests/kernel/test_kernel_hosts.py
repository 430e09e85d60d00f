"""The sandbox's own host name resolves, without a network and whatever the layers say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_world import World, make_image
from snapshot_world import held, restore, take

ASK = (
    "import socket; name = socket.gethostname(); "
    "print(name, socket.gethostbyname(name), socket.gethostbyname('localhost'))"
)


def _layer(directory: Path, hosts: str) -> Path:
    tree = directory / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/hosts").write_text(hosts)
    return make_image(tree, directory / "hosts.erofs")


async def _create_over(world: World, image: Path, **changes: str) -> None:
    await world.kernel.hold_layer("hosts", image)
    try:
        await world.kernel.create(world.spec(layers=("base", "hosts"), **changes))
    finally:
        await world.kernel.release_layer("hosts")


async def test_a_sandboxs_own_name_resolves_and_what_listens_there_is_reached(
    world: World,
) -> None:
    await world.create(hostname="my-own-name")
    assert await world.python(ASK) == "my-own-name 127.0.1.1 127.0.0.1"
    listen = (
        "import socket; s = socket.create_server((socket.gethostname(), 0)); "
        "socket.create_connection(s.getsockname()).close(); print('ok')"
    )
    assert await world.python(listen) == "ok"


async def test_what_a_layer_says_of_hosts_stays(world: World, tmp_path: Path) -> None:
    image = _layer(tmp_path, "127.0.0.1 localhost\n10.0.0.7 database")
    await _create_over(world, image, hostname="mine")
    said = await world.say("cat /etc/hosts")
    assert said.splitlines() == [
        "127.0.0.1 localhost",
        "10.0.0.7 database",
        "127.0.1.1 mine\t# this sandbox",
    ]


async def test_the_name_of_the_sandbox_that_a_snapshot_was_of_goes(
    world: World, tmp_path: Path
) -> None:
    image = _layer(
        tmp_path, "127.0.0.1 localhost\n127.0.1.1 parent\t# this sandbox\n10.0.0.7 database\n"
    )
    await _create_over(world, image, hostname="child")
    said = await world.say("cat /etc/hosts")
    assert "parent" not in said
    assert said.count("# this sandbox") == 1
    assert "10.0.0.7 database" in said
    assert await world.python(ASK) == "child 127.0.1.1 127.0.0.1"


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "large", "no-etc"])
async def test_hosts_that_are_no_file_are_left_alone(
    world: World, tmp_path: Path, kind: str
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    if kind == "no-etc":
        (tree / "etc").symlink_to("/proc")
    else:
        (tree / "etc").mkdir()
    hosts = tree / "etc/hosts"
    if kind == "link":
        hosts.symlink_to("/root/target")
    elif kind == "pipe":
        os.mkfifo(hosts)
    elif kind == "directory":
        hosts.mkdir()
    elif kind == "large":
        hosts.write_text("# filler\n" * 10_000)
    await _create_over(world, make_image(tree, tmp_path / "hosts.erofs"), hostname="mine")
    assert await world.say("echo alive") == "alive"
    assert await world.say("ls /root/target 2>&1 || :") != "/root/target"
    if kind == "large":
        assert "this sandbox" not in await world.say("tail -n 1 /etc/hosts")


async def test_one_that_begins_with_a_snapshot_has_its_own_name_and_not_the_others(
    world: World,
) -> None:
    await world.create(hostname="parent")
    await world.say("echo 10.0.0.7 database >> /etc/hosts")
    async with held(world, "s", await take(world)):
        await restore(world, "b", "s", hostname="child")
        assert await world.python(ASK, local="b") == "child 127.0.1.1 127.0.0.1"
        said = await world.say("cat /etc/hosts", local="b")
        assert "10.0.0.7 database" in said
        assert "parent" not in said
        await world.kernel.destroy("b")
    await world.say("rm /etc/hosts")
    async with held(world, "s", await take(world)):
        await restore(world, "b", "s", hostname="child")
        assert await world.say("ls /etc/hosts 2>/dev/null || echo gone", local="b") == "gone"
        await world.kernel.destroy("b")
