"""A lease on slices of a GPU: from the request to its answer, through real NATS with accounts.

A broker in a process of its own; the record of every lease is written to JetStream before it is
answered. Requests for a tenth of a card come at an even pace, whether or not those before them have
been answered; each lease is given back as soon as it is granted, so the pool stays free.

- ``grant``: 500 requests a second on four nodes of eight A100;
- ``node_2000`` and ``node_100``: one request at a time on a node of 2,000 CU and on one of 100,
  with 50 leases on each: the ratio says that size costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from benchmarks.report import Options, Reach, Report, median, percentile
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeaseReleased, ReleaseLease
from dsec_common.wire.node import Gpu, NodeHeartbeat

RATE_PER_S: Final = 500.0
P50_TARGET_MS: Final = 5.0
P99_TARGET_MS: Final = 83.0
SIZE_TARGET: Final = 1.25
_SECONDS: Final = 4
_CARDS: Final = {
    **{f"pool-{number}": 8 for number in range(4)},
    "node-100": 1,
    "node-2000": 20,
}
_STANDING: Final = 50
_ALONE: Final = 300
_READY_S: Final = 60.0


async def run(options: Options) -> Report:
    """Measure the paced requests in rounds, then the two sizes in turns."""
    count = options.count or int(RATE_PER_S * _SECONDS)
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_for_tests())
        bus = await stack.enter_async_context(nats.service("scheduler"))
        await stack.enter_async_context(_broker(nats))
        for name, cards in _CARDS.items():
            await stack.enter_async_context(_node(nats, name, cards))
        await _until_all_ready(bus)
        p50_ms, p99_ms, rates = [], [], []
        for _ in range(options.rounds):
            began = time.perf_counter()
            taken = await _paced(bus, count)
            rates.append(count / (time.perf_counter() - began))
            p50_ms.append(percentile(taken, 0.5) * 1e3)
            p99_ms.append(percentile(taken, 0.99) * 1e3)
        for node in ("node-100", "node-2000"):
            await asyncio.gather(*(_grant(bus, node, 1.0) for _ in range(_STANDING)))
        alone: dict[str, list[float]] = {"node-100": [], "node-2000": []}
        for _ in range(_ALONE):
            for node, times in alone.items():
                times.append(await _granted_and_released(bus, node, 1.0))
    small_ms, large_ms = (median(times) * 1e3 for times in alone.values())
    figures = {
        "grant_p50_ms": median(p50_ms),
        "grant_p99_ms": median(p99_ms),
        "rate_per_s": median(rates),
        "node_100_p50_ms": small_ms,
        "node_2000_p50_ms": large_ms,
    }
    ratio = large_ms / small_ms
    return Report(
        name="grant",
        figures=figures,
        ratios={"node_2000_to_100": ratio},
        reach=(
            Reach.at_most("grant_p50_ms", figures["grant_p50_ms"], P50_TARGET_MS),
            Reach.at_most("grant_p99_ms", figures["grant_p99_ms"], P99_TARGET_MS),
            Reach.at_most("node_2000_to_100", ratio, SIZE_TARGET),
        ),
    )


async def _paced(bus: Bus, count: int) -> list[float]:
    """Send so many requests at an even pace; return how long each one was waited for."""
    began = time.perf_counter()
    asked = []
    for number in range(count):
        await asyncio.sleep(began + number / RATE_PER_S - time.perf_counter())
        asked.append(asyncio.create_task(_granted_and_released(bus, "", 10.0)))
    return list(await asyncio.gather(*asked))


async def _granted_and_released(bus: Bus, node: str, cu: float) -> float:
    """Return how long a grant took."""
    began = time.perf_counter()
    lease = await _grant(bus, node, cu)
    taken = time.perf_counter() - began
    given_back = ReleaseLease(lease_id=lease.lease_id)
    await bus.request(subjects.lease("release"), given_back, LeaseReleased)
    return taken


async def _grant(bus: Bus, node: str, cu: float) -> LeaseGranted:
    asked = GrantLease(project="default", holder="benchmark", cu=cu, node=node)
    return await bus.request(subjects.lease("grant"), asked, LeaseGranted)


@asynccontextmanager
async def _broker(nats: NatsForTests) -> AsyncIterator[None]:
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": nats.server.url,
        "DSEC_NATS_CREDENTIALS": str(nats.auth.service_credentials("broker")),
        "DSEC_LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec_broker", env=environment
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _node(nats: NatsForTests, name: str, cards: int) -> AsyncIterator[None]:
    """Be a node, as far as a broker hears of it."""
    gpus = tuple(
        Gpu(uuid=f"{name}-{at}", model="NVIDIA A100-SXM4-80GB", memory_bytes=80 << 30)
        for at in range(cards)
    )

    async with nats.service("sandboxd", name) as bus:

        async def beat() -> None:
            while True:
                heartbeat = NodeHeartbeat(node=name, epoch="1", gpus=gpus)
                await bus.publish(subjects.heartbeat(name), heartbeat)
                await asyncio.sleep(1.0)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()


async def _until_all_ready(bus: Bus) -> None:
    async with asyncio.timeout(_READY_S):
        for node in _CARDS:
            while True:
                try:
                    await _granted_and_released(bus, node, 1.0)
                    break
                except DsecError:
                    await asyncio.sleep(0.2)
