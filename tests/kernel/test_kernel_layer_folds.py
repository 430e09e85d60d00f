"""Folded layers by the real kernel: nobody inside a sandbox sees that neighbours became one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layer_folds import LayerFolds
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.erofs import read_superblock
from dsec_sandboxd.layers.folding import FoldRules
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.snapshot_image import pack_image
from kernel_world import World
from snapshot_world import describe, take

ROOTS = ("/srv", "/work", "/etc", "/root", "/home")

#: Does random things to /srv: what a layer can hold of a layer below, in any order.
RANDOM = r"""
import os, random, shutil, stat, sys
chance = random.Random(sys.argv[1])
os.makedirs("/srv", exist_ok=True)
def pick(want_directory):
    found = ["/srv"] if want_directory else []
    for directory, directories, files in os.walk("/srv"):
        found += [os.path.join(directory, n) for n in (directories if want_directory else files)]
    return chance.choice(sorted(found)) if found else None
def new(): return os.path.join(pick(True), chance.choice("abcdef") + chance.choice("12"))
def clear(path):
    if os.path.isdir(path) and not os.path.islink(path): shutil.rmtree(path)
    elif os.path.lexists(path): os.unlink(path)
def write():
    path = new(); clear(path)
    with open(path, "wb") as f: f.write(chance.randbytes(chance.choice([0, 5, 5000])))
    os.chmod(path, chance.choice([0o600, 0o644, 0o4755])); os.chown(path, 1000, 44)
def append():
    path = pick(False)
    if path and stat.S_ISREG(os.lstat(path).st_mode): open(path, "ab").write(b"more")
def mkdir():
    path = new()
    if not os.path.lexists(path): os.mkdir(path, 0o750)
def opaque():
    path = new(); clear(path); os.mkdir(path); open(path + "/only", "w").write("x")
def remove():
    path = pick(chance.random() < .4) or "/srv/none"
    if path != "/srv": clear(path)
def link():
    path, target = new(), pick(False)
    if target and not os.path.lexists(path): os.link(target, path, follow_symlinks=False)
def symlink():
    path = new(); clear(path); os.symlink(chance.choice(["/etc", "a1", "/nowhere"]), path)
def fifo():
    path = new(); clear(path); os.mkfifo(path, 0o640)
def attribute():
    path = pick(chance.random() < .5)
    if path and not os.path.islink(path) and not stat.S_ISFIFO(os.lstat(path).st_mode):
        os.setxattr(path, "user." + chance.choice("ab"), b"v%d" % chance.randrange(9))
def time():
    path = pick(chance.random() < .5)
    if path: os.utime(path, ns=(1, chance.randrange(1 << 60)), follow_symlinks=False)
def rename():
    source, path = pick(False), new()
    if source and not os.path.lexists(path): os.rename(source, path)
for _ in range(40):
    chance.choice([write, write, append, mkdir, mkdir, opaque, remove, remove, link, symlink, fifo,
                   attribute, time, rename])()
"""


class Stack:
    """A world whose layers are held by count, and the part that folds them."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.holds = LayerHolds(world.kernel, 64)
        self.folds = self.make_folds()
        self.layers = [
            self.layer(name, image, LayerKind.BASE if name == "base" else LayerKind.TOOLKIT)
            for name, image in world.layers.items()
        ]

    def make_folds(self, bytes_max: int = 1 << 30) -> LayerFolds:
        folds = LayerFolds(
            self.world.kernel,
            self.holds,
            self.directory / "folds",
            bytes_max=bytes_max,
            rules=FoldRules(above=2, small_bytes=512 << 20, small_entries=100_000),
            clock=SystemClock(),
        )
        folds.open()
        return folds

    def layer(self, digest: str, image: Path, kind: LayerKind) -> Layer:
        superblock = read_superblock(image)
        return Layer(
            project="default",
            name="x",
            version="1",
            digest=digest,
            kind=kind,
            size_bytes=image.stat().st_size,
            entries=superblock.inodes,
            created_at=0.0,
            source_digest="",
            image_path=image,
        )

    async def change(self, code: str, argument: str = "") -> Layer:
        """Make one more layer: what a program changes on those that are there."""
        await self.world.create("maker", layers=tuple(layer.digest for layer in self.layers))
        result = await self.world.run("python3", "-c", code, argument, local="maker")
        assert result.exit_code == 0, result.stderr.decode(errors="replace")
        copy = await take(self.world, "maker")
        image = self.directory / f"{len(self.layers)}.erofs"
        try:
            await pack_image(
                copy.mount_fd, image, size_bytes=copy.size_bytes, inodes=copy.inodes, hole_bytes=0
            )
        finally:
            os.close(copy.mount_fd)
        await self.world.kernel.destroy("maker")
        digest = f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}"
        layer = self.layer(digest, image, LayerKind.TOOLKIT)
        self.layers.append(layer)
        await self.holds.hold([(digest, image)])
        return layer

    async def seen(self, local: str, digests: list[str]) -> str:
        """Return what a sandbox of these layers sees."""
        await self.world.create(local, layers=tuple(digests))
        try:
            return await describe(self.world, *ROOTS, local=local)
        finally:
            await self.world.kernel.destroy(local)

    async def folded(self) -> list[str]:
        """Return what is mounted once folds are made."""
        await self.folds.mounts(self.layers, 0)
        await self.folds.settled()
        mounts = await self.folds.mounts(self.layers, 0)
        await self.holds.hold(mounts)
        return [digest for digest, _ in mounts]


