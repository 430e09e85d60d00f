"""Snapshots of writable layers by the real kernel: what comes back is what was there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandSpec
from dsec_sandboxd.kernel.layer_copies import LayerCopy
from kernel_world import MIB, World
from snapshot_world import describe, held, keep, restore, take

ROOTS = ("/work", "/tmp", "/root", "/home", "/etc", "/srv")

#: Everything that a writable layer can hold.
EVERYTHING = r"""
import ctypes, os, socket, struct
os.chdir("/srv")
open("plain", "w").write("text"); os.chmod("plain", 0o4755)
open("of-dev", "w").write("x"); os.chown("of-dev", 1000, 44)
os.link("plain", "second"); os.mkdir("dir"); os.link("plain", "dir/third")
os.symlink("plain", "link"); os.symlink("/nowhere", "dangling")
os.link("link", "link-again", follow_symlinks=False)
os.mkfifo("fifo"); os.chmod("fifo", 0o640)
server = socket.socket(socket.AF_UNIX); server.bind("socket")
with open("sparse", "wb") as f:
    f.truncate(256 << 20); f.seek(100 << 20); f.write(b"middle")
open("new\nline \xff".encode("utf-8", "surrogateescape"), "w").write("odd")
os.setxattr("plain", "user.note", b"kept"); os.setxattr("dir", "user.dir", b"kept, too")
cap = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
open("capable", "w").write("#!"); os.setxattr("capable", "security.capability", cap)
acl = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *e) for e in
    [(1, 6, 0xffffffff), (2, 4, 1000), (4, 4, 0xffffffff), (16, 6, 0xffffffff),
     (32, 0, 0xffffffff)])
