"""The round trip of ``true`` in a running sandbox, through NATS; one at a time and 16 at once.

The peer is one fork, exec and wait of the same program by this process, with nothing in between.
The bare C program's creation says how fast the machine is.
"""

from __future__ import annotations

import asyncio
import subprocess
import time

from benchmarks.peers import run_bare
from benchmarks.platform import import_three_layers, running_platform
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec import Sandbox

IN_FLIGHT = 16
WARM_UP = 50
TRUE = ("/bin/true",)
BARE_COUNT = 200


async def round_trip(sandbox: Sandbox) -> float:
    """Return the seconds of one exec."""
    started = time.perf_counter()
    result = await sandbox.exec(TRUE)
    elapsed = time.perf_counter() - started
    assert result.exit_code == 0, result
    return elapsed


async def rate(sandbox: Sandbox, count: int) -> float:
    """Return execs a second with 16 at once."""
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await round_trip(sandbox)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - started)


def spawn_here() -> float:
    """Return the seconds of one fork, exec and wait on the host."""
    started = time.perf_counter()
    subprocess.run(TRUE, check=True)
    return time.perf_counter() - started


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or 300
    latencies: list[float] = []
    rates: list[float] = []
    host: list[float] = []
    bare: list[float] = []
    async with running_platform() as client:
        layers = await import_three_layers(client)
        async with await client.create_sandbox(**layers) as sandbox:
            for _ in range(WARM_UP):
                await round_trip(sandbox)
            for _ in range(options.rounds):
                latencies += [await round_trip(sandbox) for _ in range(count)]
                rates.append(await rate(sandbox, 2 * count))
                host += [spawn_here() for _ in range(count)]
                bare.append((await run_bare(1, BARE_COUNT)).create_to_first_exec_p50_ms)
    p50 = 1000 * percentile(latencies, 0.5)
    host_p50 = 1000 * percentile(host, 0.5)
    return Report(
        name="exec",
        figures={
            "exec_true_p50_ms": p50,
            "exec_true_p99_ms": 1000 * percentile(latencies, 0.99),
            "rate_at_16_per_s": median(rates),
            "host_spawn_true_p50_ms": host_p50,
            "bare_create_to_first_exec_p50_ms": median(bare),
            "samples": len(latencies),
        },
        ratios={"p50_to_host_spawn": p50 / host_p50, "p50_to_bare_create": p50 / median(bare)},
        reach=(
            Reach.at_most("exec_true_p50_ms", p50, 2.0),
            Reach.at_least("exec_true_rate_per_s", median(rates), 800.0),
        ),
    )
