"""Agent sockets in a test: a server over rollouts in memory, and a bare client to be rude with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.rollout import FeedbackState, Restoration, RolloutInfo, RolloutState
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.agent_limits import AgentLimits
from dsec_sandboxd.agent_socket import SOCKET_NAME, AgentSocketServer
from dsec_sandboxd.records import SandboxRecord

NODE = "node-1"
LOCAL = "01sandbox"
ROLLOUT = "s0.01rollout"


def sandbox_record(
    local: str = LOCAL, rollout_id: str = ROLLOUT, project: str = "default"
) -> SandboxRecord:
    """Return the record of a running sandbox."""
    return SandboxRecord(
        local=local,
        project=project,
        placement_id="p",
        request_id="r",
        state=SandboxState.RUNNING,
        created_at=0.0,
        layer_references=(),
        layer_digests=(),
        limits=Limits(),
        agent="tester",
        rollout_id=rollout_id,
    )


@dataclass
class MemoryGateway:
    """One rollout's rules without a bus; ``away`` makes the platform unreachable."""

    reports: list[tuple[str, Any]] = field(default_factory=list)
    feedback: dict[int, FeedbackState] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    away: bool = False
    restoration: Restoration | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    waiting: int = 0

    def _reachable(self) -> None:
        if self.away:
            raise unavailable("the platform is away")

    async def inspect(self, record: SandboxRecord, deadline: float) -> RolloutInfo:
        """Return the newest report's number."""
        self._reachable()
        return RolloutInfo(
            rollout_id=record.rollout_id,
            state=RolloutState.OPEN,
            last_seq=len(self.reports),
            restoration=self.restoration,
        )

    async def report(
        self, record: SandboxRecord, seq: int, stage: str, payload: bytes, deadline: float
    ) -> bool:
        """Add a report by the platform's rules."""
        self._reachable()
        report = (stage, msgspec.msgpack.decode(payload))
        if seq <= len(self.reports):
            if self.reports[seq - 1] != report:
                raise DsecError(ErrorCode.CONFLICT, f"report {seq} is another")
            return True
        if seq > len(self.reports) + 1:
            raise invalid(f"{len(self.reports) + 1} is expected")
        async with self.changed:
            self.reports.append(report)
            self.changed.notify_all()
        return False

    async def step(
        self,
        record: SandboxRecord,
        seq: int,
        stage: str,
        payload: bytes,
        *,
        deadline: float,
        away_until: float,
    ) -> FeedbackState:
        """Report, and wait for the test to give feedback."""
        await self.report(record, seq, stage, payload, away_until)
        return await self.await_feedback(record, seq, deadline)

    async def await_feedback(
        self, record: SandboxRecord, seq: int, deadline: float
    ) -> FeedbackState:
        """Wait for the test to give feedback."""
        self._reachable()
        self.waiting += 1
        try:
            async with asyncio.timeout(max(deadline - SystemClock().monotonic(), 0)), self.changed:
                await self.changed.wait_for(lambda: seq in self.feedback)
        except TimeoutError:
            return FeedbackState(ready=False, seq=seq)
        finally:
            self.waiting -= 1
        return self.feedback[seq]

    def reserve(self, record: SandboxRecord, count: int) -> None:
        """Remember nothing: the steps follow."""

    def log(self, record: SandboxRecord, action: str, **step: Any) -> None:
        """Remember a step."""
        self.steps.append({"local": record.local, "action": action, **step})

    async def give(
        self, seq: int, payload: Any = None, *, reward: float | None = None, done: bool = False
    ) -> None:
        """Answer a report."""
        async with self.changed:
            self.feedback[seq] = FeedbackState(
                ready=True, seq=seq, payload=payload, reward=reward, done=done
            )
            self.changed.notify_all()

    async def reported(self, count: int) -> None:
        """Return when there are so many reports."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.reports) >= count)

    def actions(self) -> list[str]:
        """Return what was logged, by name."""
        return [str(step["action"]) for step in self.steps]


class RawAgent:
    """Speaks the protocol byte by byte, politely or not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, request: Mapping[str, Any] | bytes) -> None:
        """Send a request, or any bytes as the body of a frame."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        self.writer.write(struct.pack(">I", len(body)) + body)
        await self.writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            asyncio.IncompleteReadError: the node closed the connection.
        """
        (length,) = struct.unpack(">I", await self.reader.readexactly(4))
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(length))
        return answer

    async def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        await self.send({"id": 1, "op": op, **request})
        return await self.receive()

    async def is_closed(self) -> bool:
        """Return whether the node closes the connection without a further answer."""
        try:
            return not await self.reader.read(1)
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        """Hang up."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class AgentWorld:
    """A server with one sandbox's socket, and who connects to it."""

    server: AgentSocketServer
    gateway: MemoryGateway
    directory: Path
    _agents: list[RawAgent] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The sandbox's socket."""
        return self.directory / SOCKET_NAME

    async def agent(self) -> RawAgent:
        """Connect; closed when the world ends."""
        agent = RawAgent(*await asyncio.open_unix_connection(str(self.path), limit=2**23))
        self._agents.append(agent)
        return agent

    async def until_connections(self, count: int) -> None:
        """Return when the server has so many connections."""
        async with asyncio.timeout(10):
            while self.server.connections != count:
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Hang up everywhere and stop the server."""
        for agent in self._agents:
            await agent.close()
        await self.server.aclose()


@contextlib.asynccontextmanager
async def agent_world(
    directory: Path, limits: AgentLimits | None = None, *, rollout_id: str = ROLLOUT
) -> AsyncIterator[AgentWorld]:
    """Yield a server that listens for one sandbox."""
    gateway = MemoryGateway()
    server = AgentSocketServer(gateway, NODE, limits=limits)
    await server.open(sandbox_record(rollout_id=rollout_id), directory)
    world = AgentWorld(server, gateway, directory)
    try:
        yield world
    finally:
        await world.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def answers_others(world: AgentWorld) -> None:
    """Check that a polite agent is served at once."""
    polite = await world.agent()
    async with asyncio.timeout(20):
        assert (await polite.ask("hello"))["result"]["sandbox_id"] == f"{NODE}.{LOCAL}"
    await polite.close()
