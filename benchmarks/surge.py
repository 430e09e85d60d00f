"""A surge of +300 % arrivals: real-time grants in time, low leases that shrink and grow back.

NATS, its accounts and two broker processes are real; ten nodes with 20 A100 and 15 L40 among them
are peers that send heartbeats and take what brokers tell of shares. Before the surge 40 % of all
units are handed out: to batch leases of 7 to 10 units that live for the whole run, to others that
come and go, and to real-time leases of 4 to 5. In the surge four times as many come and go; all at
their maximum they would take more than there is. A real-time grant is timed from its request to its
answer, refusals and failures count as late.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.report import Options, Reach, Report, percentile
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import DsecError
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.elastic import LeaseResized, ResizeLease
from dsec_common.wire.lease import (
    GrantLease,
    LeaseGranted,
    LeaseList,
    LeaseReleased,
    ListLeases,
    ReleaseLease,
)
from dsec_common.wire.node import Gpu, ListNodes, NodeHeartbeat, NodeList

BROKERS: Final = 2
NODES: Final = (*(("NVIDIA A100-SXM4-40GB", 4),) * 5, *(("NVIDIA L40", 3),) * 5)
TOTAL_CU: Final = 20 * 100 + 15 * 65
SLA_S: Final = 0.1
SURGE: Final = 4.0
LOW: Final = GpuDemand(min_cu=7, max_cu=10)
REALTIME: Final = GpuDemand(min_cu=4, max_cu=5)
#: Batch leases that live for the whole run: a fifth of all units.
LASTING: Final = 60
#: Arrivals a second before the surge, and how long each holds its units.
LOW_RATE: Final = 17.0
LOW_HOLD_S: Final = 3.0
REALTIME_RATE: Final = 18.0
REALTIME_HOLD_S: Final = 1.0
BASE_S: Final = 4.0
SURGE_S: Final = 20.0
_RECOVER_MAX_S: Final = 60.0
_READY_S: Final = 30.0
_BEAT_S: Final = 1.0
_LOOK_S: Final = 0.25
_ROUNDING: Final = 1e-9


class _Node:
    """A node that makes nothing: it beats, and takes what it is told of shares."""

    def __init__(self, bus: Bus, name: str, gpus: tuple[Gpu, ...]) -> None:
        self.bus = bus
        self.name = name
        self.gpus = gpus
        self.lease_ids: tuple[str, ...] = ()
        self.resizes: dict[str, int] = {}
        self.told = 0

    async def run(self) -> None:
        """Beat until cancelled."""
        subject = subjects.node_request(self.name, "resize")
        await self.bus.serve(subject, ResizeLease, self._resize)
        while True:
            beat = NodeHeartbeat(
                node=self.name,
                epoch="1",
                gpus=self.gpus,
                lease_ids=self.lease_ids,
                lease_resizes=dict(self.resizes),
            )
            await self.bus.publish(subjects.heartbeat(self.name), beat)
            await asyncio.sleep(_BEAT_S)

    async def _resize(self, request: Request[ResizeLease]) -> LeaseResized:
        told = request.message
        self.told += 1
        self.resizes[told.lease_id] = max(told.resizes, self.resizes.get(told.lease_id, 0))
        return LeaseResized(lease_id=told.lease_id)


@dataclass
class _Load:
    """Arrivals of one class, and what became of them."""

    bus: Bus
    demand: GpuDemand
    service_class: ServiceClass
    rate_per_s: float
    hold_s: float
    seconds: list[float] = field(default_factory=list)
    refused: int = 0

    async def arrive(self, seconds: float, factor: float, chance: random.Random) -> None:
        """Have requests come for so long, each on its own; return when the last has come."""
        loop = asyncio.get_running_loop()
        end, due = loop.time() + seconds, loop.time()
        while due < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            hold_s = chance.expovariate(1 / self.hold_s)
            task = asyncio.create_task(self._one(hold_s))
            _RUNNING.add(task)
            task.add_done_callback(_RUNNING.discard)
            due += chance.expovariate(self.rate_per_s * factor)

    async def _one(self, hold_s: float) -> None:
        asked_at = time.perf_counter()
        try:
            lease = await grant(self.bus, self.demand, self.service_class)
        except DsecError:
            self.refused += 1
            return
        self.seconds.append(time.perf_counter() - asked_at)
        await asyncio.sleep(hold_s)
        with contextlib.suppress(DsecError):
            await self.bus.request(
                subjects.lease("release"), ReleaseLease(lease_id=lease.lease_id), LeaseReleased
            )


_RUNNING: Final[set[asyncio.Task[None]]] = set()


async def grant(bus: Bus, demand: GpuDemand, service_class: ServiceClass) -> LeaseGranted:
    """Ask for units on any node."""
    asked = GrantLease(
        project="default",
        holder="surge",
        demand=demand,
        service_class=service_class,
        ttl_s=300.0,
    )
    return await bus.request(subjects.lease("grant"), asked, LeaseGranted)


class _Watch:
    """Looks at the lasting leases and the cluster's use again and again."""

    def __init__(self, bus: Bus, leases: dict[str, float]) -> None:
        self._bus = bus
        self._full = leases
        self.shares: list[float] = []
        self.used: list[float] = []
        self._looked = asyncio.Event()

    async def look(self) -> float:
        """Return what part of what they were granted first the lasting leases have now."""
        held: dict[str, float] = {}
        after, more = "", True
        while more:
            page = await self._bus.request(
                subjects.lease("list"), ListLeases(after=after), LeaseList
            )
            held |= {lease.lease_id: lease.cu for node in page.nodes for lease in node.leases}
            more = page.more and bool(page.nodes)
            after = page.nodes[-1].node if page.nodes else ""
        lasting = sum(held.get(lease_id, 0.0) for lease_id in self._full)
        self.shares.append(lasting / sum(self._full.values()))
        self.used.append(sum(held.values()) / TOTAL_CU)
        return self.shares[-1]

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            self._looked.set()
            await asyncio.sleep(_LOOK_S)

    async def whole_again(self) -> None:
        """Return when the lasting leases have all that they were granted first."""
        while self.shares[-1] < 1.0 - _ROUNDING:
            self._looked.clear()
            await self._looked.wait()