os.setxattr("of-dev", "system.posix_acl_access", acl)
os.utime("plain", ns=(1, 987654321123456789)); os.utime("dir", ns=(5, 123456789))
os.chmod("/tmp", 0o700); os.chmod("/run", 0o711)
# whiteouts and an opaque directory
os.unlink("/work/code.txt"); os.unlink("/root/secret")
import shutil; shutil.rmtree("/etc"); os.mkdir("/etc"); open("/etc/only", "w").write("this")
open("/work/both.txt", "a").write(" and more")
"""


async def test_everything_that_a_writable_layer_can_hold_comes_back(world: World) -> None:
    await world.create()
    await world.say("mkdir -p /srv")
    await world.python(EVERYTHING)
    before = await describe(world, *ROOTS)
    copy = await take(world)
    assert copy.size_bytes < 2 * MIB
    assert 255 * MIB < copy.hole_bytes < 256 * MIB
    async with held(world, "s", copy):
        await restore(world, "b", "s")
        assert await describe(world, *ROOTS, local="b") == before
        # The original has no part in it any more.
        await world.kernel.destroy("a")
        assert await describe(world, *ROOTS, local="b") == before
        assert await world.say("test -e /work/code.txt || echo gone", local="b") == "gone"
        assert await world.say("stat -c %b /srv/sparse", local="b") == "8"
        assert await world.say("stat -c %a /run", local="b") == "711"
        await world.kernel.destroy("b")


async def test_a_snapshot_never_changes(world: World) -> None:
    await world.create()
    await world.say("echo one > /tmp/x; mkdir /tmp/d; echo keep > /tmp/d/y")
    async with held(world, "s", await take(world)):
        await world.say("echo two > /tmp/x; rm -r /tmp/d")
        await restore(world, "b", "s")
        await world.say("echo three > /tmp/x; rm /tmp/d/y", local="b")
        await restore(world, "c", "s")
        assert await world.say("cat /tmp/x /tmp/d/y", local="c") == "one\nkeep"
        for local in ("b", "c"):
            await world.kernel.destroy(local)


async def test_a_deleted_tmp_stays_deleted(world: World) -> None:
    await world.create()
    await world.say("rmdir /tmp")
    async with held(world, "s", await take(world)):
        await restore(world, "b", "s")
        assert await world.say("test -e /tmp || echo none; ls /dev/null /proc/1 -d", local="b")
        assert (await world.say("test -e /tmp || echo none", local="b")) == "none"
        await world.kernel.destroy("b")


async def test_a_link_in_place_of_a_mount_point_leads_nowhere(world: World) -> None:
    await world.create()
    await world.say("mv /run /moved && ln -s /etc /run")
    async with held(world, "s", await take(world)):
        await restore(world, "b", "s")
        assert "passwd" not in await world.say("ls /run", local="b")
        await world.kernel.destroy("b")


async def test_running_writers_see_no_difference_and_the_copy_is_of_one_moment(
    world: World,
) -> None:
    await world.create()
    writer = asyncio.ensure_future(
        world.python(
            "import os,time\n"
            "end=time.monotonic()+2\nn=0\n"
            "while time.monotonic()<end:\n"
            " n+=1\n"
            " open('/tmp/first','w').write(str(n)); open('/tmp/second','w').write(str(n))\n"
            " if n==1: open('/tmp/begun','w').close()\n"
            "print(n)",
            timeout_s=30.0,
        )
    )
    while (await world.shell("test -e /tmp/begun")).exit_code:
        pass
    for number in range(5):
        async with held(world, "s", await take(world)):
            await restore(world, f"b{number}", "s")
            text = await world.say("cat /tmp/first; echo; cat /tmp/second", local=f"b{number}")
            await world.kernel.destroy(f"b{number}")
        first, _, second = text.partition("\n")
        # The second is as far as the first, or empty or one behind: never further.
        assert int(second or first) - int(first or second) in {0, -1}
    assert int(await writer) > 10


async def test_a_fold_hides_what_its_layers_hid(world: World) -> None:
    await world.create()
    await world.say(
        "mkdir -p /srv/a /srv/b; echo 1 > /srv/a/x; echo 1 > /srv/b/x; echo 1 > /srv/f; "
        "echo 1 > /work/code.txt; ln /srv/f /srv/f2; mkdir /srv/g; echo 1 > /srv/g/low"
    )
    await keep(world, "s1", await take(world))
    await restore(world, "b", "s1")
    await world.say(
        "rm -r /srv/a; mkdir /srv/a; echo 2 > /srv/a/y; rm -r /srv/b; echo file > /srv/b; "
        "rm /srv/f; mkdir /srv/f; echo 2 > /srv/f/in; rm /work/code.txt; rm /root/secret; "
        "echo 2 > /srv/g/high; rm -r /home/dev",
        local="b",
    )
    await keep(world, "s2", await take(world, "b"))
    await restore(world, "c", "s1", "s2")
    await world.say("rm /srv/a/y; echo 3 > /root/secret; rm -r /srv/f; echo 3 > /srv/f", local="c")
    before = await describe(world, *ROOTS, local="c")
    chain = await take(world, "c")
    whole = await take(world, "c", fold=("s2", "s1"))
    await keep(world, "s3", chain)
    await keep(world, "folded", whole)
    await restore(world, "d", "s1", "s2", "s3")
    await restore(world, "e", "folded")
    assert await describe(world, *ROOTS, local="d") == before
    assert await describe(world, *ROOTS, local="e") == before
    alone = await world.kernel.fold(("s3", "s2", "s1"), size_bytes=64 * MIB, inodes=10_000)
    await keep(world, "alone", alone)
    await restore(world, "f", "alone")
    assert await describe(world, *ROOTS, local="f") == before


async def test_a_copy_that_does_not_fit_is_refused_and_the_sandbox_runs_on(world: World) -> None:
    await world.create()
    await world.say("dd if=/dev/urandom of=/tmp/big bs=1M count=4 2>/dev/null")
    await world.say("cd /tmp; seq 50 | while read n; do : > $n; done")
    for size_bytes, inodes in ((MIB, 65_536), (64 * MIB, 2)):
        with pytest.raises(DsecError) as caught:
            await take(world, size_bytes=size_bytes, inodes=inodes)
        assert caught.value.code is ErrorCode.EXHAUSTED
        assert caught.value.details["reason"] == "snapshot_room"
        assert await world.say("echo runs") == "runs"
    os.close((await take(world)).mount_fd)


async def test_directories_too_deep_to_be_named_are_refused(world: World) -> None:
    await world.create(inodes=20_000)
    await world.python(
        "import os\nos.chdir('/tmp')\nfor _ in range(3000):\n os.mkdir('deep'); os.chdir('deep')"
    )
    with pytest.raises(DsecError) as caught:
        await take(world)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.details["reason"] == "too_deep"
    assert await world.say("echo runs") == "runs"


async def test_a_hostile_tree_hinders_nobody(world: World) -> None:
    await world.create(inodes=400_000, memory_bytes=512 * MIB, disk_bytes=256 * MIB)
    await world.create("b")
    await world.python(
        "import os\nos.chdir('/tmp')\n"
        "open('f','w').close()\n"
        "for i in range(20000): os.link('f', f'l{i}')\n"
        "for i in range(60000): open(f'n{i}','w').close()\n"
        "for i in range(50):\n"
        " f=open(f's{i}','wb'); f.truncate(1<<40); f.seek((1<<40)-1); f.write(b'x')\n",
        timeout_s=120.0,
    )
    copying = asyncio.ensure_future(take(world, size_bytes=256 * MIB, inodes=500_000))
    await asyncio.sleep(0)
    answered = 0
    while not copying.done():
        assert await world.say("echo ok", local="b") == "ok"
        await world.create("c")
        await world.kernel.destroy("c")
        answered += 1
    copy = await copying
    os.close(copy.mount_fd)
    assert answered > 0
    assert copy.inodes > 80_000
    assert await world.say("echo runs") == "runs"


async def test_snapshots_of_one_sandbox_at_once_each_are_whole(world: World) -> None:
    await world.create()
    await world.say("seq 10000 > /tmp/numbers")
    copies = await asyncio.gather(*(take(world) for _ in range(8)))
    assert len({copy.size_bytes for copy in copies}) == 1
    for copy in copies:
        os.close(copy.mount_fd)
    assert await world.say("echo runs") == "runs"


async def test_a_cancelled_snapshot_leaves_a_running_sandbox_and_no_descriptor(
    world: World,
) -> None:
    await world.create()
    await world.say("dd if=/dev/zero of=/tmp/big bs=1M count=16 2>/dev/null")
    os.close((await take(world)).mount_fd)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  counted, not used
    for _ in range(5):
        taking = asyncio.ensure_future(take(world))
        await asyncio.sleep(0.002)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    os.close((await take(world)).mount_fd)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  as above
    assert await world.say("echo runs") == "runs"


def helpers_of(spawner: int) -> list[int]:
    """Return the processes that copy for a spawner."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208  the kernel's own
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:  # noqa: PTH123  as above
                    name = file.read().partition("(")[2].rpartition(")")[0]
                with open(f"/proc/{entry}/status") as file:  # noqa: PTH123  as above
                    parent = next(line for line in file if line.startswith("PPid:"))
            except OSError:
                continue
            if name == "dsec-snapshot" and int(parent.split()[1]) == spawner:
                found.append(int(entry))
    return found


