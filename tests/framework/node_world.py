"""A node without a bus: the parts around the core, on a recording kernel."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from dsec_common.behavior import BehaviorLog
from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.clock import Clock, SystemClock
from dsec_common.wire.node import PlaceSandbox, Resources
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    SandboxCreated,
    SandboxDeleted,
)
from dsec_sandboxd.admission import NodeRules
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.exec_service import ExecService
from dsec_sandboxd.files import Files
from dsec_sandboxd.first_command import FirstCommands
from dsec_sandboxd.gate import Gate
from dsec_sandboxd.kernel.recording import RecordingKernel
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.making import Maker
from dsec_sandboxd.performer import Parts
from dsec_sandboxd.quick_wakes import QuickWakes
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.run_directory import RunDirectory
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog
from node_neighbours import Caller, Layers, Memory, Sockets, Stream
from refusals import refused as refused  # noqa: PLC0414  for its importers

NODE = "n1"
MIB = 1024 * 1024


class World:
    """A node without a bus: the parts, and what they did."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.kernel = RecordingKernel()
        self.layers = Layers()
        self.holds = LayerHolds(self.kernel, idle_max=0)
        self.store = RecordStore(directory / "records")
        self.stream = Stream()
        self.caller = Caller()
        self.sockets = Sockets()
        self.steps: list[BehaviorLog] = []
        # On a tmpfs already, so that nothing has to be mounted and the test needs no root.
        self.memory = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dsec-run-")
        self.directories = RunDirectory(Path(self.memory.name))
        self.events = EventPublisher(self.stream)
        self.tasks: list[asyncio.Task[None]] = []
        self.build()

    def build(self) -> None:
        step_log = StepLog(NODE, self.steps, keeper=self.store)
        self.state = NodeState(
            NodeRules(
                node=NODE,
                physical=Resources(cpus=8, memory_bytes=8192 * MIB, sandboxes=64),
                capacity=Resources(cpus=8, memory_bytes=8192 * MIB, sandboxes=64),
            )
        )
        self.maker = Maker(self.kernel, self.holds, self.sockets, self.directories)
        self.sandboxes = Sandboxes(
            self.state,
            Parts(
                kernel=self.kernel,
                store=self.store,
                events=self.events,
                steps=step_log,
                layers=LayerCache(self.layers),
                memory=Memory(),
                replier=self.caller,
                clock=self.clock,
            ),
            self.maker,
        )
        earlier: ExecService | None = getattr(self, "execs", None)
        if earlier is not None:
            earlier.close(keep=True)
        self.execs = ExecService(
            SandboxdConfig(node=NODE, exec_timeout_max_s=60.0),
            self.state,
            self.kernel,
            step_log,
            lambda: self.gate,
            clock=self.clock,
            run_path=Path(self.memory.name),
        )
        self.commands = self.execs.commands
        self.gate = Gate(self.sandboxes, QuickWakes(0.0))
        self.sandboxes.take_first_commands(FirstCommands(self.commands, self.gate, self.store))
        self.files = Files(self.state, self.kernel, step_log, self.clock, idle_s=60.0)
        self.maker.on_end(self.files)
        if earlier is not None:
            self.execs.open(self.maker)

    async def start(self) -> None:
        await self.kernel.start()
        self.directories.open()
        self.execs.open(self.maker)
        await self.sandboxes.recover()
        self.tasks = [
            asyncio.create_task(self.events.run()),
            asyncio.create_task(self.sandboxes.watch_ended()),
        ]

    async def stop(self) -> None:
        await self.sandboxes.evacuate("the test is over")
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.execs.close(keep=False)
        await self.kernel.close()
        await self.commands.aclose()
        await self.holds.close()
        self.store.close()

    async def place(self, local: str = "s1", **changes: Any) -> SandboxCreated:
        message = msgspec.structs.replace(
            PlaceSandbox(
                project="p",
                local=local,
                request=CreateSandbox(base="base@1", toolkits=("tool@1",)),
                valid_until=self.clock.now() + 60,
            ),
            **changes,
        )
        request = Request(
            message=message,
            subject="dsec.v1._sys.node.n1.place",
            tokens=(),
            headers={},
            reply_to="_INBOX.scheduler",
            caller=ReplyAddress("_R_.caller"),
            content_type="",
            traceparent="",
        )
        return await self.sandboxes.place(request)

    def ask(self, local: str, message: Any) -> Request[Any]:
        subject = f"dsec.v1.p.sandbox.{NODE}.{local}.verb"
        return Request(
            message=message,
            subject=subject,
            tokens=tuple(subject.split(".")),
            headers={},
            reply_to="_R_.x",
            caller=ReplyAddress("_R_.x"),
            content_type="",
            traceparent="",
        )

    async def delete(self, local: str = "s1") -> SandboxDeleted:
        return await self.sandboxes.delete(self.ask(local, DeleteSandbox()))

    def left(self) -> dict[str, Any]:
        """Return everything that is held for sandboxes."""
        self.state.validate_state()
        return {
            "kernel": self.kernel.alive,
            "sockets": self.sockets.open_now,
            "directories": [path.name for path in self.directories.path.iterdir()],
            "layers": [digest for digest in self.kernel.layers if self.holds.users(digest)],
            "sandboxes": self.state.allocated.sandboxes,
        }


NOTHING: dict[str, Any] = {
    "kernel": [],
    "sockets": set(),
    "directories": [],
    "layers": [],
    "sandboxes": 0,
}
