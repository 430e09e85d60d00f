"""What comes in as a layer: hostile archives, repositories and images, tried in a sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attack_world import CALL, AttackWorld
from dsec.rootfs import build_host_rootfs
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import GitHistory, LayerKind
from dsec_sandboxd.layers import LayerStore
from dsec_sandboxd.layers.leaving_out import LeaveOut
from dsec_sandboxd.snapshot_residue import import_exclusion
from kernel_world import make_image, read_bytes
from layer_builders import (
    Member,
    directory_member,
    file_member,
    link_member,
    look,
    member,
    tar_bytes,
)

PROJECT = "default"
ANSWER = b"FIXED-AS-IN-THE-SOLUTION"


class Door(LayerStore):
    """A store beside a directory of the host that no import may touch."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "store")
        self.host = directory / "host"
        self.host.mkdir()
        (self.host / "file").write_bytes(b"the host's")
        self._source = directory / "source"
        self._before = look(self.host)

    async def take(self, source: bytes | Path, *, clean: bool = False) -> Path:
        """Import an archive's bytes or a directory; return the image that was made of it."""
        if isinstance(source, bytes):
            self._source.write_bytes(source)
            source = self._source
        leaving_out = (
            LeaveOut(paths=import_exclusion((), clean=True), git=GitHistory.CUT) if clean else None
        )
        outcome = await self.import_layer(
            PROJECT,
            "hostile",
            "1",
            source,
            kind=LayerKind.WORKSPACE,
            replace=True,
            leaving_out=leaving_out,
        )
        return outcome.layer.image_path

    async def refuse(self, source: bytes) -> None:
        """Assert that an archive becomes no layer."""
        with pytest.raises(DsecError) as caught:
            await self.take(source)
        assert caught.value.code is ErrorCode.LAYER_ERROR, caught.value
        assert await self.list(PROJECT) == ()

    def check_untouched(self) -> None:
        assert look(self.host) == self._before


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with Door(tmp_path) as opened:
        yield opened
        opened.check_untouched()


async def _create_with(arena: AttackWorld, image: Path, *more: str) -> None:
    """Create sandbox ``h``, whose topmost layer is the image."""
    await arena.kernel.hold_layer("hostile", image)
    await arena.create("h", layers=("base", "workspace", "attackers", *more, "hostile"))


async def test_an_archive_names_nothing_outside_its_layer(arena: AttackWorld, door: Door) -> None:
    out = str(door.host)
    up = "/".join([".."] * 24)
    climbing: list[list[Member]] = [
        [file_member(name)]
        for name in ("../host/new", "a/../../host/new", "..", f"{up}{out}/new", f"{out}/new")
    ]
    through: list[list[Member]] = [
        [link_member("a", target), last]
        for target in (out, "../host", f"{up}{out}")
        for last in (
            file_member("a/file", b"changed"),
            directory_member("a/new"),
            link_member("a/new", "/etc/shadow"),
            file_member("a/b/c", b"changed"),
        )
    ]
    linked: list[list[Member]] = [
        [link_member("a", target, hard=True)]
        for target in (f"{out}/file", "../host/file", f"{up}{out}/file", "/etc/shadow")
    ]
    twice: list[list[Member]] = [
        [link_member("a", out), link_member("b", "a/file", hard=True), file_member("b", b"changed")]
    ]
    for members in (*climbing, *through, *linked, *twice):
        await door.refuse(tar_bytes(members))
        door.check_untouched()
    # A link is content: it leads to whatever the sandbox has there.
    await _create_with(arena, await door.take(tar_bytes([link_member("out", f"{out}/file")])))
    assert (await arena.shell("cat /out", local="h")).exit_code != 0
    with pytest.raises(DsecError) as caught:
        await arena.read("h", "/out")
    assert caught.value.code is ErrorCode.NOT_FOUND
    await arena.write("h", "/work/kept.txt", b"its own")


async def test_an_archive_brings_no_device(arena: AttackWorld, door: Door) -> None:
    for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        await door.refuse(tar_bytes([member("dev/mem", kind, devmajor=1, devminor=1)]))
    # The number of a whiteout is refused, too: what it hides is for who packs a snapshot to say.
    await door.refuse(tar_bytes([member("etc", tarfile.CHRTYPE, devmajor=0, devminor=0)]))
    assert await arena.say("echo works") == "works"


async def test_an_archive_brings_no_set_id_program_and_no_attribute(
    arena: AttackWorld, door: Door
) -> None:
    program = read_bytes(arena.attack_programs / "whoami")
    forged = {
        "SCHILY.xattr.trusted.overlay.redirect": "/root",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.user.overlay.redirect": "/root",
        "SCHILY.xattr.security.capability": "\x01\x00\x00\x02" + "\xff" * 8 + "\x00" * 8,
    }
    image = await door.take(
        tar_bytes(
            [
                file_member("bin-of-root", program, mode=0o6755),
                file_member("able", program, mode=0o755, pax_headers=forged),
                directory_member("root-moved", mode=0o755, pax_headers=forged),
                directory_member("work", mode=0o755, pax_headers=forged),
            ]
        )
    )
    await _create_with(arena, image)
    said = await arena.python(
        "import os\n"
        "for path in ('/bin-of-root', '/able', '/root-moved', '/work'):\n"
        "    print(oct(os.lstat(path).st_mode & 0o6000), os.listxattr(path))",
        local="h",
    )
    assert said.splitlines() == ["0o0 []"] * 4
    for path in ("/bin-of-root", "/able"):
        assert await arena.say(path, local="h", user="dev") == "1000 1000"
    # A forged redirection shows nothing, and a forged opaque mark hides nothing.
    assert (await arena.shell("cat /root-moved/secret", local="h")).exit_code != 0
    assert await arena.say("cat /work/code.txt", local="h") == "from the workspace"


