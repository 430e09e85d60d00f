"""Create to first successful exec, through NATS, the scheduler and the node; and the rate at 64.

Once as two requests, once with the command inside the create request, which is one round trip.

The peer is the bare C program: namespaces, tmpfs, overlay over three EROFS layers, pivot_root, a
static init, one command over a socket, kill, reap, and nothing else. Ours and the peer take turns,
so that a machine whose speed drifts drifts for both; medians of the rounds are reported.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.peers import run_bare
from benchmarks.platform import import_three_layers, running_platform
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec import DSecClient

IN_FLIGHT = 64
WARM_UP = 30
BARE_COUNT = 400


async def create_and_exec(client: DSecClient, layers: dict[str, Any]) -> float:
    """Create a sandbox, run ``true`` in it, delete it; return seconds from create to exec's end."""
    started = time.perf_counter()
    sandbox = await client.create_sandbox(**layers)
    try:
        result = await sandbox.exec(["/bin/true"])
        elapsed = time.perf_counter() - started
        assert result.exit_code == 0, result
    finally:
        await sandbox.delete()
    return elapsed


async def create_with_exec(client: DSecClient, layers: dict[str, Any]) -> float:
    """Do the same, but with ``true`` inside the create request."""
    started = time.perf_counter()
    sandbox = await client.create_sandbox(**layers, command=["/bin/true"])
    elapsed = time.perf_counter() - started
    result = sandbox.first_result
    assert result is not None
    assert result.exit_code == 0, result
    await sandbox.delete()
    return elapsed


async def one_at_a_time(client: DSecClient, layers: dict[str, Any], count: int) -> list[float]:
    """Return each latency in seconds."""
    return [await create_and_exec(client, layers) for _ in range(count)]


async def in_flight(client: DSecClient, layers: dict[str, Any], count: int) -> float:
    """Return create + exec + delete a second with 64 at once."""
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await create_and_exec(client, layers)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - started)


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or 200
    latencies: list[float] = []
    joined: list[float] = []
    rates: list[float] = []
    bare_latencies: list[float] = []
    bare_rates: list[float] = []
    bare_shared_latencies: list[float] = []
    async with running_platform() as client:
        layers = await import_three_layers(client)
        await one_at_a_time(client, layers, WARM_UP)
        for _ in range(options.rounds):
            latencies += await one_at_a_time(client, layers, count)
            joined += [await create_with_exec(client, layers) for _ in range(count)]
            rates.append(await in_flight(client, layers, 4 * count))
            alone = await run_bare(1, BARE_COUNT)
            paired = await run_bare(2, BARE_COUNT)
            shared = await run_bare(1, BARE_COUNT, shared_network=True)
            bare_latencies.append(alone.create_to_first_exec_p50_ms)
            bare_shared_latencies.append(shared.create_to_first_exec_p50_ms)
            bare_rates.append(max(alone.rate_per_s, paired.rate_per_s))
    p50 = 1000 * percentile(latencies, 0.5)
    p99 = 1000 * percentile(latencies, 0.99)
    joined_p50 = 1000 * percentile(joined, 0.5)
    rate, bare_p50, bare_rate = median(rates), median(bare_latencies), median(bare_rates)
    p50_ratio, rate_ratio = p50 / bare_p50, rate / bare_rate
    return Report(
        name="create",
        figures={
            "create_to_first_exec_p50_ms": p50,
            "create_to_first_exec_p99_ms": p99,
            "create_with_command_p50_ms": joined_p50,
            "create_with_command_p99_ms": 1000 * percentile(joined, 0.99),
            "rate_at_64_per_s": rate,
            "bare_create_to_first_exec_p50_ms": bare_p50,
            "bare_shared_network_p50_ms": median(bare_shared_latencies),
            "bare_rate_per_s": bare_rate,
            "samples": len(latencies),
        },
        ratios={
            "p50_to_bare": p50_ratio,
            "p99_to_bare_p50": p99 / bare_p50,
            "with_command_p50_to_bare": joined_p50 / bare_p50,
            "rate_to_bare": rate_ratio,
        },
        reach=(
            Reach.at_most("create_p50_to_bare_p50", p50_ratio, 6.0),
            Reach.at_most("create_p99_to_bare_p50", p99 / bare_p50, 20.0),
            Reach.at_most("create_with_command_p50_to_bare_p50", joined_p50 / bare_p50, 4.5),
            Reach.at_least("create_rate_to_bare_rate", rate_ratio, 0.35),
        ),
    )
