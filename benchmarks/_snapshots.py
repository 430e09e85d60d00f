"""A sandbox with 1 MiB changed, for the benchmarks of snapshots and forks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from benchmarks.platform import import_three_layers, running_platform
from dsec import DSecClient, Sandbox

#: As the bare program has it: 16 files of 64 KiB.
FILES = 16
FILE_BYTES = 64 * 1024


@contextlib.asynccontextmanager
async def changed_sandbox() -> AsyncIterator[tuple[DSecClient, Sandbox]]:
    """Run the platform; yield a client and a sandbox in which 1 MiB is new."""
    async with running_platform() as client:
        layers = await import_three_layers(client)
        async with await client.create_sandbox(cpus=0.25, **layers) as sandbox:
            for number in range(FILES):
                await sandbox.write_file(f"/work/changed/{number}", os.urandom(FILE_BYTES))
            yield client, sandbox
