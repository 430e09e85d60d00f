"""A node, schedulers, and an agent whose state is made of what others change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from dsec.client import DSecClient
from dsec.sandbox import Sandbox
from dsec_common.clock import SystemClock
from dsec_common.wire.agent import ACTIVE
from dsec_common.wire.sandbox import SandboxInfo
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.service import SchedulerService
from sandboxd_node import BASE, NODE, NodeForTests

#: Counts in a file for as long as it runs.
COUNTING = "i=0; while :; do i=$((i + 1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done"

#: Takes the versions over, after a wait or never where it is told so, and notes with which count
#: it began and ended: one and the same if the agent stood still.
SYNCHRONISING = """
cat > /tmp/told; began=$(cat /tmp/count 2> /dev/null)
while [ -e /tmp/wait ]; do :; done
if [ -e /tmp/fail ]; then echo the store is away >&2; exit 3; fi
i=0; while [ $i -lt 50 ]; do i=$((i + 1)); cat /tmp/told > /dev/null; done
echo "$began $(cat /tmp/count 2> /dev/null)" >> /tmp/turns
"""


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return int(SystemClock().now() * 1000)


class Inside:
    """A sandbox's files as the host sees them, which asks the sandbox for nothing."""

    def __init__(self, sandbox: Sandbox) -> None:
        local = sandbox.id.partition(".")[2]
        unified = Path("/sys/fs/cgroup/unified")
        self.cgroup = (unified if unified.exists() else unified.parent) / f"dsec-{NODE}" / local
        pid = (self.cgroup / "cgroup.procs").read_text().split()[0]
        self._root = Path(f"/proc/{pid}/root")

    def read(self, name: str) -> str:
        """Return a file of ``/tmp``; empty when it is not there."""
        try:
            return (self._root / "tmp" / name).read_text().strip()
        except FileNotFoundError:
            return ""

    def touch(self, name: str) -> None:
        """Make an empty file in ``/tmp``."""
        (self._root / "tmp" / name).write_text("")

    def remove(self, name: str) -> None:
        """Remove a file of ``/tmp``."""
        (self._root / "tmp" / name).unlink()

    @property
    def frozen(self) -> bool:
        """Whether all of it stands still."""
        return "frozen 1" in (self.cgroup / "cgroup.events").read_text()

    def stood_still(self) -> list[bool]:
        """Return of each time it was synchronised whether the agent stood still meanwhile."""
        return [len(set(turn.split())) == 1 for turn in self.read("turns").splitlines()]


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when it holds."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


class ConsistencyWorld:
    """A node, schedulers, and a project's client with the agent ``trader``."""

    def __init__(self, node: NodeForTests, client: DSecClient) -> None:
        self.node = node
        self.client = client
        self.agents = client.agents
        self.schedulers: list[SchedulerService] = []

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings with which a service finds the server."""
        bus = self.node.nats.service_config(role)
        return {"nats_servers": bus.servers, "nats_credentials": bus.credentials_path}

    async def scheduler(self) -> SchedulerService:
        """Return one more scheduler."""
        scheduler = SchedulerService(
            SchedulerConfig(
                node_timeout_s=5.0,
                warm_up_s=0.25,  # a heartbeat of the node
                drain_timeout_s=1.0,
                **self.settings("scheduler"),
            )
        )
        await scheduler.start()
        self.schedulers.append(scheduler)
        return scheduler

    async def register(self) -> None:
        """Register the agent, which depends on ``prices`` and ``orders``."""
        contract = {
            "depends_on": ["prices", "orders"],
            "synchronise": ["/bin/sh", "-c", SYNCHRONISING],
        }
        await self.agents.register("trader", "1", base=BASE, contract=contract)

    async def trader(self) -> tuple[Sandbox, Inside]:
        """Return an instance that counts and that the registry knows."""
        sandbox = await self.client.create_sandbox(agent="trader", agent_version=ACTIVE)
        await sandbox.start(["/bin/sh", "-c", COUNTING])
        inside = Inside(sandbox)
        await until(lambda: bool(inside.read("count")))
        async with asyncio.timeout(20):
            while sandbox.id not in {
                one.sandbox_id for one in await self.agents.instances("trader")
            }:
                await asyncio.sleep(0.02)
        return sandbox, inside

    async def info(self, sandbox: Sandbox, holds: Callable[[SandboxInfo], bool]) -> SandboxInfo:
        """Return what the node says of a sandbox once it is so."""
        async with asyncio.timeout(30):
            while not holds(info := await sandbox.inspect()):
                await asyncio.sleep(0.02)
        return info


async def goes_on(inside: Inside) -> None:
    """Return when the agent has counted on."""
    before = inside.read("count")
    await until(lambda: inside.read("count") not in {before, ""})


@contextlib.asynccontextmanager
async def consistency_world(node: NodeForTests) -> AsyncIterator[ConsistencyWorld]:
    """Yield a world with one scheduler, in which the agent is registered."""
    credentials = str(node.nats.auth.project("default"))
    async with DSecClient([node.nats.server.url], credentials) as client:
        world = ConsistencyWorld(node, client)
        await world.scheduler()
        try:
            await world.register()
            yield world
        finally:
            for scheduler in world.schedulers:
                if scheduler.state not in {"stopped", "failed"}:
                    assert await scheduler.stop() == 0
