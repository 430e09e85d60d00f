"""A node daemon in a test: real NATS, a real layer store, and the peers that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.rootfs import build_host_rootfs
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import ReplyAddress
from dsec_common.clock import SystemClock
from dsec_common.streams import EVENTS
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.elastic import SandboxResized
from dsec_common.wire.layer import LayerImportProgress, LayerKind
from dsec_common.wire.life import SandboxPaused, SandboxResumed
from dsec_common.wire.node import NodeHeartbeat, PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    ExecCommand,
    ExecResult,
    SandboxCreated,
    SandboxEnded,
    SandboxRunning,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.service import SandboxdService

NODE = f"component-{os.getpid()}"
BASE = "base@1"
TOOLKIT = "tools@1"
R = TypeVar("R", bound=Message)


async def connect_to_agent_socket(
    directory: Path,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the agent's socket in a sandbox's run directory, whose path may be too long."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}/agent.sock")
    finally:
        os.close(descriptor)


def build_layers(directory: Path) -> None:
    """Make a layer store with ``base@1`` (the host's shell) and ``tools@1`` for two projects."""

    async def build() -> None:
        root, tools = directory / "root", directory / "tools"
        build_host_rootfs(root, python=False)
        (tools / "opt" / "tools").mkdir(parents=True)
        (tools / "opt" / "tools" / "hello").write_text("hello from the toolkit\n")
        async with LayerStore(directory / "store") as store:
            for project in ("default", "other"):
                await store.import_layer(project, "base", "1", root, kind=LayerKind.BASE)
                await store.import_layer(project, "tools", "1", tools, kind=LayerKind.TOOLKIT)

    asyncio.run(build())


class NodeForTests:
    """One running daemon, the scheduler's bus, and the buses of two projects."""

    def __init__(self, nats: NatsForTests, directory: Path, layers: Path, **settings: Any) -> None:
        self.nats = nats
        self.directory = directory
        self.config = msgspec.structs.replace(
            SandboxdConfig(
                nats_servers=(nats.server.url,),
                nats_credentials=str(nats.auth.service_credentials("sandboxd", NODE)),
                node=NODE,
                layers_directory=str(layers),
                run_directory=str(directory / "run"),
                state_directory=str(directory / "state"),
                drain_timeout_s=5.0,
                heartbeat_interval_s=0.2,
                network_uplink="manual",
            ),
            **settings,
        )
        self.service: SandboxdService
        self.scheduler: Bus
        self.project: Bus
        self.other: Bus
        self.events: list[Message] = []
        self.heartbeats: list[NodeHeartbeat] = []
        self.patience_s = 20.0  # an answer that a killed daemon owed never comes
        self._event_seen = asyncio.Event()

    async def start_service(self, kernel: Kernel | None = None, **parts: Any) -> None:
        """Start the daemon as its process would."""
        self.service = self.make_service(kernel, **parts)
        await self.service.start()

    def make_service(self, kernel: Kernel | None = None, **parts: Any) -> SandboxdService:
        """Return a daemon of this node that has not started."""
        return SandboxdService(self.config, kernel=kernel, **parts)

    async def stop_service(self) -> int:
        """Stop the daemon as SIGTERM would; return the exit code."""
        return await self.service.stop()

    async def listen(self) -> None:
        """Be the scheduler: own the event stream, hear events and heartbeats."""
        await self.scheduler.ensure_stream(EVENTS)

        async def on_event(request: Any) -> None:
            self.events.append(request.message)
            self._event_seen.set()

        async def on_heartbeat(request: Any) -> None:
            self.heartbeats.append(request.message)
            self._event_seen.set()

        # The bus decodes whatever msgspec can, a union too; its signature names the usual case.
        kinds: Any = (
            SandboxRunning
            | SandboxPaused
            | SandboxResumed
            | SandboxResized
            | SandboxEnded
            | LayerImportProgress
        )
        # From the stream: a plain subscription misses what is published while it reconnects.
        await self.scheduler.consume(EVENTS.name, "test", kinds, on_event, max_in_flight=1)
        await self.scheduler.subscribe(subjects.HEARTBEATS, NodeHeartbeat, on_heartbeat)
        await self.scheduler.flush()

    async def until(self, holds: Any, timeout_s: float = 20.0) -> None:
        """Return when ``holds()`` is true; looked at after each event and heartbeat."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._event_seen.clear()
                await self._event_seen.wait()

    async def event_of(self, sandbox_id: str, kind: type[R]) -> R:
        """Return the event of this kind of one sandbox."""

        def found() -> list[R]:
            return [
                event
                for event in self.events
                if isinstance(event, kind) and getattr(event, "sandbox_id", "") == sandbox_id
            ]

        await self.until(found)
        return found()[0]

    async def place(
        self,
        request: CreateSandbox | None = None,
        *,
        project: str = "default",
        valid_s: float = 10.0,
        caller: ReplyAddress | None = None,
        **changes: Any,
    ) -> SandboxCreated:
        """Ask as the scheduler does."""
        place = PlaceSandbox(
            project=project,
            local=new_id(),
            request=request or CreateSandbox(base=BASE),
            valid_until=SystemClock().now() + valid_s,
        )
        return await self.scheduler.request(
            subjects.node_request(NODE, "place"),
            msgspec.structs.replace(place, **changes),
            SandboxCreated,
            timeout_s=self.patience_s,
            caller=caller,
        )

    async def ask(
        self,
        sandbox_id: str,
        verb: str,
        message: Message,
        reply: type[R],
        *,
        bus: Bus | None = None,
        project: str = "default",
        timeout_s: float | None = None,
    ) -> R:
        """Ask as a project's user does."""
        subject = subjects.sandbox(project, ScopedId.parse(sandbox_id), verb)
        return await (bus or self.project).request(
            subject, message, reply, timeout_s=timeout_s or self.patience_s
        )

    async def exec(self, sandbox_id: str, *argv: str, **changes: Any) -> ExecResult:
        """Run a command as a project's user does."""
        return await self.ask(sandbox_id, "exec", ExecCommand(argv=argv, **changes), ExecResult)


@contextlib.asynccontextmanager
async def node_for_tests(
    directory: Path,
    layers: Path,
    *,
    kernel: Kernel | None = None,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[NodeForTests]:
    """Yield a running node; stop it orderly and leave nothing behind."""
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_for_tests(projects=("other",)))
        node = NodeForTests(nats, directory, layers, **settings)
        node.scheduler = await stack.enter_async_context(nats.service("scheduler"))
        node.project = await stack.enter_async_context(nats.project("default"))
        node.other = await stack.enter_async_context(nats.project("other"))
        await node.listen()
        await node.start_service(kernel, **(parts or {}))
        try:
            yield node
        finally:
            assert await node.stop_service() == 0
