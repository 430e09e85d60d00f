"""Images of trees with holes: what is in them comes back, what is not costs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.layer_copies import LayerCopy
from dsec_sandboxd.snapshot_image import pack_image
from dsec_sandboxd.sparse_image import chunk_bits
from kernel_world import MIB, World
from snapshot_world import describe, restore, take

GIB = 1 << 30
ROOTS = ("/srv", "/work", "/etc", "/root", "/tmp")

#: Everything that a writable layer can hold, beside a file with holes.
EVERYTHING = r"""
import os, random, shutil, socket, struct
os.makedirs("/srv/many"); os.chdir("/srv")
with open("holes", "wb") as f:
    f.truncate(48 << 20); f.seek(5 << 20); f.write(b"middle" * 3000)
    f.seek(48 << 20); f.write(b"end")
with open("few-holes", "wb") as f:
    f.truncate(20000); f.seek(9000); f.write(b"here")
open("nothing", "w"); open("text", "w").write("text"); os.chmod("text", 0o4755)
open("large", "wb").write(random.Random(1).randbytes(3_000_001))
os.chown("text", 1000, 44); os.link("text", "second"); os.link("holes", "many/holes")
os.symlink("text", "link"); os.link("link", "link-again", follow_symlinks=False)
os.mkfifo("fifo"); socket.socket(socket.AF_UNIX).bind("socket")
for name in (b"!before", b".hidden", b"new\nline \xff", b"n" * 255):
    open(name, "wb").write(name)
for number in range(700): open(f"many/{number:x}-of-many-files", "w").write(str(number))
os.setxattr("text", "user.note", b"kept"); os.setxattr("many", "user.empty", b"")
os.setxattr("holes", "user.large", b"v" * 3000); os.setxattr("holes", "user.odd", b"odd")
os.setxattr("text", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))
acl = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *e) for e in
    [(1, 6, 0xffffffff), (2, 4, 1000), (4, 4, 0xffffffff), (16, 6, 0xffffffff),
     (32, 0, 0xffffffff)])
os.setxattr("large", "system.posix_acl_access", acl)
os.setxattr("many", "system.posix_acl_default", acl)
os.utime("text", ns=(1, 987654321123456789)); os.utime("many", ns=(5, 123456789))
deep = "/srv/deep"; os.mkdir(deep)
for _ in range(300): deep += "/d"; os.mkdir(deep)
open(deep + "/bottom", "w").write("bottom")
os.unlink("/work/code.txt"); os.unlink("/root/secret")
shutil.rmtree("/etc"); os.mkdir("/etc"); open("/etc/only", "w").write("this")
open("/work/both.txt", "a").write(" and more")
"""


#: Files with data in any places, and others between.
SCATTERED = r"""
import os, random, sys
chance = random.Random(sys.argv[1])
for number in range(12):
    with open(f"/srv/{number}", "wb") as file:
        size = chance.choice([1, 4097, 1 << 20, (5 << 20) + 1, 32 << 20])
        file.truncate(size)
        for _ in range(chance.choice([0, 1, 3, 30])):
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(chance.choice([1, 4096, 9000])))
    if chance.random() < 0.3: os.link(f"/srv/{number}", f"/srv/{number}-again")
with open("/srv/last", "wb") as file: file.truncate(64 << 20)
"""
DATA_BYTES = r"""
import os
found = 0
for name in os.listdir("/srv"):
    descriptor, at = os.open("/srv/" + name, os.O_RDONLY), 0
    while True:
        try: begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError: break
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        found += at - begin
print(found)
"""


@pytest.fixture
async def image(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.erofs"


@pytest.fixture
async def made(world: World) -> World:
    await world.create()
    await world.say("mkdir -p /srv")
    return world


async def pack(copy: LayerCopy, image: Path) -> int:
    """Pack a copy and let go of it; return the image's size."""
    try:
        return await pack_image(
            copy.mount_fd,
            image,
            size_bytes=copy.size_bytes,
            inodes=copy.inodes,
            hole_bytes=copy.hole_bytes,
        )
    finally:
        os.close(copy.mount_fd)