@pytest.fixture
async def stack(world: World, tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack(world, tmp_path)
    yield made
    await made.folds.close()


@pytest.mark.parametrize("seed", range(8))
async def test_a_fold_of_layers_looks_like_the_layers(stack: Stack, seed: int) -> None:
    for number in range(4):
        await stack.change(RANDOM, f"{seed}-{number}")
    plain = [layer.digest for layer in stack.layers]
    folded = await stack.folded()
    assert len(plain) == 7
    assert len(folded) == 2
    assert await stack.seen("b", folded) == await stack.seen("a", plain)


async def test_the_first_sandbox_does_not_wait_for_a_fold(stack: Stack) -> None:
    await stack.change("open('/srv-file', 'w').write('x')")
    first = await stack.folds.mounts(stack.layers, 0)
    assert [digest for digest, _ in first] == [layer.digest for layer in stack.layers]
    await stack.folds.settled()
    assert len(await stack.folds.mounts(stack.layers, 0)) == 2


async def test_a_later_daemon_mounts_the_same_fold(stack: Stack) -> None:
    folded = await stack.folded()
    await stack.folds.close()
    stack.folds = stack.make_folds()
    # Hashed once more before its first use, which nobody waits for.
    assert len(await stack.folds.mounts(stack.layers, 0)) == 3
    await stack.folds.settled()
    made_at = [path.stat().st_ctime_ns for path in (stack.directory / "folds/images").iterdir()]
    assert [digest for digest, _ in await stack.folds.mounts(stack.layers, 0)] == folded
    assert len(made_at) == 1


async def test_a_damaged_fold_is_made_again(stack: Stack) -> None:
    folded = await stack.folded()
    await stack.folds.close()
    (image,) = (stack.directory / "folds/images").iterdir()
    image.chmod(0o600)
    with image.open("r+b") as file:
        file.seek(4096)
        file.write(b"damage")
    stack.folds = stack.make_folds()
    assert await stack.folded() == folded
    assert f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}" == folded[-1]


async def test_folds_have_room_of_their_own_and_none_that_is_used_goes(stack: Stack) -> None:
    await stack.folds.close()
    stack.folds = stack.make_folds(bytes_max=1000)
    assert len(await stack.folded()) == 3
    assert list((stack.directory / "folds/images").iterdir()) == []
    assert list((stack.directory / "folds/index").iterdir()) == []


async def test_what_a_crash_left_of_folds_goes_at_the_next_start(stack: Stack) -> None:
    folded = await stack.folded()
    await stack.folds.close()
    root = stack.directory / "folds"
    (root / "0.tree").mkdir()
    for name in ("0.draft", "0.part", "0.json", "index/torn.json", f"images/{'0' * 64}.erofs"):
        (root / name).write_bytes(b"half")
    stack.folds = stack.make_folds()
    assert sorted(path.name for path in root.iterdir()) == ["images", "index"]
    assert len(list((root / "index").iterdir())) == len(list((root / "images").iterdir())) == 1
    assert await stack.folded() == folded


async def test_folds_go_with_their_layers_and_stay_mounted_where_they_are(stack: Stack) -> None:
    folded = await stack.folded()
    await stack.world.create("a", layers=tuple(folded))
    images = {layer.digest: layer.image_path for layer in stack.layers}
    stack.folds.forget_absent(images.__getitem__)
    assert len(list((stack.directory / "folds/images").iterdir())) == 1
    images[stack.layers[-1].digest] = stack.directory / "gone"
    stack.folds.forget_absent(images.__getitem__)
    assert list((stack.directory / "folds/images").iterdir()) == []
    assert await stack.world.say("cat /work/both.txt") == "upper"
    await stack.world.kernel.destroy("a")


async def test_a_fold_that_cannot_be_made_leaves_the_layers_as_they_are(stack: Stack) -> None:
    gone = stack.directory / "gone.erofs"
    gone.write_bytes(stack.world.layers.toolkit.read_bytes())
    layer = stack.layer("sha256:" + "1" * 64, gone, LayerKind.TOOLKIT)
    gone.unlink()
    stack.layers.append(layer)
    await stack.folds.mounts(stack.layers, 0)
    await stack.folds.settled()
    assert len(await stack.folds.mounts(stack.layers, 0)) == 4
    # No second try at once, and a sandbox that needs the fold is told why there is none.
    with pytest.raises(DsecError):
        await stack.folds.mounts([*stack.layers], 14)
