"""What the parts of the daemon ask of each other, as narrow as they need it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dsec_common.bus_types import ReplyAddress
from dsec_common.wire.base import Message
from dsec_sandboxd.records import SandboxRecord


class AgentSockets(Protocol):
    """The sockets over which processes in sandboxes reach the platform."""

    async def open(self, record: SandboxRecord, directory: Path) -> None:
        """Listen in ``directory``, which the sandbox sees at ``/run/dsec``."""
        ...

    async def close(self, local: str) -> None:
        """Stop listening for a sandbox. Idempotent."""
        ...


class Replier(Protocol):
    """The part of the bus that answers a caller whose request was handed on."""

    async def reply(self, to: ReplyAddress, message: Message) -> None:
        """Send ``message`` to the caller."""
        ...


class EndListener(Protocol):
    """Is told before a sandbox is removed, so that it can let go of descriptors in it."""

    async def sandbox_ending(self, local: str) -> None:
        """Let go of everything that belongs to a sandbox. Idempotent."""
        ...


class MemoryAvailable(Protocol):
    """Knows what the kernel could hand out now."""

    def memory_bytes_available(self) -> int:
        """Return the bytes, at most a fraction of a second old."""
        ...
