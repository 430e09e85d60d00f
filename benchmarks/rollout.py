"""The round trip of a step: agent's socket, node, Chronus, trainer, and all the way back.

Each step is in the journal before the trainer sees it, and each answer before the agent does. One
agent at a time, then 500 rollouts at once, each with a sandbox of its own and one trainer for all.
The agents' side of the sockets is one process on the host that connects to each sandbox's socket
where its daemon made it: what is measured is the platform, not 500 interpreters that start. The
trainer answers each batch of steps as soon as it has it.

The peer is a bare request on the same NATS server whose answerer appends one message to a stream of
JetStream before it replies: a single hop, durable once, where a step takes four and is durable
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.platform import Platform, import_three_layers, running_parts
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec import DSecClient, Reply, RolloutGroup
from dsec_common import subjects
from dsec_common.accounts import AuthDirectory
from dsec_common.bus import Bus, BusConfig, Request
from dsec_common.subjects import ScopedId
from dsec_common.wire.rollout import InspectRollout, RolloutInfo, RolloutState

ROLLOUTS: Final = 500
SECONDS: Final = 4.0
WARM_UP: Final = 50
_CREATES_AT_ONCE: Final = 16
_MEMORY_BYTES: Final = 16 << 20
_SERVICES: Final = ("nats", "chronus", "sandboxd")
_JOURNAL: Final = "chronus-journal"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class AgentsProcess:
    """The process of :mod:`benchmarks._step_agents`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncIterator[AgentsProcess]:
        """Yield the process; ended afterwards."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks._step_agents",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        try:
            yield cls(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def do(self, **command: Any) -> Any:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()
        return json.loads(await self._process.stdout.readline())


async def train(group: RolloutGroup) -> None:
    """Answer whatever comes, and go on reading meanwhile."""
    answering: set[asyncio.Task[Any]] = set()
    async for steps in group.batches(512):
        replies = [Reply(step, {"to": step.seq}, reward=1.0) for step in steps]
        task = asyncio.create_task(group.reply(replies))
        answering.add(task)
        task.add_done_callback(answering.discard)


async def sockets_of(platform: Platform, group: RolloutGroup, count: int) -> list[str]:
    """Create a sandbox for each rollout; return the paths of their sockets on the host."""
    layers = await import_three_layers(platform.client)
    gate = asyncio.Semaphore(_CREATES_AT_ONCE)

    async def create(rollout_id: str) -> str:
        async with gate:
            sandbox = await platform.client.create_sandbox(
                **layers, rollout_id=rollout_id, cpus=0.01, memory_bytes=_MEMORY_BYTES
            )
            return sandbox.id

    ids = await asyncio.gather(*(create(rollout.id) for rollout in group.rollouts[:count]))
    sandboxd = platform.processes()["sandboxd"]
    place = f"/proc/{sandboxd}/root{platform.supervisor.layout.run}/{platform.node}/s"
    return [f"{place}/{ScopedId.parse(one).local}/agent.sock" for one in ids]


def processor_seconds(pids: dict[str, int]) -> dict[str, float]:
    """Return the processor time that processes have used so far, by name."""
    used = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return used


@contextlib.asynccontextmanager
async def bare_peer(platform: Platform) -> AsyncIterator[Bus]:
    """Answer requests after one append to a journal that belongs to no shard; yield who may ask."""
    context = platform.supervisor.context
    assert context is not None
    auth = AuthDirectory.create_or_open(platform.supervisor.layout.auth)
    config = BusConfig(
        servers=tuple(context.nats_servers),
        credentials_path=str(auth.service_credentials("chronus")),
        name="benchmark",
    )
    async with await Bus.connect(config) as answerer, await Bus.connect(config) as asker:

        async def answer(request: Request[InspectRollout]) -> RolloutInfo:
            await answerer.js_publish(subjects.rollout_journal("benchmark"), request.message)
            return RolloutInfo(rollout_id="", state=RolloutState.OPEN)

        await answerer.serve(bare_subject(), InspectRollout, answer)
        await answerer.flush()
        yield asker


def bare_subject() -> str:
    """Return a subject that no shard serves."""
    return subjects.rollout_system("default", ScopedId("benchmark", "x"), "inspect")


async def frames_written(asker: Bus) -> int:
    """Return how many frames all journals together have had so far."""
    answer = msgspec.json.decode(await asker.request_raw(f"$JS.API.STREAM.INFO.{_JOURNAL}", b""))
    return int(answer["state"]["last_seq"])


async def bare_round_trip(asker: Bus) -> float:
    """Return the seconds of one request, answered after one append."""
    began = time.perf_counter()
    await asker.request(bare_subject(), InspectRollout(), RolloutInfo)
    return time.perf_counter() - began


async def run(options: Options) -> Report:
    """Measure one agent, all of them, and the peer in turns."""
    count = options.count or 300
    rounds = min(options.rounds, 4)
    latencies: list[float] = []
    crowd: list[float] = []
    rates: list[float] = []
    bare: list[float] = []
    spent: dict[str, float] = dict.fromkeys((*_SERVICES, "trainer"), 0.0)
    stepped = frames = 0
    async with running_parts() as platform, AgentsProcess.running() as agents:
        client: DSecClient = platform.client
        async with client.rollouts.group("benchmark", range(ROLLOUTS)) as group:
            training = asyncio.create_task(train(group))
            await agents.do(sockets=await sockets_of(platform, group, ROLLOUTS))
            await agents.do(seconds=1.0)
            await agents.do(first=0, count=WARM_UP)
            watched = {name: platform.processes()[name] for name in _SERVICES}
            watched["trainer"] = os.getpid()
            async with bare_peer(platform) as asker:
                for _ in range(rounds):
                    latencies += await agents.do(first=0, count=count)
                    bare += [await bare_round_trip(asker) for _ in range(count)]
                    frames -= await frames_written(asker)
                    before = processor_seconds(watched)
                    done = await agents.do(seconds=SECONDS)
                    after = processor_seconds(watched)
                    for name in spent:
                        spent[name] += after[name] - before[name]
                    frames += await frames_written(asker)
                    stepped += done["steps"]
                    rates.append(done["steps"] / done["seconds"])
                    crowd += done["taken"]
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
    p50 = 1000 * percentile(latencies, 0.5)
    bare_p50 = 1000 * percentile(bare, 0.5)
    return Report(
        name="rollout",
        figures={
            "step_p50_ms": p50,
            "step_p99_ms": 1000 * percentile(latencies, 0.99),
            "rollouts": ROLLOUTS,
            "steps_per_s": median(rates),
            "step_at_500_p50_ms": 1000 * percentile(crowd, 0.5),
            "step_at_500_p99_ms": 1000 * percentile(crowd, 0.99),
            "bare_request_and_append_p50_ms": bare_p50,
            **{f"{name}_cpu_us_per_step": 1e6 * spent[name] / stepped for name in spent},
            "records_per_frame": 2 * stepped / frames,
            "samples": len(latencies),
        },
        ratios={"p50_to_bare": p50 / bare_p50},
        reach=(
            Reach.at_most("step_p50_ms", p50, 2.5),
            Reach.at_least("steps_per_s", median(rates), 4000.0),
        ),
    )
