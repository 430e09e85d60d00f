"""Whole trees into and out of a real sandbox."""

from __future__ import annotations

import asyncio
import os
import tarfile
import time
from collections.abc import Callable

import pytest

from dsec_common.errors import ErrorCode
from kernel_world import MIB, World
from refusals import refused
from trees import archive, member, members_of, pack, tolerant, unpack


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_a_tree_goes_in_and_comes_out_as_it_was(world: World, form: int) -> None:
    await world.create()
    long = "long/" + "n" * 90 + "/" + "f" * 60
    data = archive(
        (member("empty", tarfile.DIRTYPE, mode=0o711), b""),
        (member("closed", tarfile.DIRTYPE, mode=0o555), b""),
        (member("closed/file", mtime=1_600_000_000), b"in a closed directory"),
        (member("script", mode=0o755), b"#!/bin/sh\n"),
        (member("hard", tarfile.LNKTYPE, linkname="script"), b""),
        (member("link", tarfile.SYMTYPE, linkname="../../outside"), b""),
        (member(long), b"deep"),
        (member("big"), os.urandom(3 * MIB)),
        (member("nothing"), b""),
        form=form,
    )
    count = await unpack(world, "/tmp/in", data)
    assert count.entries == 9
    assert await world.say("stat -c '%a %h' /tmp/in/script") == "755 2"
    assert await world.say("stat -c %Y /tmp/in/closed/file") == "1600000000"
    found = members_of(await pack(world, "/tmp/in"))
    expected = members_of(data)
    expected["hard"] = (tarfile.REGTYPE, 0o755, b"#!/bin/sh\n")
    expected["link"] = (tarfile.SYMTYPE, 0o777, "../../outside")
    for path in ("long", long.rpartition("/")[0]):
        expected[path] = (tarfile.DIRTYPE, 0o755, "")
    assert found == expected


async def test_names_of_any_bytes_and_any_length_survive(world: World) -> None:
    await world.create()
    name = "/".join(["ü" * 100, "b" * 255, "\udcff\n"])
    await unpack(world, "/tmp/in", archive((member(name), b"x"), form=tarfile.GNU_FORMAT))
    assert members_of(await pack(world, "/tmp/in"))[name][2] == b"x"


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../escape", "a/../../escape", "..", "link/inside", "hard"]
)
async def test_an_archive_cannot_leave_its_directory(world: World, name: str) -> None:
    await world.create()
    before = await world.say("ls -lA /tmp/ /etc; cat /etc/passwd")
    kind = tarfile.LNKTYPE if name == "hard" else tarfile.REGTYPE
    data = archive(
        (member("link", tarfile.SYMTYPE, linkname="/etc"), b""),
        (member(name, kind, linkname="../../etc/passwd"), b"" if name == "hard" else b"evil"),
    )
    error = await refused(unpack(world, "/tmp/in", data))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "invalid_path")
    await world.kernel.remove_tree("a", "/tmp/in")
    assert await world.say("ls -lA /tmp/ /etc; cat /etc/passwd") == before


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
async def test_an_archive_holds_no_devices(world: World, kind: bytes) -> None:
    await world.create()
    error = await refused(unpack(world, "/tmp/in", archive((member("null", kind), b""))))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "invalid_archive")
    assert error.details["path"] == "/tmp/in/null"


async def test_set_id_bits_are_kept_only_if_asked_for(world: World) -> None:
    await world.create()
    data = archive((member("su", mode=0o6755), b"x"))
    await unpack(world, "/tmp/plain", data)
    await unpack(world, "/tmp/kept", data, keep_set_id=True)
    assert await world.say("stat -c %a /tmp/plain/su /tmp/kept/su") == "755\n6755"


@pytest.mark.parametrize(
    "broken",
    [
        lambda data: data[:1000],
        lambda data: data[:512],
        lambda _: b"",
        lambda _: b"\x01" * 4096,
        lambda data: data[:100] + b"\xff" * 30 + data[130:],
    ],
)
async def test_what_is_no_whole_archive_is_refused(
    world: World, broken: Callable[[bytes], bytes]
) -> None:
    await world.create()
    data = broken(archive((member("one"), b"x" * 2000)))
    error = await refused(unpack(world, "/tmp/in", data))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "invalid_archive")


async def test_a_tree_replaces_files_and_links_but_no_directory(world: World) -> None:
    await world.create()
    await world.say("mkdir -p /tmp/in/dir/sub; echo old > /tmp/in/file; ln -s /etc /tmp/in/link")
    data = archive(
        (member("dir", tarfile.DIRTYPE), b""), (member("file"), b"new"), (member("link"), b"plain")
    )
    await unpack(world, "/tmp/in", data)
    assert await world.say("cat /tmp/in/file /tmp/in/link; ls -A /tmp/in") == (
        "newplaindir\nfile\nlink"
    )
    error = await refused(unpack(world, "/tmp/in", archive((member("dir"), b"x"))))
    assert error.details["reason"] == "is_directory"
    error = await refused(unpack(world, "/tmp/in", archive((member("file/x"), b"x"))))
    assert error.code is ErrorCode.NOT_FOUND


