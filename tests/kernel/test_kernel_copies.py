"""Copies inside a real sandbox: all that a tree can hold, and nothing beside it."""

from __future__ import annotations

import asyncio

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_ports import TreeCount
from kernel_world import World
from snapshot_world import describe

EVERYTHING = r"""
import os, socket
os.makedirs("/srv/t/dir/deep"); os.chdir("/srv/t")
open("plain", "w").write("text"); os.chmod("plain", 0o4755)
open("of-dev", "w").write("x"); os.chown("of-dev", 1000, 44)
os.link("plain", "second"); os.link("plain", "dir/deep/third")
os.symlink("plain", "link"); os.symlink("/etc/passwd", "outside")
os.mkfifo("fifo", 0o640)
socket.socket(socket.AF_UNIX).bind("socket")
with open("sparse", "wb") as f:
    f.truncate(64 << 30); f.seek(1 << 30); f.write(b"middle")
open("zeros", "wb").write(b"a" + bytes(100_000) + b"b" * 5000 + bytes(5000))
open("new\nline", "w").write("odd"); open("empty", "w")
os.setxattr("plain", "user.note", b"kept"); os.setxattr("dir", "user.dir", b"kept, too")
os.chmod("dir/deep", 0o1751); os.chown("dir", 1000, 1000)
os.utime("plain", ns=(1, 987654321123456789)); os.utime("dir", ns=(5, 123456789))
"""


async def test_a_copied_tree_has_all_that_the_tree_has(world: World) -> None:
    await world.create()
    await world.python(EVERYTHING)
    before = await describe_without_sparse(world, "/srv/t")
    count = await world.kernel.copy_path("a", "/srv/t", "/srv/copy")
    assert count.entries == 15
    assert await describe_without_sparse(world, "/srv/copy") == before
    assert await world.say("stat -c '%s %h' /srv/copy/sparse /srv/copy/plain") == (
        f"{64 << 30} 1\n4 3"
    )
    assert int(await world.say("stat -c %b /srv/copy/sparse")) <= 16
    assert await world.say("tail -c +1073741825 /srv/copy/sparse | head -c 6") == "middle"
    await world.kernel.destroy("a")


async def describe_without_sparse(world: World, root: str) -> str:
    await world.say(f"mv {root}/sparse /srv/aside")
    try:
        text = await describe(world, root)
    finally:
        await world.say(f"mv /srv/aside {root}/sparse")
    # The directory's own time changed by the moves.
    return "\n".join(text.replace(root, "").splitlines()[1:])


async def test_a_file_a_link_and_a_directory_of_a_layer_are_copied(world: World) -> None:
    await world.create()
    assert await world.kernel.copy_path("a", "/work", "/srv-work") == TreeCount(
        entries=3, content_bytes=23
    )
    assert await world.say("cat /srv-work/code.txt") == "from the workspace"
    await world.say("ln -s /etc/passwd /tmp/l")
    await world.kernel.copy_path("a", "/tmp/l", "/tmp/m")
    assert await world.say("readlink /tmp/m") == "/etc/passwd"
    await world.kernel.copy_path("a", "/work/both.txt", "/tmp/both")
    assert await world.say("cat /tmp/both") == "upper"
    await world.kernel.destroy("a")


@pytest.mark.parametrize(
    ("source", "target", "user", "code"),
    [
        ("/nothing", "/tmp/x", "0", ErrorCode.NOT_FOUND),
        ("/work", "/no/parent", "0", ErrorCode.NOT_FOUND),
        ("/work", "/etc/passwd", "0", ErrorCode.CONFLICT),
        ("/work", "/work/inside", "0", ErrorCode.INVALID),
        ("/proc/self/status", "/tmp/x", "0", ErrorCode.INVALID),
        ("/proc", "/tmp/x", "0", ErrorCode.INVALID),
        ("/dev/null", "/tmp/x", "0", ErrorCode.DENIED),
        ("/work", "/root/x", "1000", ErrorCode.DENIED),
        ("/root/secret", "/tmp/x", "1000", ErrorCode.DENIED),
        ("/", "/tmp/x", "0", ErrorCode.DENIED),
    ],
)
async def test_what_cannot_be_copied_is_said(
    world: World, source: str, target: str, user: str, code: ErrorCode
) -> None:
    await world.create()
    with pytest.raises(DsecError) as caught:
        await world.kernel.copy_path("a", source, target, user=user)
    assert caught.value.code is code, caught.value
    await world.kernel.destroy("a")


async def test_a_copy_for_another_user_keeps_no_power_of_the_owner(world: World) -> None:
    await world.create()
    await world.say("cp /bin/sh /tmp/sh && chmod 4755 /tmp/sh")
    await world.kernel.copy_path("a", "/tmp/sh", "/tmp/mine", user="1000")
    assert await world.say("stat -c '%a %u' /tmp/mine") == "755 1000"
    await world.kernel.destroy("a")


async def test_a_full_disk_ends_a_copy(world: World) -> None:
    await world.create()
    await world.say("head -c 20000000 /dev/urandom > /tmp/large")
    with pytest.raises(DsecError) as caught:
        await world.kernel.copy_path("a", "/tmp/large", "/tmp/again")
    assert caught.value.code is ErrorCode.EXHAUSTED
    await world.kernel.destroy("a")


async def test_a_cancelled_copy_ends_inside(world: World) -> None:
    await world.create(disk_bytes=256 << 20, memory_bytes=512 << 20)
    await world.say("head -c 100000000 /dev/urandom > /tmp/large")
    copying = asyncio.ensure_future(world.kernel.copy_path("a", "/tmp/large", "/tmp/again"))
    while (await world.shell("test -e /tmp/again")).exit_code:
        pass
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    async with asyncio.timeout(10.0):
        while len(world.pids()) > 1:
            await asyncio.sleep(0.01)
    await world.kernel.destroy("a")


async def test_a_large_file_is_copied_whole(world: World) -> None:
    await world.create(disk_bytes=256 << 20, memory_bytes=512 << 20)
    await world.say("head -c 50000001 /dev/urandom > /tmp/large")
    count = await world.kernel.copy_path("a", "/tmp/large", "/tmp/again")
    assert count.content_bytes == 50_000_001
    code = "import hashlib;print(*(hashlib.md5(open(p,'rb').read()).hexdigest() for p in %r))"
    first, second = (await world.python(code % (["/tmp/large", "/tmp/again"],))).split()
    assert first == second
    await world.kernel.destroy("a")