async def big_and_taking(world: World) -> tuple[asyncio.Future[LayerCopy], int, list[int]]:
    """Begin a snapshot that takes a while; return it, the spawner and the helper."""
    await world.create(memory_bytes=1024 * MIB, disk_bytes=900 * MIB)
    await world.say("dd if=/dev/zero of=/tmp/big bs=1M count=700 2>/dev/null", timeout_s=60.0)
    spawner = world.kernel._spawner
    assert spawner is not None
    taking = asyncio.ensure_future(take(world, size_bytes=900 * MIB))
    helpers: list[int] = []
    while not helpers and not taking.done():
        await asyncio.sleep(0.001)
        helpers = helpers_of(spawner.pid)
    while "1" not in (world.cgroup() / "cgroup.freeze").read_text() and not taking.done():
        await asyncio.sleep(0.001)
    return taking, spawner.pid, helpers


async def test_the_sandbox_runs_on_when_the_copying_process_is_killed(world: World) -> None:
    taking, _, helpers = await big_and_taking(world)
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DsecError) as caught:
        await taking
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert await world.say("echo runs") == "runs"
    assert (world.cgroup() / "cgroup.freeze").read_text().strip() == "0"


async def test_a_copy_that_takes_too_long_is_given_up_and_the_sandbox_runs_on(
    world: World,
) -> None:
    taking, _, helpers = await big_and_taking(world)
    assert len(helpers) == 1
    os.kill(helpers[0], signal.SIGSTOP)  # as on a host that has no time for it
    async with asyncio.timeout(30):
        while not is_pending(helpers[0], signal.SIGALRM):
            await asyncio.sleep(0.05)
    os.kill(helpers[0], signal.SIGCONT)
    with pytest.raises(DsecError) as caught:
        await taking
    assert caught.value.code is ErrorCode.TIMEOUT
    assert await world.say("echo runs on") == "runs on"
    os.close((await take(world, size_bytes=1024 * MIB)).mount_fd)


def is_pending(pid: int, number: int) -> bool:
    """Return whether a signal waits for a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    (pending,) = (line.split()[1] for line in text.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (number - 1) & 1)


async def test_the_sandbox_runs_on_when_the_spawner_is_killed_meanwhile(world: World) -> None:
    taking, spawner, _ = await big_and_taking(world)
    os.kill(spawner, signal.SIGKILL)
    with pytest.raises(DsecError) as caught:
        await taking
    assert caught.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}
    assert await world.say("echo runs") == "runs"
    assert helpers_of(spawner) == []


async def test_a_held_copy_outlives_the_spawner(world: World) -> None:
    await world.create()
    await world.say("echo kept > /tmp/x")
    await keep(world, "s", await take(world))
    spawner = world.kernel._spawner
    assert spawner is not None
    os.kill(spawner.pid, signal.SIGKILL)
    while spawner.alive:
        await asyncio.sleep(0.001)
    await restore(world, "b", "s")
    assert await world.say("cat /tmp/x", local="b") == "kept"


async def test_a_snapshot_of_what_is_not_there_is_not_found(world: World) -> None:
    with pytest.raises(DsecError) as caught:
        await take(world, "nobody")
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_command_that_runs_meanwhile_ends_as_ever(world: World) -> None:
    await world.create()
    running = asyncio.ensure_future(
        world.kernel.exec("a", CommandSpec(argv=("/bin/sh", "-c", "sleep 0.3; echo done")))
    )
    await asyncio.sleep(0.05)
    os.close((await take(world)).mount_fd)
    assert (await running).stdout == b"done\n"
