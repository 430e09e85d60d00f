"""A snapshot of a sandbox with 1 MiB changed, and putting it back, each through the whole platform.

From before the request to after the answer, one at a time: SDK, NATS, the node, and back. A
rollback ends what runs in the sandbox and brings it up again with the snapshot's files. The peer is
the bare C program: the copy of the same files to a fresh tmpfs; kill, reap and a birth on the copy.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks._snapshots import changed_sandbox
from benchmarks.peers import run_bare_forks
from benchmarks.report import Options, Reach, Report, median, percentile

BARE_COUNT = 100
WARM_UP = 5


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or 40
    snapshots: list[float] = []
    frozen: list[float] = []
    rollbacks: list[float] = []
    bare_snapshots: list[float] = []
    bare_rollbacks: list[float] = []
    async with changed_sandbox() as (_, sandbox):
        for number in range(options.rounds):
            for _ in range(count + (0 if number else WARM_UP)):
                started = time.perf_counter()
                snapshot = await sandbox.snapshot()
                snapshots.append(time.perf_counter() - started)
                assert snapshot.info is not None
                frozen.append(snapshot.info.frozen_ms)
                await snapshot.delete()
            snapshot = await sandbox.snapshot()
            await snapshot.wait_durable()
            for _ in range(count):
                started = time.perf_counter()
                await sandbox.roll_back(snapshot)
                rollbacks.append(time.perf_counter() - started)
            result = await sandbox.exec(["/bin/sh", "-c", "cat /work/changed/* | wc -c"])
            assert result.stdout.strip() in {b"1048576", b""}, result
            # So that the next round copies 1 MiB again, and not what is new since the rollback.
            for file in range(16):
                data = await sandbox.read_file(f"/work/changed/{file}")
                await sandbox.write_file(f"/work/changed/{file}", data)
            bare = await run_bare_forks(1, BARE_COUNT)
            bare_snapshots.append(bare.snapshot_p50_ms)
            bare_rollbacks.append(bare.rollback_p50_ms)
            await asyncio.sleep(0)
    snapshots = snapshots[WARM_UP:]
    snapshot_p50 = 1000 * percentile(snapshots, 0.5)
    rollback_p50 = 1000 * percentile(rollbacks, 0.5)
    return Report(
        name="snapshot",
        figures={
            "snapshot_p50_ms": snapshot_p50,
            "snapshot_p99_ms": 1000 * percentile(snapshots, 0.99),
            "frozen_p50_ms": percentile(frozen, 0.5),
            "rollback_p50_ms": rollback_p50,
            "rollback_p99_ms": 1000 * percentile(rollbacks, 0.99),
            "bare_snapshot_p50_ms": median(bare_snapshots),
            "bare_rollback_p50_ms": median(bare_rollbacks),
            "samples": len(snapshots),
        },
        ratios={
            "snapshot_to_bare": snapshot_p50 / median(bare_snapshots),
            "rollback_to_bare": rollback_p50 / median(bare_rollbacks),
        },
        reach=(
            Reach.at_most("snapshot_p50_ms", snapshot_p50, 5.0),
            Reach.at_most("rollback_p50_ms", rollback_p50, 5.0),
        ),
    )