def _git(work: Path, *arguments: str) -> None:
    who = {
        f"GIT_{who}_{what}": "a@example.com"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=work,
        env={"PATH": os.defpath, "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null", **who},
        capture_output=True,
        check=True,
    )


def _checkout(tree: Path) -> None:
    """Make a checkout one commit behind the fix, which is packed, loose, stashed and in logs."""
    work = tree / "repository"
    work.mkdir(parents=True)
    _git(work, "init", "-q", "-b", "main")
    for number, content in enumerate((b"broken", ANSWER, ANSWER + b"-LOOSE")):
        (work / "code.py").write_bytes(content)
        _git(work, "add", "-A")
        _git(work, "commit", "-q", "-m", f"commit {number}: {content.decode()}")
        if number == 1:
            _git(work, "tag", "solved")
            _git(work, "repack", "-q", "-a", "-d")
    _git(work, "reset", "-q", "--hard", "HEAD~2")
    (work / "code.py").write_bytes(ANSWER + b"-STASHED")
    _git(work, "stash")


SEARCH = f"""
import os, subprocess
def git(*words):
    whole = ['git', '-c', 'safe.directory=*', '-C', '/repository', *words]
    return subprocess.run(whole, capture_output=True, env=dict(os.environ, HOME='/tmp'))
found, objects = set(), git('cat-file', '--batch-all-objects', '--batch-check').stdout.split(b'\\n')
for line in filter(None, objects):
    if {ANSWER!r} in git('cat-file', '-p', line.split()[0].decode()).stdout: found.add('object')
for where, _, names in os.walk('/repository'):
    for name in names:
        if {ANSWER!r} in open(os.path.join(where, name), 'rb').read(): found.add(name)
for words in (('log', '--all', '-p'), ('reflog',), ('stash', 'list', '-p'), ('show', 'solved')):
    if {ANSWER!r} in git(*words).stdout: found.add(words[0])
print(git('show', 'HEAD:code.py').stdout.decode(), sorted(found))
"""


async def test_the_history_of_a_repository_tells_nothing_of_the_fix(
    arena: AttackWorld, door: Door
) -> None:
    tree = arena.directory / "tree"
    _checkout(tree)
    tool = arena.directory / "git"
    build_host_rootfs(tool, programs=["git"])
    await arena.kernel.hold_layer("git", make_image(tool, arena.directory / "git.erofs"))
    for clean, expected in ((False, True), (True, False)):
        await _create_with(arena, await door.take(tree, clean=clean), "git")
        found = await arena.python(SEARCH, local="h")
        # The search is one that finds it, where the history is left in.
        assert ("object" in found and "show" in found) is expected, found
        if not expected:
            assert found == "broken []"
        await arena.kernel.destroy("h")
        await arena.kernel.release_layer("hostile")


async def test_a_crafted_image_is_mounted_neither_from_an_upload_nor_from_the_store(
    arena: AttackWorld, door: Door
) -> None:
    tree = arena.directory / "crafted"
    (tree / "etc").mkdir(parents=True)
    shutil.copy("/usr/bin/id", tree / "root-of-all")
    (tree / "root-of-all").chmod(0o6755)
    image = make_image(tree, arena.directory / "crafted.erofs")
    # Sent as a layer it is not an image: an archive that begins with nothing ends there.
    crafted = image.read_bytes()
    assert b"root-of-all" in crafted
    assert b"root-of-all" not in (await door.take(crafted)).read_bytes()
    await door.remove(PROJECT, "hostile@1")
    await door.refuse(crafted[1024:])
    wrapped = await door.take(tar_bytes([file_member("layer.erofs", crafted)]))
    # In the store, in place of one that this node built, it is not what was built.
    good = wrapped.read_bytes()
    for forged in (crafted, good[:1024] + bytes(64) + good[1088:], good[:4096]):
        wrapped.write_bytes(forged)
        with pytest.raises(DsecError) as caught:
            await door.resolve(PROJECT, "hostile@1")
        assert caught.value.code is ErrorCode.LAYER_ERROR
    wrapped.write_bytes(good)
    # Inside it is a file like any other.
    await _create_with(arena, wrapped)
    said = await arena.python(
        CALL
        + "print(call(165, b'/layer.erofs', b'/mnt', b'erofs', 1, 0), call(430, b'erofs', 0))\n"
        + "attempt('loop', lambda: os.open('/dev/loop-control', os.O_RDWR))",
        local="h",
    )
    assert said == "EPERM EPERM\nloop ENOENT"