@contextlib.asynccontextmanager
async def _brokers(nats: NatsForTests, directory: Path) -> AsyncIterator[None]:
    bus = nats.service_config("broker")
    processes, files = [], []
    try:
        for number in range(BROKERS):
            files.append(directory / f"broker-{number}.json")
            settings = {
                "DSEC_NATS_SERVERS": bus.servers[0],
                "DSEC_NATS_CREDENTIALS": bus.credentials_path,
                "DSEC_RUNTIME_FILE": str(files[-1]),
                "DSEC_LOG_LEVEL": "error",
            }
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "dsec_broker", env={**os.environ, **settings}
                )
            )
        async with asyncio.timeout(_READY_S):
            while not all(map(_is_running, files)):  # noqa: ASYNC110  another process tells by a file
                await asyncio.sleep(0.05)
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


def _is_running(runtime_file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(runtime_file.read_text())["state"] == "running")
    return False


async def _nodes(nats: NatsForTests, stack: contextlib.AsyncExitStack) -> dict[str, _Node]:
    found = {}
    for number, (model, count) in enumerate(NODES):
        name = f"node-{number}"
        gpus = tuple(Gpu(uuid=f"GPU-{number}-{card}", model=model) for card in range(count))
        bus = await stack.enter_async_context(nats.service("sandboxd", name))
        found[name] = _Node(bus, name, gpus)
    return found


async def _until_ready(user: Bus) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            with contextlib.suppress(DsecError):
                found = await user.request(subjects.node("default", "list"), ListNodes(), NodeList)
                if sum(info.ready for info in found.nodes) == len(NODES):
                    return
            await asyncio.sleep(0.05)