def disk_bytes(image: Path) -> int:
    return image.stat().st_blocks * 512


async def restored(world: World, image: Path, **changes: object) -> None:
    """Have the sandbox ``b`` start from an image."""
    await world.kernel.hold_layer("s", image)
    await restore(world, "b", "s", **changes)


async def test_everything_beside_a_file_with_holes_comes_back(made: World, image: Path) -> None:
    await made.say("rm -r /srv")
    await made.python(EVERYTHING)
    before = await describe(made, *ROOTS)
    copy = await take(made)
    assert 40 * MIB < copy.hole_bytes < 48 * MIB
    await pack(copy, image)
    assert disk_bytes(image) < 12 * MIB
    await restored(made, image)
    assert await describe(made, *ROOTS, local="b") == before
    assert await made.say("test -e /work/code.txt || echo gone", local="b") == "gone"
    # The image is a layer like any other: a copy folds it in.
    folded = await take(made, "b", fold=("s",))
    assert 40 * MIB < folded.hole_bytes < 48 * MIB
    await made.kernel.destroy("b")
    await made.kernel.release_layer("s")
    os.unlink(image)  # noqa: PTH108
    await pack(folded, image)
    await restored(made, image)
    assert await describe(made, *ROOTS, local="b") == before
    await made.kernel.destroy("b")
    await made.kernel.release_layer("s")


@pytest.mark.parametrize("seed", range(3))
async def test_holes_in_any_places_come_back(made: World, image: Path, seed: int) -> None:
    await made.run("python3", "-c", SCATTERED, str(seed))
    before = await describe(made, "/srv")
    copy = await take(made)
    assert copy.hole_bytes > 64 * MIB
    await pack(copy, image)
    await restored(made, image)
    assert await describe(made, "/srv", local="b") == before
    # Programs that look for them find holes, and no more data than a chunk around each.
    found = int(await made.python(DATA_BYTES, local="b"))
    assert found < copy.hole_bytes // 4
    await made.kernel.destroy("b")
    await made.kernel.release_layer("s")


async def test_terabytes_of_holes_are_packed_as_what_is_in_them(made: World, image: Path) -> None:
    await made.say("cd /srv; for i in 1 2 3 4; do truncate -s 1T $i; echo end >> $i; done")
    copy = await take(made)
    assert copy.hole_bytes > 4000 * GIB
    await pack(copy, image)
    assert disk_bytes(image) < 8 * MIB
    await restored(made, image)
    said = await made.say("tail -c 4 /srv/3; stat -c %s /srv/3", local="b")
    assert said == f"end\n{(1 << 40) + 4}"
    await made.kernel.destroy("b")
    await made.kernel.release_layer("s")


async def test_a_file_with_holes_is_changed_where_it_would_not_fit_without(
    made: World, image: Path
) -> None:
    await made.say("truncate -s 2G /srv/holes; echo end >> /srv/holes")
    await pack(await take(made), image)
    await restored(made, image)
    await made.say("echo more >> /srv/holes", local="b")  # it has a disk of 32 MiB
    assert await made.say("tail -c 9 /srv/holes", local="b") == "end\nmore"
    assert int(await made.say("stat -c %b /srv/holes", local="b")) <= 32
    await made.kernel.destroy("b")
    await made.kernel.release_layer("s")


async def test_holes_that_make_the_image_absurd_are_refused(made: World, image: Path) -> None:
    await made.python(
        "with open('/srv/holes', 'wb') as f:\n"
        "    for at in range(1000):\n"
        "        f.seek(at << 50); f.write(b'x')\n"
    )
    with pytest.raises(DsecError) as refused:
        await pack(await take(made), image)
    assert refused.value.code is ErrorCode.EXHAUSTED
    assert not list(image.parent.glob("snapshot.*"))


def test_the_size_of_chunks_follows_what_is_in_a_file() -> None:
    assert chunk_bits(1 << 20, [(0, 1 << 19)]) == 19
    scattered = [(at, at + 4096) for at in range(0, 64 << 20, 1 << 16)]
    assert chunk_bits(64 << 20, scattered) == 12
    assert chunk_bits(1 << 50, [(0, 4096)]) > 20
