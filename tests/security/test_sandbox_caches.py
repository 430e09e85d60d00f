"""The kernel's caches of names, pages and blocks: what a sandbox fills is charged to it alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attack_world import AttackWorld
from kernel_world import MIB, make_image

LARGE_BYTES = 192 * MIB
LIMIT_BYTES = 64 * MIB

# Look for very many names that are not there: in layers, in the writable one, in memory.
NAMES = """
import os
for number in range(75000):
    for directory in ('/etc', '/work', '/tmp', '/dev/shm'):
        try: os.stat(f'{directory}/{number:0200d}')
        except FileNotFoundError: pass
"""
# Read all of a file twice, then map it and touch every page.
READS = """
import mmap
FILE = '/file'
for _ in range(2):
    with open(FILE, 'rb', buffering=0) as file:
        while file.read(1 << 20): pass
with open(FILE, 'rb') as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
    print(len(area), sum(area[at] for at in range(0, len(area), 4096)))
"""
# Write, and have every kind of write reach the disk, wherever one can write.
STORM = """
import os, time
places = []
for line in open('/proc/self/mountinfo'):
    where = line.split()[4]
    path = os.path.join(where, 'storm')
    try: places.append(os.open(path, os.O_CREAT | os.O_RDWR | os.O_SYNC))
    except OSError: pass
count, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    for place in places:
        try: os.pwrite(place, bytes(65536), 0)
        except OSError: continue
        os.fsync(place); os.fdatasync(place); os.sync()
        count += 1
said = dict(line.split(': ') for line in open('/proc/self/io').read().splitlines())
print(len(places), count, said['write_bytes'], said['wchar'])
"""


@pytest.fixture
async def small(arena: AttackWorld, tmp_path: Path) -> AsyncIterator[AttackWorld]:
    """Yield a world with two more sandboxes, each smaller than the file that both have."""
    tree = tmp_path / "large"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for number in range(LARGE_BYTES // MIB):
            file.write(bytes([number]) * MIB)
    image = make_image(tree, tmp_path / "large.erofs")
    descriptor = os.open(image, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # whoever reads first pays
    finally:
        os.close(descriptor)
    await arena.kernel.hold_layer("large", image)
    layers = ("base", "workspace", "toolkit", "large")
    for local in ("greedy", "modest"):
        await arena.create(local, layers=layers, memory_bytes=LIMIT_BYTES, disk_bytes=16 * MIB)
    yield arena
    for local in ("greedy", "modest"):
        await arena.kernel.destroy(local)


async def test_names_that_are_looked_for_are_charged_and_make_room_for_each_other(
    small: AttackWorld,
) -> None:
    looking, _ = await asyncio.gather(
        small.run("python3", "-c", NAMES, local="greedy", timeout_s=120),
        small.python(NAMES.replace("75000", "100"), local="modest"),
    )
    assert (looking.exit_code, looking.oom) == (0, False), looking
    # They would take four times the limit: it was reached, and they went.
    assert LIMIT_BYTES / 2 < (await small.kernel.usage("greedy")).memory_peak_bytes <= LIMIT_BYTES


async def test_pages_of_a_layer_are_charged_to_who_reads_them_and_make_room_for_each_other(
    small: AttackWorld,
) -> None:
    pages = LARGE_BYTES // 4096
    said = f"{LARGE_BYTES} {sum(range(LARGE_BYTES // MIB)) * pages // (LARGE_BYTES // MIB)}"
    for local in ("greedy", "modest", "greedy"):
        assert await small.python(READS, local=local, timeout_s=120) == said
    for local in ("greedy", "modest"):
        assert (await small.kernel.usage(local)).memory_peak_bytes <= LIMIT_BYTES


async def test_a_storm_of_flushed_writes_reaches_no_block_device(small: AttackWorld) -> None:
    storm, _ = await asyncio.gather(
        small.python(STORM, local="greedy"),
        small.python(STORM.replace("+ 2", "+ 0.1"), local="modest"),
    )
    places, flushed, to_disk, written = map(int, storm.split())
    assert places >= 2, "the root and the shared memory"
    assert written >= 65536 * flushed > 0
    assert to_disk == 0