async def test_holes_stay_holes(world: World) -> None:
    await world.create(disk_bytes=4 * MIB)
    data = archive((member("sparse"), b"head" + bytes(32 * MIB) + b"tail" + bytes(8192)))
    await unpack(world, "/tmp/in", data)
    assert await world.say("stat -c %s /tmp/in/sparse") == str(32 * MIB + 8 + 8192)
    assert members_of(await pack(world, "/tmp/in"))["sparse"][2] == members_of(data)["sparse"][2]


async def test_a_full_disk_ends_a_tree_with_the_name_of_the_file(world: World) -> None:
    await world.create(disk_bytes=4 * MIB)
    data = archive((member("small"), b"x"), (member("large"), os.urandom(8 * MIB)))
    error = await refused(unpack(world, "/tmp/in", data))
    assert (error.code, error.details["path"]) == (ErrorCode.EXHAUSTED, "/tmp/in/large")
    assert await world.say("ls -A /tmp/in") == "small"


async def test_links_planted_while_a_tree_arrives_lead_nowhere(world: World) -> None:
    """The attacker replaces directories of the tree by links to where only root may write."""
    await world.create(inodes=20_000, disk_bytes=64 * MIB)
    await world.say("mkdir /tmp/in /root/safe; chown 1000:1000 /tmp/in")
    attack = asyncio.create_task(
        world.python(
            "import os, time\nend = time.time() + 3\ni = 0\n"
            "while time.time() < end:\n    i += 1\n    d = f'/tmp/in/d{i % 4}'\n    try:\n"
            "        os.rename(d, f'/tmp/in/moved{i}')\n"
            "    except OSError: pass\n    try:\n"
            "        os.symlink('/root/safe', d); os.unlink(d)\n"
            "    except OSError: pass",
            user="dev",
        )
    )
    data = archive(*((member(f"d{i % 4}/f{i}"), b"x" * 100) for i in range(400)))
    while not attack.done():
        await tolerant(unpack(world, "/tmp/in", data))
    await attack
    assert await world.say("ls -A /root/safe") == ""


async def test_a_tree_is_read_as_its_user_may(world: World) -> None:
    await world.create()
    await world.say("mkdir -m 755 /tmp/t; echo x > /tmp/t/a; chmod 600 /tmp/t/a")
    error = await refused(pack(world, "/tmp/t", user="dev"))
    assert (error.code, error.details["path"]) == (ErrorCode.DENIED, "/tmp/t/a")
    assert (await refused(pack(world, "/tmp/absent"))).code is ErrorCode.NOT_FOUND
    assert (await refused(pack(world, "/tmp/t/a"))).code is ErrorCode.NOT_FOUND
    assert (await refused(pack(world, "/proc"))).details["reason"] == "not_a_file"
    await world.say("ln -s / /tmp/t/root; mkfifo /tmp/t/pipe; chmod 644 /tmp/t/a")
    assert sorted(members_of(await pack(world, "/tmp/t", user="dev"))) == ["a", "root"]


async def _pack_while(world: World, line: str) -> bytes:
    """Pack a directory whose file is larger than what waits on the way; run a line meanwhile."""
    await world.create(disk_bytes=48 * MIB)
    await world.say("mkdir /tmp/t; yes 'a line of a log' | head -c 16777217 > /tmp/t/file")
    with await world.kernel.pack_tree("a", "/tmp/t") as source:
        pieces = [await source.receive()]
        await world.say(line)
        while piece := await source.receive():
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("line", ["yes more | head -c 100000 >> /tmp/t/file", "touch /tmp/t/file"])
async def test_a_file_that_grows_while_it_is_packed_is_as_long_as_it_was(
    world: World, line: str
) -> None:
    content = members_of(await _pack_while(world, line))["file"][2]
    assert content == (b"a line of a log\n" * (1 + MIB))[: 16 * MIB + 1]


@pytest.mark.parametrize(
    "line",
    [
        ": > /tmp/t/file",
        "truncate -s -1 /tmp/t/file",
        "printf x | dd of=/tmp/t/file conv=notrunc",
        "printf x | dd of=/tmp/t/file conv=notrunc; echo more >> /tmp/t/file",
        "yes 'a line of another' | head -c 20000000 > /tmp/t/file",
    ],
)
async def test_a_file_that_changes_otherwise_while_it_is_packed_is_a_conflict(
    world: World, line: str
) -> None:
    error = await refused(_pack_while(world, line))
    assert (error.code, error.details["path"]) == (ErrorCode.CONFLICT, "/tmp/t/file")


async def test_ten_thousand_small_files_take_seconds(world: World) -> None:
    await world.create(inodes=30_000, disk_bytes=96 * MIB, memory_bytes=256 * MIB)
    data = archive(*((member(f"d{i // 100}/f{i}"), b"%01024d" % i) for i in range(10_000)))
    started_at = time.perf_counter()
    count = await unpack(world, "/tmp/in", data)
    unpacked_s = time.perf_counter() - started_at
    assert (count.entries, count.content_bytes) == (10_000, 10_240_000)
    started_at = time.perf_counter()
    out = await pack(world, "/tmp/in")
    packed_s = time.perf_counter() - started_at
    print(f"10,000 files: in {unpacked_s:.2f} s, out {packed_s:.2f} s")  # noqa: T201  for -s
    assert len(members_of(out)) == 10_100
    assert unpacked_s + packed_s < 20
