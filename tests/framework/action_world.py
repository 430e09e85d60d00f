"""A node whose daemon is a process, with cards of a stand-in, and a real broker: for actions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dsec_broker.config import BrokerConfig
from dsec_broker.service import BrokerService
from dsec_common import subjects
from dsec_common.compute.model import GpuDemand
from dsec_common.wire.action import (
    ActionInfo,
    ActionList,
    ActionOutcome,
    BeginAction,
    EndAction,
    KeepAction,
    ListActions,
)
from dsec_common.wire.exec import ExecInfo, StartExec
from dsec_common.wire.lease import HeldLease, LeaseList, ListLeases, NodeLeases
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import CreateSandbox, ExecCommand, ExecResult
from nvml import Inventory, a100, environment
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests

CARD = f"GPU-{os.getpid()}-action"
MIB = 1 << 20
PATIENCE_S = 20.0


class ActionWorld:
    """The node, its broker, and what tests ask of them again and again."""

    def __init__(
        self,
        daemon: DaemonProcess,
        node: NodeForTests,
        broker: BrokerService,
        inventory: Inventory,
    ) -> None:
        self.daemon = daemon
        self.node = node
        self.broker = broker
        self.inventory = inventory

    async def place(self, **asked: Any) -> str:
        """Return a new sandbox's id."""
        return (await self.node.place(CreateSandbox(base=BASE, **asked))).sandbox_id

    async def begin(self, sandbox_id: str, name: str = "step", **asked: Any) -> ActionInfo:
        """Begin an action."""
        if cu := asked.pop("cu", 0.0):
            asked["gpu"] = GpuDemand(min_cu=cu, max_cu=cu)
        message = BeginAction(name=name, **asked)
        return await self.node.ask(sandbox_id, "begin_action", message, ActionInfo)

    async def end(self, sandbox_id: str, action_id: str, **said: Any) -> ActionInfo:
        """End one."""
        message = EndAction(action_id=action_id, **said)
        return await self.node.ask(sandbox_id, "end_action", message, ActionInfo)

    async def keep(self, sandbox_id: str, action_id: str) -> ActionInfo:
        """Say that one is wanted."""
        message = KeepAction(action_id=action_id)
        return await self.node.ask(sandbox_id, "keep_action", message, ActionInfo)

    async def list(self, sandbox_id: str) -> tuple[ActionInfo, ...]:
        """Return a sandbox's actions."""
        return (await self.node.ask(sandbox_id, "list_actions", ListActions(), ActionList)).actions

    async def only(self, sandbox_id: str) -> ActionInfo:
        """Return the only action of a sandbox."""
        (action,) = await self.list(sandbox_id)
        return action

    async def ended(self, sandbox_id: str, outcome: ActionOutcome) -> ActionInfo:
        """Return the only action of a sandbox once it has ended, as it must."""
        async with asyncio.timeout(PATIENCE_S):
            while (action := await self.only(sandbox_id)).state != "ended":
                await asyncio.sleep(0.02)
        assert action.outcome is outcome, action
        return action

    async def exec(self, sandbox_id: str, action_id: str, text: str) -> ExecResult:
        """Run a line of the shell in an action."""
        command = ExecCommand(argv=("/bin/sh", "-c", text), action=action_id)
        return await self.node.ask(sandbox_id, "exec", command, ExecResult)

    async def say(self, sandbox_id: str, text: str, action_id: str = "") -> str:
        """Run a line of the shell that must succeed, in an action or not; return its output."""
        result = await self.exec(sandbox_id, action_id, text)
        assert result.exit_code == 0, result
        return result.stdout.decode().strip()

    async def start(self, sandbox_id: str, action_id: str, text: str) -> ExecInfo:
        """Start a line of the shell in an action."""
        command = StartExec(argv=("/bin/sh", "-c", text), action=action_id)
        return await self.node.ask(sandbox_id, "start_exec", command, ExecInfo)

    async def _listed(self) -> NodeLeases | None:
        subject = subjects.lease("list")
        found = await self.node.scheduler.request(subject, ListLeases(), LeaseList)
        return next((it for it in found.nodes if it.node == NODE), None)

    async def is_known(self) -> bool:
        """Return whether the broker knows of the card."""
        listed = await self._listed()
        return listed is not None and listed.ready and bool(listed.cards)

    async def leases(self) -> tuple[HeldLease, ...]:
        """Return the leases on this node's cards, as the broker has them."""
        listed = await self._listed()
        return () if listed is None else listed.leases

    async def all_free(self) -> None:
        """Return when no lease is on this node's cards."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.leases():
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def action_world(
    directory: Path, layers: Path, daemon_environment: dict[str, str] | None = None
) -> AsyncIterator[ActionWorld]:
    """Yield a node with one A100 that MPS divides; afterwards nothing is left of it."""
    inventory = Inventory(directory / "gpus")
    inventory.write([a100(0, uuid=CARD)])
    devices, pipes = directory / "dev", directory / "mps"
    devices.mkdir()
    pipes.mkdir()
    (pipes / "control").write_text("of the daemon\n")
    program = shutil.copy("/bin/sleep", directory / "nvidia-cuda-mps-control")
    mps = await asyncio.create_subprocess_exec(program, "600")
    (pipes / "nvidia-cuda-mps-control.pid").write_text(f"{mps.pid}\n")
    for name, device in {"nvidia0": "zero", "nvidiactl": "full", "nvidia-uvm": "full"}.items():
        (devices / name).symlink_to(f"/dev/{device}")
    async with daemon_for_tests(
        directory,
        layers,
        environment={**environment(inventory.path), **(daemon_environment or {})},
        flags={
            "gpu-device-directory": devices,
            "gpu-mps-directory": pipes,
            "gpu-interval-s": 0.1,
        },
    ) as (daemon, node):
        async with new_broker(node) as broker:
            await node.until(lambda: any(beat.gpus for beat in node.heartbeats))
            world = ActionWorld(daemon, node, broker, inventory)
            async with asyncio.timeout(PATIENCE_S):
                while not await world.is_known():
                    await asyncio.sleep(0.02)
            # The router of its network outlasts the tests of a module.
            await world.place(network=NetworkPolicy(mode=NetworkMode.ALLOW))
            yield world
        mps.kill()
        await mps.wait()


@contextlib.asynccontextmanager
async def new_broker(node: NodeForTests, **settings: Any) -> AsyncIterator[BrokerService]:
    """Yield a broker that hears of the node; it stops then, unless it did before."""
    config = BrokerConfig(
        nats_servers=(node.nats.server.url,),
        nats_credentials=str(node.nats.auth.service_credentials("broker")),
        **settings,
    )
    broker = BrokerService(config)
    await broker.start()
    try:
        yield broker
    finally:
        if broker.state not in {"stopped", "failed"}:
            assert await broker.stop() == 0
