"""Starting and killing the process that writes a log."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

_WRITER = Path(__file__).with_name("log_writer.py")


@contextlib.asynccontextmanager
async def writer_process(
    kafka: str, spool: Path, name: str, project: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process that writes as fast as it can; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_WRITER),
        kafka,
        str(spool),
        name,
        project,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def kill_after(process: asyncio.subprocess.Process, count: int) -> int:
    """Kill the writer once ``count`` records are durable; return how many it said were."""
    assert process.stdout is not None
    durable = 0
    async with asyncio.timeout(30):
        while durable < count:
            durable = int(await process.stdout.readline())
    process.kill()
    for line in (await process.stdout.read()).splitlines(keepends=True):
        if line.endswith(b"\n"):
            durable = int(line)
    await process.wait()
    return durable
