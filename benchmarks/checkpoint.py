"""A checkpoint of a rollout whose sandbox has 1 MiB changed, and putting both back.

From before the trainer's request to after its answer, one at a time: SDK, NATS, Chronus with its
intent and its result in the journal, the node with its snapshot on the disk, and back. The peer, in
the same run: the same snapshot, waited for until it is on the disk, and the same rollback, asked of
the node alone. The ratio is what it costs to have them with the rollout's state, or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from benchmarks._snapshots import changed_sandbox
from benchmarks.report import Options, Reach, Report, percentile
from dsec import Sandbox

T = TypeVar("T")

WARM_UP = 5
_STATE = {f"value-{number}": "x" * 100 for number in range(100)}


async def timed(taken: list[float], ask: Callable[[], Awaitable[T]]) -> T:
    """Add the seconds that a request takes; return its answer."""
    began = time.perf_counter()
    answer = await ask()
    taken.append(time.perf_counter() - began)
    return answer


async def change_again(sandbox: Sandbox) -> None:
    """Have 1 MiB new since the rollback, which left none."""
    for file in range(16):
        data = await sandbox.read_file(f"/work/changed/{file}")
        await sandbox.write_file(f"/work/changed/{file}", data)


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or 25
    rounds = min(options.rounds, 4)
    checkpoints: list[float] = []
    rollbacks: list[float] = []
    snapshots: list[float] = []
    bare_rollbacks: list[float] = []
    async with changed_sandbox() as (client, sandbox):
        rollout = await client.rollouts.open()
        await rollout.put_state(_STATE)

        for _ in range(WARM_UP):
            await rollout.checkpoint(sandbox=sandbox)
            await (await sandbox.snapshot(wait_durable=True)).delete()
        for _ in range(rounds):
            for _ in range(count):
                await timed(checkpoints, lambda: rollout.checkpoint(sandbox=sandbox))
                snapshot = await timed(snapshots, lambda: sandbox.snapshot(wait_durable=True))
                await snapshot.delete()
            kept = await sandbox.snapshot(wait_durable=True)
            for _ in range(count):
                await timed(rollbacks, rollout.roll_back)
                await timed(bare_rollbacks, lambda: sandbox.roll_back(kept))  # noqa: B023  at once
            await change_again(sandbox)
            await asyncio.sleep(0)
        await rollout.close()
    checkpoint_p50, rollback_p50 = (1000 * percentile(it, 0.5) for it in (checkpoints, rollbacks))
    snapshot_p50, bare_p50 = (1000 * percentile(it, 0.5) for it in (snapshots, bare_rollbacks))
    return Report(
        name="checkpoint",
        figures={
            "checkpoint_p50_ms": checkpoint_p50,
            "checkpoint_p99_ms": 1000 * percentile(checkpoints, 0.99),
            "rollback_p50_ms": rollback_p50,
            "rollback_p99_ms": 1000 * percentile(rollbacks, 0.99),
            "durable_snapshot_p50_ms": snapshot_p50,
            "sandbox_rollback_p50_ms": bare_p50,
            "samples": len(checkpoints),
        },
        ratios={
            "checkpoint_to_snapshot": checkpoint_p50 / snapshot_p50,
            "rollback_to_sandbox_rollback": rollback_p50 / bare_p50,
        },
        reach=(
            Reach.at_most("checkpoint_p50_ms", checkpoint_p50, 20.0),
            Reach.at_most("rollback_p50_ms", rollback_p50, 10.0),
        ),
    )
