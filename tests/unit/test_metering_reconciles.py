"""The bill is what leases and sandboxes held and used, to the millisecond, whatever happened."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from broker_world import World as Brokers
from broker_world import heartbeat
from dsec_broker.config import BrokerConfig
from dsec_common.compute.model import GpuDemand, Slice
from dsec_common.metering import MICRO, LeaseSegment, SandboxSegment
from dsec_common.wire.cost import Amounts
from dsec_common.wire.lease import GrantLease, LeaseGranted
from dsec_sandboxd.discovery.gpus import GpuSample
from dsec_sandboxd.discovery.use import GpuProcess
from dsec_tracer.bills import Bills
from metering_world import INTERVAL_S, MIB, World

CONFIG = BrokerConfig(
    kafka_bootstrap="kafka:9092", clock_skew_s=0.0, metering_interval_s=INTERVAL_S
)
CARD_CU = 100
AGENTS = ("coder", "writer")
IDS = 65_536


@dataclass
class Sums:
    """What is known of a sandbox's use, and for how long nothing is."""

    used: int = 0
    memory: int = 0
    unknown_ms: int = 0


@dataclass
class Life:
    """One sandbox on its lease, as it really was."""

    agent: str
    lease: LeaseGranted
    base_id: int
    born_ms: int
    read_ms: int
    level: int | None = None
    sums: Sums = field(default_factory=Sums)
    told: Sums = field(default_factory=Sums)
    told_ms: int = 0


