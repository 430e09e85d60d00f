"""What the parts of the daemon ask of each other, as narrow as they need it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from dsec_common.bus_types import ReplyAddress
from dsec_common.wire.base import Message
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.records import SandboxRecord


class AgentSockets(Protocol):
    """The sockets over which processes in sandboxes reach the platform."""

    async def open(self, record: SandboxRecord, directory: Path) -> None:
        """Listen in ``directory``, which the sandbox sees at ``/run/dsec``."""
        ...

    async def close(self, local: str) -> None:
        """Stop listening for a sandbox. Idempotent."""
        ...


class Uses(Protocol):
    """Counts what is in use, by which a node knows the idle sandboxes."""

    def began(self, local: str) -> None:
        """Count a use of a sandbox by what runs in it."""
        ...

    def ended(self, local: str) -> None:
        """Count the end of a use; once for each beginning."""
        ...


class Replier(Protocol):
    """The part of the bus that answers a caller whose request was handed on."""

    async def reply(self, to: ReplyAddress, message: Message) -> None:
        """Send ``message`` to the caller."""
        ...


class SnapshotHold(Protocol):
    """What one sandbox has mounted of snapshots."""

    digests: tuple[str, ...]
    """By which the kernel knows them, lowest first."""

    def release(self) -> None:
        """Let go of them. Idempotent."""
        ...


class SnapshotLayers(Protocol):
    """Has the layers of snapshots mounted for sandboxes."""

    async def hold(self, local: str, layers: Sequence[str]) -> SnapshotHold:
        """Have them mounted for a sandbox that is to be made.

        Raises:
            DsecError: ``not_found`` or ``layer_error``; then none is held.
        """
        ...

    def adopt(self, local: str, layers: Sequence[str]) -> SnapshotHold:
        """Count a sandbox that has them mounted already."""
        ...


#: Is told, by its id, of a sandbox whose processes are about to end while it goes on itself.
PutBackListener = Callable[[str], Awaitable[None]]


class EndListener(Protocol):
    """Is told before a sandbox is removed, so that it can let go of descriptors in it."""

    async def sandbox_ending(self, local: str) -> None:
        """Let go of everything that belongs to a sandbox. Idempotent."""
        ...


class WarmSandboxes(Protocol):
    """Has sandboxes that were made ahead of need."""

    def claim(
        self, request: CreateSandbox, record: SandboxRecord, layers: tuple[Layer, ...]
    ) -> SandboxRecord:
        """Return the record as that of one of them, which is nobody else's then, or as it is."""
        ...

    def claim_next(self, record: SandboxRecord) -> SandboxRecord:
        """Do the same after the one that was claimed has turned out to be of no use; drop that."""
        ...

    def give_back(self, record: SandboxRecord) -> None:
        """Have one that was claimed wait again: nothing was done with it."""
        ...

    def handed_out(self, record: SandboxRecord) -> None:
        """Note that one that was claimed is its owner's."""
        ...

    def passed_over(self) -> None:
        """Note that a sandbox is made now for somebody who waits: it may need the room."""
        ...


class AdoptionListener(Protocol):
    """Is told of a sandbox that lives on under this daemon, before any request reaches it."""

    async def sandbox_adopted(self, record: SandboxRecord) -> None:
        """Take over what goes on in the sandbox.

        Raises:
            DsecError: when it cannot; the sandbox is then ended with that reason.
        """
        ...


class SandboxNetworks(EndListener, Protocol):
    """Connects sandboxes to what they may reach."""

    async def check(self, *policies: NetworkPolicy | None) -> None:
        """Refuse policies that are wrong, or that this host cannot enforce."""
        ...

    def expect(self, record: SandboxRecord) -> None:
        """Begin with the rules of a sandbox that is being made, if it is to have a network."""
        ...

    def inherited(self, local: str) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
        """Return ``network`` and ``setup_network`` of a child that begins where a sandbox is."""
        ...

    async def attach(self, record: SandboxRecord) -> None:
        """Give a sandbox that nothing runs in yet the network that was asked for with it."""
        ...


class MemoryAvailable(Protocol):
    """Knows what the kernel could hand out now."""

    def memory_bytes_available(self) -> int:
        """Return the bytes, at most a fraction of a second old."""
        ...
