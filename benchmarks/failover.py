"""The owner of half the shards is killed under load: how long until every rollout goes on.

Two Chronus processes, one trainer of 64 rollouts, and 64 agents that step as their node does for
them, on a real NATS with accounts. In each round one process is killed (SIGKILL) and another one
started; what is measured is the longest time, over all rollouts, from the kill to the next step
that was answered whole. Before the kill both have their share, and steps come all the time. The
lease of an owner lives for one second here (``lease_ttl_s``), the least that there is.

At the end each agent must have got the answer to each of its steps, and each rollout must hold
just those, rewarded once each: what differs is lost or was applied twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.report import Options, Reach, Report, median
from dsec import Reply, RolloutGroup
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.rollout_group import ShardTaken
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.shard_news import ShardNews
from dsec_sandboxd.step_log import StepLog

ROLLOUTS: Final = 64
LEASE_TTL_S: Final = 1.0
_NODE: Final = "bench"
_QUIET_S: Final = 1.0
_WAIT_S: Final = 60.0


class BenchmarkAgent:
    """One agent, through the gateway of its node."""

    def __init__(self, gateway: ChronusGateway, rollout_id: str, local: str) -> None:
        self._gateway = gateway
        self._record = SandboxRecord(
            local=local,
            project="default",
            placement_id="p",
            request_id="r",
            state=SandboxState.RUNNING,
            created_at=0.0,
            layer_references=(),
            layer_digests=(),
            limits=Limits(),
            rollout_id=rollout_id,
        )
        self.answered = 0
        self.wrong = 0
        self.answered_at: list[float] = []
        self.stopping = False

    async def run(self) -> None:
        """Step until told to stop; each step is answered before the next."""
        for seq in itertools.count(1):
            if self.stopping:
                return
            deadline = time.monotonic() + _WAIT_S
            payload = msgspec.msgpack.encode({"step": seq})
            state = await self._gateway.step(
                self._record, seq, "step", payload, deadline=deadline, away_until=deadline
            )
            assert state.ready, f"no answer to step {seq} within {_WAIT_S} s"
            self.wrong += state.payload != {"to": seq}
            self.answered = seq
            self.answered_at.append(time.monotonic())


@contextlib.asynccontextmanager
async def chronus(nats: NatsForTests, directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a Chronus in a process of its own that is ready; killed afterwards."""
    bus = nats.service_config("chronus")
    runtime_file = directory / f"{os.urandom(4).hex()}.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec_chronus"),
        f"--nats-servers={','.join(bus.servers)}",
        f"--nats-credentials={bus.credentials_path}",
        f"--lease-ttl-s={LEASE_TTL_S}",
        f"--runtime-file={runtime_file}",
        "--log-level=error",
    )
    try:
        while not runtime_file.exists() or b'"running"' not in runtime_file.read_bytes():
            assert process.returncode is None, "Chronus did not start"
            await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def train(group: RolloutGroup) -> None:
    """Answer whatever comes."""
    answering: set[asyncio.Task[Any]] = set()
    async for steps in group.batches():
        replies = [Reply(step, {"to": step.seq}, reward=1.0) for step in steps]
        task = asyncio.create_task(group.reply(replies))
        answering.add(task)
        task.add_done_callback(answering.discard)


async def first_step_of_each_after(agents: list[BenchmarkAgent], moment: float) -> float:
    """Return when the last rollout has answered a step that was asked after ``moment``."""
    before = [agent.answered for agent in agents]
    # The step under way at that moment may have been answered already; the one after it was not.
    while any(agent.answered < seen + 2 for agent, seen in zip(agents, before, strict=True)):  # noqa: ASYNC110  they count at full speed
        await asyncio.sleep(0.002)
    return max(
        agent.answered_at[seen + 1] - moment for agent, seen in zip(agents, before, strict=True)
    )


async def measure(nats: NatsForTests, directory: Path, rounds: int) -> tuple[list[float], int, int]:
    """Kill an owner in each round; return the seconds, the steps lost, and those applied twice."""
    async with (
        nats.project() as trainer_bus,
        nats.service("sandboxd", _NODE) as node_bus,
        contextlib.AsyncExitStack() as processes,
    ):
        owners = [await processes.enter_async_context(chronus(nats, directory)) for _ in range(2)]
        rollouts = Rollouts(Channel(trainer_bus, "default"))
        async with rollouts.group("failover", range(ROLLOUTS)) as group:
            agents = await agents_of(node_bus, group)
            training = asyncio.create_task(train(group))
            stepping = [asyncio.create_task(agent.run()) for agent in agents]
            taken = []
            for _ in range(rounds):
                await asyncio.sleep(_QUIET_S + 2 * LEASE_TTL_S)  # both have their share by then
                doomed = owners.pop(0)
                killed_at = time.monotonic()
                doomed.kill()
                async with asyncio.timeout(_WAIT_S):
                    taken.append(await first_step_of_each_after(agents, killed_at))
                owners.append(await processes.enter_async_context(chronus(nats, directory)))
            for agent in agents:
                agent.stopping = True
            await asyncio.gather(*stepping)
            infos = await asyncio.gather(*(rollout.inspect() for rollout in group.rollouts))
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
    lost = sum(agent.wrong for agent in agents)
    twice = 0
    for agent, info in zip(agents, infos, strict=True):
        lost += abs(info.last_seq - agent.answered) + abs(info.answered_seq - agent.answered)
        twice += abs(round(info.total_reward) - agent.answered)
    return taken, lost, twice


async def agents_of(bus: Bus, group: RolloutGroup) -> list[BenchmarkAgent]:
    """Return an agent for each rollout, on one node."""
    news = ShardNews(bus)
    await bus.subscribe(subjects.SHARDS_TAKEN, ShardTaken, news.taken)
    gateway = ChronusGateway(bus, StepLog(_NODE, None), _NODE, SystemClock(), news)
    return [
        BenchmarkAgent(gateway, rollout.id, f"agent{number}")
        for number, rollout in enumerate(group.rollouts)
    ]


async def run(options: Options) -> Report:
    """Kill owners, and count."""
    rounds = options.count or min(options.rounds, 5)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-failover-") as directory:
        async with nats_for_tests() as nats:
            taken, lost, twice = await measure(nats, Path(directory), rounds)
    return Report(
        name="failover",
        figures={
            "writes_go_on_p50_s": median(taken),
            "writes_go_on_max_s": max(taken),
            "rollouts": ROLLOUTS,
            "kills": len(taken),
        },
        reach=(
            Reach.at_most("writes_go_on_max_s", max(taken), 2.0),
            Reach.at_most("steps_lost", lost, 0),
            Reach.at_most("steps_applied_twice", twice, 0),
        ),
    )
