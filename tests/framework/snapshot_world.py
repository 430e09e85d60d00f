"""Describing a tree inside a sandbox, so that two of them can be compared to the last attribute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dsec_sandboxd.kernel.layer_copies import LayerCopy
from kernel_world import MIB, World

#: Prints one line for each entry: everything that a program inside can see of it.
DESCRIBE = r"""
import hashlib, os, stat, sys
names = {}
def line(path):
    s = os.lstat(path)
    kind = stat.S_IFMT(s.st_mode)
    facts = [path.replace("\n", "\\n"), oct(s.st_mode), s.st_uid, s.st_gid]
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:
            facts += [s.st_size, hashlib.file_digest(file, "md5").hexdigest()]
        first = names.setdefault((s.st_dev, s.st_ino), path)
        if first != path:
            facts += ["same as", first]
    if kind == stat.S_IFLNK:
        facts += [os.readlink(path)]
    facts += [s.st_mtime_ns]
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        facts += [(n, os.getxattr(path, n).hex()) for n in sorted(os.listxattr(path))]
    return facts
for root in sys.argv[1:]:
    print(*line(root))
    for directory, directories, files in os.walk(root):
        directories.sort()
        for name in sorted(directories + files):
            print(*line(os.path.join(directory, name)))
"""


async def describe(world: World, *roots: str, local: str = "a") -> str:
    """Return what the trees look like from inside."""
    result = await world.run("python3", "-c", DESCRIBE, *roots, local=local)
    assert result.exit_code == 0, result.stderr.decode(errors="replace")
    return result.stdout.decode(errors="replace")


async def take(
    world: World, local: str = "a", *, fold: Sequence[str] = (), **changes: Any
) -> LayerCopy:
    """Take a snapshot of a sandbox."""
    values: dict[str, Any] = {"size_bytes": 64 * MIB, "inodes": 65_536}
    return await world.kernel.snapshot(local, fold=fold, **values | changes)


async def keep(world: World, name: str, copy: LayerCopy) -> None:
    """Hold a copy as a layer; nothing else holds it then."""
    await world.kernel.hold_mount(name, copy.mount_fd)
    os.close(copy.mount_fd)


@contextlib.asynccontextmanager
async def held(world: World, name: str, copy: LayerCopy) -> AsyncIterator[None]:
    """Hold a copy as a layer while the context lasts."""
    await keep(world, name, copy)
    try:
        yield
    finally:
        await world.kernel.release_layer(name)


async def restore(world: World, local: str, *snapshots: str, **changes: Any) -> None:
    """Create a sandbox on the usual layers and snapshots above them, lowest first."""
    await world.create(
        local,
        layers=("base", "workspace", "toolkit", *snapshots),
        on_snapshot=True,
        **changes,
    )