class Cluster:
    """A node and the brokers, and beside them the truth."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  the same each time
        self.node, self.brokers = World(directory), Brokers(2, CONFIG)
        self.brokers.now = self.node.clock.now()
        self.brokers.see(heartbeat("node-1", "NVIDIA A100", sent_at=self.brokers.now))
        self.lives: dict[str, Life] = {}
        self.over: list[Life] = []
        self.held: dict[str, int] = dict.fromkeys(AGENTS, 0)
        self.ms: dict[str, int] = dict.fromkeys(AGENTS, 0)

    @property
    def now_ms(self) -> int:
        return round(self.node.clock.now() * 1000)

    async def pass_time(self) -> None:
        before_ms = self.now_ms
        await self.node.clock.advance(self.chance.choice([0.001, 0.987, 1.0, 61.0]))
        self.brokers.now = self.node.clock.now()
        for life in self.lives.values():
            lasted_ms = self.now_ms - before_ms
            self.held[life.agent] += round(life.lease.cu * MICRO) * lasted_ms
            self.ms[life.agent] += lasted_ms

    def grant(self) -> None:
        agent = self.chance.choice(AGENTS)
        demand = GpuDemand(min_cu=5.0, max_cu=self.chance.choice([5.0, 20.0]))
        broker = self.brokers.brokers[0]
        broker.see(heartbeat("node-1", "NVIDIA A100", sent_at=self.brokers.now))
        request = broker.ask(
            GrantLease(
                project="team", holder="", demand=demand, node="node-1", ttl_s=80_000.0, agent=agent
            )
        )
        broker.settle()
        granted = broker.answers.get(request)
        if not isinstance(granted, LeaseGranted):
            return
        base_id = (len(self.lives) + len(self.over) + 1) * IDS
        local = f"s{base_id}"
        record = self.node.record(local, slices=granted.slices, base_id=base_id)
        record = msgspec.structs.replace(record, agent=agent, lease_id=granted.lease_id)
        self.node.records[local] = record
        self.node.kernel.uses[local] = (1.0, MIB)
        self.node.meters.began(record)
        now = self.now_ms
        self.lives[local] = Life(agent, granted, base_id, now, now, told_ms=now)

    def resize(self) -> None:
        """Give a lease another share, and let its node know."""
        local = self.chance.choice(sorted(self.lives))
        life = self.lives[local]
        broker = self.brokers.brokers[0]
        broker.resize({life.lease.lease_id: self.chance.choice([5.0, 10.0])})
        broker.settle()
        lease = self.brokers.lease(life.lease.lease_id)
        life.lease = msgspec.structs.replace(life.lease, slices=lease.slices, cu=lease.cu)
        changed = msgspec.structs.replace(self.node.records[local], slices=lease.slices)
        self.node.records[local] = changed

    def read(self) -> None:
        """Have the driver tell of every sandbox, of some not, or of none."""
        listed: dict[str, list[GpuProcess]] = {}
        hangs = self.chance.random() < 0.1
        for local, life in self.lives.items():
            tells = self.chance.random() < 0.9
            busy_us, level = self.chance.randrange(10**6), self.chance.randrange(MIB)
            self._pass(life, level if tells and not hangs else None)
            if tells and not hangs:
                life.sums.used += busy_us * CARD_CU * MICRO // 1000
            process = GpuProcess(
                pid=1,
                gpu="",
                user=life.base_id + 7,
                memory_bytes=level if tells else None,
                busy_us=busy_us if tells else None,
            )
            slice_: Slice = self.node.records[local].slices[0]
            listed.setdefault(slice_.place, []).append(process)
        processes = {place: tuple(each) for place, each in listed.items()}
        self.node.gpus.seen(GpuSample() if hangs else GpuSample(processes=processes))

    def _pass(self, life: Life, level: int | None) -> None:
        lasted_ms = self.now_ms - life.read_ms
        life.read_ms, life.level = self.now_ms, level
        if level is None:
            life.sums.unknown_ms += lasted_ms
        else:
            life.sums.memory += level * lasted_ms

    async def tick(self) -> None:
        told = len(self.node.topic.segments)
        await self.node.meters.tick()
        for segment in self.node.topic.segments[told:]:
            life = self.lives[segment.sandbox_id.partition(".")[2]]
            self._pass(life, life.level)
            life.told, life.told_ms = replace(life.sums), self.now_ms

    async def restart(self) -> None:
        """Kill the node's daemon and start another, which knows what was told and no more."""
        self.node.restart()
        for local, life in self.lives.items():
            await self.node.meters.sandbox_adopted(self.node.records[local])
            life.sums = replace(life.told)
            life.sums.unknown_ms += self.now_ms - life.told_ms
            life.read_ms, life.level = self.now_ms, None

    async def end(self) -> None:
        local = self.chance.choice(sorted(self.lives))
        life = self.lives.pop(local)
        self._pass(life, life.level)
        self.over.append(life)
        await self.node.end(self.node.records[local])
        broker = self.brokers.brokers[0]
        broker.release(life.lease.lease_id)
        broker.settle()

    def bill(self) -> dict[str, Amounts]:
        """Add up everything told, in any order and some of it twice."""
        records: list[LeaseSegment | SandboxSegment] = [
            *self.brokers.told,
            *self.node.topic.segments,
        ]
        records += self.chance.sample(records, len(records) // 2)
        self.chance.shuffle(records)
        bills = Bills()
        for record in records:
            bills.segment(record)
        assert bills.missing == 0
        rows = bills.rows("team", 0, 10**9, by_agent=True)
        return {row.agent: row.amounts for row in rows}


def _sum(lives: Iterable[Life], agent: str) -> Sums:
    found = Sums()
    for life in lives:
        if life.agent == agent:
            found.used += life.sums.used
            found.memory += life.sums.memory
            found.unknown_ms += life.sums.unknown_ms
    return found


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "records", request.param)
    yield cluster
    cluster.node.database.close()


@pytest.mark.parametrize("cluster", range(12), indirect=True)
async def test_every_millisecond_held_and_used_is_on_the_bill_once(cluster: Cluster) -> None:
    for _ in range(250):
        await cluster.pass_time()
        event = cluster.chance.choices(
            ["grant", "read", "tick", "resize", "restart", "end"], [3, 10, 4, 1, 0.3, 2]
        )[0]
        if event == "grant":
            cluster.grant()
        elif event == "read":
            cluster.read()
        elif event == "tick":
            await cluster.tick()
        elif event == "restart":
            await cluster.restart()
        elif cluster.lives and event == "resize":
            cluster.resize()
        elif cluster.lives:
            await cluster.end()
    while cluster.lives:
        await cluster.end()
    bill = cluster.bill()
    assert bill.keys() == set(AGENTS)
    for agent, amounts in bill.items():
        used = _sum(cluster.over, agent)
        assert amounts.cu_micro_ms == cluster.held[agent]
        assert amounts.lease_ms == amounts.sandbox_ms == cluster.ms[agent]
        assert amounts.cu_used_micro_ms == used.used
        assert amounts.gpu_memory_byte_ms == used.memory
        assert amounts.cu_used_unknown_ms == amounts.gpu_memory_unknown_ms == used.unknown_ms
        assert used.unknown_ms > 0
