"""Whoever the node daemon's shell talks to, in memory: each remembers, and can be away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dsec_common.bus_types import ReplyAddress
from dsec_common.errors import unavailable
from dsec_common.wire.base import Message
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.records import SandboxRecord


class Layers:
    """A project's layers by reference."""

    def __init__(self) -> None:
        self.references_version = "1"
        self.asked: list[str] = []

    async def resolve(self, project: str, reference: str) -> Layer:
        self.asked.append(reference)
        name, _, version = reference.partition("@")
        return Layer(
            project=project,
            name=name,
            version=version,
            digest=f"sha256:{name}",
            kind=LayerKind(name) if name in set(LayerKind) else LayerKind.TOOLKIT,
            size_bytes=1,
            entries=1,
            created_at=0.0,
            source_digest="",
            image_path=Path("/images") / name,
        )

    def image_path(self, digest: str) -> Path:
        return Path("/images") / digest.partition(":")[2]


class Memory:
    def memory_bytes_available(self) -> int:
        return 1 << 40


class Caller:
    """Whoever waits for an answer that the scheduler handed on."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.gone = False

    async def reply(self, to: ReplyAddress, message: Message) -> None:
        if self.gone:
            raise unavailable(f"nobody at {to.subject}")
        self.answers.append(message)


class Stream:
    """A stream that remembers, and can be away."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Message]] = []
        self.away = False
        self.asked = asyncio.Event()

    async def js_publish(self, subject: str, message: Message, *, message_id: str = "") -> int:
        self.asked.set()
        if self.away:
            raise unavailable("JetStream is away")
        assert message_id == message.message_id
        self.events.append((subject, message))
        return len(self.events)


class Sockets:
    """Agent sockets that can refuse to open."""

    def __init__(self) -> None:
        self.open_now: set[str] = set()
        self.refuse = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def open(self, record: SandboxRecord, directory: Path) -> None:
        await self.gate.wait()
        if self.refuse:
            raise unavailable("no socket")
        (directory / "agent.sock").touch()
        self.open_now.add(record.local)

    async def close(self, local: str) -> None:
        self.open_now.discard(local)
