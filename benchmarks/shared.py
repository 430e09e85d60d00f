"""What read-only data costs that many sandboxes map: 100 of one 256 MiB file, once in memory.

First one sandbox reads a twentieth of it, in runs of 256 KiB here and there: only those blocks are
fetched from the store's file, which is mounted in place.

Each sandbox maps the file of a data layer whole, touches every page, and keeps it mapped. The peer
is what 100 copies would take: the sum of what each process has resident.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

from benchmarks.memory import (
    cached_bytes,
    charged_bytes,
    forget,
    processes_named,
    resident_bytes,
    shares_of_mapping,
)
from benchmarks.platform import running_platform
from benchmarks.report import Options, Reach, Report, percentile
from dsec import DSecClient, Sandbox
from dsec.rootfs import build_host_rootfs
from dsec_common.errors import DsecError

SANDBOXES = 100
FILE_BYTES = 256 << 20
MIB = 1 << 20
MARKER = "dsec-benchmark-shared"
#: Maps, touches every page, says so, and waits to be ended.
PROGRAM = """\
import mmap, time
file = open("/weights/model.bin", "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(mapped[offset] for offset in range(0, len(mapped), 4096))
open("/tmp/mapped", "w").write(str(total))
time.sleep(600)
"""
#: Reads a twentieth, says how much and where it is, and waits to be ended.
READS_PART = """\
import os, random, time
file = os.open("/weights/model.bin", os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
run = 256 << 10
runs = os.fstat(file).st_size // run
read = sum(len(os.pread(file, run, at * run)) for at in random.sample(range(runs), runs // 20))
open("/tmp/mapped", "w").write(str(read))
time.sleep(600)
"""
MAPS = ("python3", "-c", PROGRAM, MARKER)


def write_random(path: Path, size: int) -> None:
    """Write a file that nothing can make smaller."""
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


async def import_layers(client: DSecClient, file_bytes: int) -> str:
    """Make a base with Python and a data layer of one file; return the data layer's digest."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-shared-") as directory:
        base, data = Path(directory) / "base", Path(directory) / "data"
        build_host_rootfs(base)
        (data / "weights").mkdir(parents=True)
        write_random(data / "weights" / "model.bin", file_bytes)
        await client.layers.import_directory(base, kind="base", name="python", version="1")
        layer = await client.layers.import_directory(data, kind="data", name="model", version="1")
        return layer.digest


async def until_mapped(sandbox: Sandbox) -> None:
    """Return when the sandbox's process has touched every page."""
    while True:
        try:
            await sandbox.read_file("/tmp/mapped")  # noqa: S108  a path inside the sandbox
        except DsecError:
            await asyncio.sleep(0.1)
        else:
            return


async def read_part(client: DSecClient, image: Path) -> tuple[int, int]:
    """Read a twentieth; return those bytes, and what of layer and image is in memory then."""
    await asyncio.to_thread(forget, image)
    async with await client.create_sandbox("python@1", toolkits=["model@1"]) as sandbox:
        running = asyncio.create_task(sandbox.exec(("python3", "-c", READS_PART, MARKER)))
        await until_mapped(sandbox)
        read = int(await sandbox.read_file("/tmp/mapped"))  # noqa: S108  inside the sandbox
        (pid,) = processes_named(MARKER)
        held = resident_bytes(Path(f"/proc/{pid}/root/weights/model.bin")) + resident_bytes(image)
        await sandbox.delete()
        await asyncio.gather(running, return_exceptions=True)
    return read, held


def image_of(digest: str, directory: Path) -> Path:
    """Return the image's file in the platform's store."""
    (found,) = directory.rglob(f"{digest.removeprefix('sha256:')}.erofs")
    return found


async def run(options: Options) -> Report:
    """Map the file in all sandboxes, and look at what memory holds."""
    count = options.count or SANDBOXES
    async with running_platform() as client, contextlib.AsyncExitStack() as stack:
        digest = await import_layers(client, FILE_BYTES)
        image = image_of(digest, Path(tempfile.gettempdir()))
        part_bytes, part_held = await read_part(client, image)
        cached_before = cached_bytes()
        running: list[asyncio.Task[object]] = []
        sandboxes: list[Sandbox] = []
        for _ in range(count):
            sandbox = await stack.enter_async_context(
                await client.create_sandbox("python@1", toolkits=["model@1"], cpus=0.5)
            )
            sandboxes.append(sandbox)
            running.append(asyncio.create_task(sandbox.exec(MAPS)))
            await until_mapped(sandbox)
        cached = cached_bytes() - cached_before
        processes = processes_named(MARKER)
        resident, proportional = shares_of_mapping(processes, "/weights/model.bin")
        charges = [charged_bytes(pid) for pid in processes]
        beside = await asyncio.to_thread(resident_bytes, image)
        for sandbox in sandboxes:
            await sandbox.delete()
        await asyncio.gather(*running, return_exceptions=True)
    return Report(
        name="shared",
        figures={
            "sandboxes": len(processes),
            "file_mib": FILE_BYTES / MIB,
            "part_read_mib": part_bytes / MIB,
            "part_held_mib": part_held / MIB,
            "page_cache_grown_mib": cached / MIB,
            "image_file_cached_mib": beside / MIB,
            "proportional_sum_mib": proportional / MIB,
            "charge_p50_mib": percentile(charges, 0.5) / MIB,
            "charge_max_mib": max(charges) / MIB,
        },
        ratios={
            "held_to_part_read": part_held / part_bytes,
            "proportional_to_file": proportional / FILE_BYTES,
            "copies_to_page_cache": resident / max(cached, 1),
        },
        reach=(
            Reach.at_most("held_to_part_read", part_held / part_bytes, 1.25),
            Reach.at_most("proportional_to_file", proportional / FILE_BYTES, 1.05),
            Reach.at_most("page_cache_to_file", cached / FILE_BYTES, 1.25),
            Reach.at_most("charge_p50_mib", percentile(charges, 0.5) / MIB, 32.0),
        ),
    )