@dataclass
class _Run:
    """What one surge came to."""

    realtime: _Load
    low: _Load
    watch: _Watch
    surge_from: int
    recover_s: float
    told: int


async def _surge(seconds: float, seed: int) -> _Run:
    chance = random.Random(seed)  # noqa: S311  arrivals, no secret
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_for_tests())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-")))
        nodes = await _nodes(nats, stack)
        await stack.enter_async_context(_brokers(nats, directory))
        beating = [asyncio.create_task(node.run()) for node in nodes.values()]
        bus = await stack.enter_async_context(nats.service("scheduler"))
        try:
            await _until_ready(await stack.enter_async_context(nats.project("default")))
            return await _measure(bus, nodes, seconds, chance)
        finally:
            for task in (*beating, *_RUNNING):
                task.cancel()
            await asyncio.gather(*beating, *_RUNNING, return_exceptions=True)


async def _measure(
    bus: Bus, nodes: dict[str, _Node], seconds: float, chance: random.Random
) -> _Run:
    lasting = {}
    for _ in range(LASTING):
        lease = await grant(bus, LOW, ServiceClass.BATCH)
        lasting[lease.lease_id] = lease.cu
        nodes[lease.node].lease_ids += (lease.lease_id,)
    realtime = _Load(bus, REALTIME, ServiceClass.REALTIME, REALTIME_RATE, REALTIME_HOLD_S)
    low = _Load(bus, LOW, ServiceClass.BATCH, LOW_RATE, LOW_HOLD_S)

    async def arrive(for_s: float, factor: float) -> None:
        await asyncio.gather(
            realtime.arrive(for_s, factor, chance), low.arrive(for_s, factor, chance)
        )

    watch = _Watch(bus, lasting)
    watching = asyncio.create_task(watch.run())
    try:
        await arrive(BASE_S, 1.0)
        surge_from = len(watch.shares)
        await arrive(seconds, SURGE)
        over_at = time.perf_counter()
        after = asyncio.create_task(arrive(_RECOVER_MAX_S, 1.0))
        whole = asyncio.create_task(watch.whole_again())
        await asyncio.wait({after, whole}, return_when=asyncio.FIRST_COMPLETED)
        recover_s = time.perf_counter() - over_at if whole.done() else float("inf")
        for task in (after, whole):
            task.cancel()
        await asyncio.gather(after, whole, return_exceptions=True)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    told = sum(node.told for node in nodes.values())
    return _Run(realtime, low, watch, surge_from, recover_s, told)


async def run(options: Options) -> Report:
    """Have the surge come once; ``count`` is how many seconds it lasts."""
    seconds = float(options.count or SURGE_S)
    found = await _surge(seconds, seed=1)
    granted = found.realtime.seconds
    in_time = sum(one <= SLA_S for one in granted) / (len(granted) + found.realtime.refused)
    lowest = min(found.watch.shares[found.surge_from :])
    return Report(
        name="surge",
        figures={
            "cu_total": TOTAL_CU,
            "realtime_requests": len(granted) + found.realtime.refused,
            "realtime_refused": found.realtime.refused,
            "realtime_p50_ms": 1000 * percentile(granted, 0.5),
            "realtime_p99_ms": 1000 * percentile(granted, 0.99),
            "realtime_max_ms": 1000 * max(granted),
            "low_requests": len(found.low.seconds) + found.low.refused,
            "low_refused": found.low.refused,
            "used_before": found.watch.used[found.surge_from - 1],
            "used_max": max(found.watch.used),
            "low_share_min": lowest,
            "recover_s": found.recover_s,
            "shares_told_to_nodes": found.told,
        },
        ratios={"low_share_min": lowest},
        reach=(
            Reach.at_least("surge_realtime_in_time", in_time, 0.999),
            Reach.at_most("surge_low_share_min", lowest, 0.8),
            Reach.at_most("surge_recover_s", found.recover_s, _RECOVER_MAX_S),
        ),
    )
