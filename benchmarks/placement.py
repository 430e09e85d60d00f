"""Placements a second: 160 nodes with 380,000 sandboxes among them, one scheduler and then four.

As many sandboxes end as begin, so that each round finds the same nodes. One scheduler is measured
once more on full ones, on which sandboxes end that no heartbeat has told of yet.

NATS, its accounts and credentials, heartbeats and schedulers are real; the nodes and the caller are
peers that speak their side of the wire and make nothing. A placement goes from the caller through a
scheduler to a node and back to both. Processor time is the scheduler's own, from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks._thin_peers import HEARTBEAT_S, SANDBOXES_MAX, ThinCaller
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import encode
from dsec_common.wire.sandbox import CreateSandbox

NODES: Final = 160
LIVE: Final = 380_000
SECONDS: Final = 3.0
WARM_UP_S: Final = 1.0
#: Creations on their way: what some thousand callers have at once.
IN_FLIGHT: Final = 256
SEVERAL: Final = 4
_READY_S: Final = 60.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def request_body(message_id: str) -> bytes:
    """Return a create request as a client sends it."""
    return encode(CreateSandbox(base="debian@12", message_id=message_id))


@contextlib.asynccontextmanager
async def _process(*arguments: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process of this interpreter; it is ended afterwards."""
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def _schedulers(
    nats: NatsForTests, count: int, directory: Path
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Yield so many scheduler processes that are ready."""
    bus = nats.service_config("scheduler")
    async with contextlib.AsyncExitStack() as stack:
        runtime_files, found = [], []
        for number in range(count):
            runtime_files.append(directory / f"scheduler-{count}-{number}.json")
            settings = {
                "DSEC_NATS_SERVERS": bus.servers[0],
                "DSEC_NATS_CREDENTIALS": bus.credentials_path,
                "DSEC_STATE_DIRECTORY": str(directory),
                "DSEC_RUNTIME_FILE": str(runtime_files[-1]),
                "DSEC_LOG_LEVEL": "error",
            }
            scheduler = _process("-m", "dsec_scheduler", env={**os.environ, **settings})
            found.append(await stack.enter_async_context(scheduler))
        async with asyncio.timeout(_READY_S):
            while not all(map(_is_running, runtime_files)):  # noqa: ASYNC110  others write them
                await asyncio.sleep(0.05)
        yield found


def _is_running(runtime_file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(runtime_file.read_text())["state"] == "running")
    return False


class _Nodes:
    """The process of nodes, and what it tells."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    async def start(self, nats: NatsForTests) -> None:
        """Have them beat."""
        names = [f"node-{number}" for number in range(NODES)]
        nodes = {name: str(nats.auth.service_credentials("sandboxd", name)) for name in names}
        live = LIVE // NODES
        await self._ask(json.dumps({"url": nats.server.url, "nodes": nodes, "live": live}))

    async def hold(self, live: int) -> None:
        """Return when all have told that they hold so many sandboxes."""
        await self._ask(json.dumps({"live": live}))
        await asyncio.sleep(2 * HEARTBEAT_S)

    async def placed(self) -> dict[str, Any]:
        """Return what was placed since the last time."""
        await self._ask("")
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found


class _Measured:
    """What rounds with so many schedulers came to."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.processor_us: list[float] = []
        self.spreads: list[float] = []
        self.seconds: list[float] = []
        self.twice = 0
        self.failed: Counter[str] = Counter()

    async def add(
        self,
        caller: ThinCaller,
        nodes: _Nodes,
        schedulers: list[asyncio.subprocess.Process],
        seconds: float,
    ) -> None:
        """Measure once more."""
        await caller.ask_for(WARM_UP_S, IN_FLIGHT)
        await nodes.placed()
        before = sum(processor_seconds(it.pid) for it in schedulers)
        self.rates.append(await caller.ask_for(seconds, IN_FLIGHT))
        used_s = sum(processor_seconds(it.pid) for it in schedulers) - before
        told = await nodes.placed()
        self.processor_us.append(1e6 * used_s / max(told["placed"], 1))
        loads = list(told["by_scheduler"].values())
        mean = sum(loads) / len(schedulers)
        self.spreads.append(
            max(abs(load - mean) for load in loads) / mean if len(loads) == len(schedulers) else 1.0
        )
        self.seconds += caller.seconds
        self.twice += told["twice"]
        self.failed += caller.failed
        caller.failed.clear()


async def run(options: Options) -> Report:
    """Measure one scheduler, on nodes with room and on full ones, and then four."""
    seconds = options.count / 1000 if options.count else SECONDS
    async with nats_for_tests() as nats, contextlib.AsyncExitStack() as stack:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        process = _process("-m", "benchmarks._thin_peers", **pipes)
        nodes = _Nodes(await stack.enter_async_context(process))
        await nodes.start(nats)
        caller = ThinCaller(request_body, "default")
        await caller.open(nats.server.url, str(nats.auth.project("default")))
        stack.callback(caller.close)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-")))
        one, full, several = _Measured(), _Measured(), _Measured()
        for measured, count, live in (
            (one, 1, LIVE // NODES),
            (full, 1, SANDBOXES_MAX),
            (several, SEVERAL, LIVE // NODES),
        ):
            await nodes.hold(live)
            async with _schedulers(nats, count, directory) as schedulers:
                for _ in range(options.rounds):
                    await measured.add(caller, nodes, schedulers, seconds)
    for measured in (one, full, several):
        assert not measured.failed, measured.failed
    rate, rate_of_several = median(one.rates), median(several.rates)
    processor_us = median(one.processor_us)
    kept = rate_of_several / rate
    twice = one.twice + full.twice + several.twice
    return Report(
        name="placement",
        figures={
            "nodes": NODES,
            "live_sandboxes": LIVE,
            "rate_per_s": rate,
            "processor_us": processor_us,
            "latency_p50_ms": 1000 * percentile(one.seconds, 0.5),
            "latency_p99_ms": 1000 * percentile(one.seconds, 0.99),
            "full_rate_per_s": median(full.rates),
            "full_processor_us": median(full.processor_us),
            "four_rate_per_s": rate_of_several,
            "four_processor_us": median(several.processor_us),
            "four_load_off_mean": median(several.spreads),
            "placed_twice": twice,
        },
        ratios={"four_to_one": kept},
        reach=(
            Reach.at_least("placement_rate_per_s", rate, 5_000),
            Reach.at_most("placement_processor_us", processor_us, 100),
            Reach.at_most("placement_full_processor_us", median(full.processor_us), 125),
            Reach.at_least("placement_four_to_one", kept, 0.75),
            Reach.at_most("placement_four_load_off_mean", median(several.spreads), 0.10),
            Reach.at_most("placement_twice", twice, 0),
        ),
    )
