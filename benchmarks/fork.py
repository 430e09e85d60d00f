"""100 children of one sandbox with 1 MiB changed: children a second, through the whole platform.

From before the one request to after the answer that names them all, running: SDK, NATS, the node,
the snapshot, 100 admissions and creations, and back. Each child then runs a command, which is not
in the rate. The peer is the C program `guarded`: the copy once, 100 births on it, all alive at
once; its better rate of one and of two processes counts. It does the kernel work that a child of a
fork needs, limits, ids and filters among it. The bare program, whose children nothing holds, is
measured beside it.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks._snapshots import changed_sandbox
from benchmarks.peers import run_bare_forks, run_guarded_forks
from benchmarks.report import Options, Reach, Report, median
from dsec import Sandbox

CHILDREN = 100
WARM_UP = 10


async def fork_once(parent: Sandbox, count: int) -> float:
    """Make children, use and end them; return the seconds until all were there."""
    started = time.perf_counter()
    children = await parent.fork(count)
    elapsed = time.perf_counter() - started
    made = [child for child in children if isinstance(child, Sandbox)]
    assert len(made) == count, children
    results = await asyncio.gather(
        *(child.exec(["/bin/sh", "-c", "test -s /work/changed/15"]) for child in made)
    )
    assert all(result.exit_code == 0 for result in results)
    await asyncio.gather(*(child.delete() for child in made))
    return elapsed


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or CHILDREN
    rates: list[float] = []
    bare_rates: list[float] = []
    guarded_rates: list[float] = []
    async with changed_sandbox() as (_, parent):
        await fork_once(parent, WARM_UP)
        for _ in range(options.rounds):
            rates.append(count / await fork_once(parent, count))
            guarded = [await run_guarded_forks(processes, count) for processes in (1, 2)]
            guarded_rates.append(max(forks.fork_rate_per_s for forks in guarded))
            bare = [await run_bare_forks(processes, count) for processes in (1, 2)]
            bare_rates.append(max(forks.fork_rate_per_s for forks in bare))
    rate, bare_rate, guarded_rate = median(rates), median(bare_rates), median(guarded_rates)
    return Report(
        name="fork",
        figures={
            "children": count,
            "fork_rate_per_s": rate,
            "guarded_fork_rate_per_s": guarded_rate,
            "bare_fork_rate_per_s": bare_rate,
        },
        ratios={
            "fork_rate_to_guarded": rate / guarded_rate,
            "fork_rate_to_bare": rate / bare_rate,
        },
        reach=(
            Reach.at_least("fork_rate_to_guarded", rate / guarded_rate, 0.4),
            Reach.at_least("fork_rate_to_bare", rate / bare_rate, 0.4),
        ),
    )
