"""What is known of one snapshot layer on its node, and what one sandbox holds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol


def memory_name(layer: str) -> str:
    """Return under which name the kernel holds a layer's copy in memory."""
    return f"snapshot:{layer}:memory"


def image_name(layer: str) -> str:
    """Return under which name the kernel holds a layer's image."""
    return f"snapshot:{layer}"


@dataclass(slots=True)
class StoredLayer:
    """Where one snapshot layer is now."""

    mount_fd: int = -1
    """Our hold on the copy in memory; -1 when there is none."""
    memory_bytes: int = 0
    in_memory: bool = False
    """The kernel holds the copy."""
    memory_users: int = 0
    mounted: bool = False
    """The kernel holds the image."""
    image_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody waits for it to be durable."""
    packed: asyncio.Event = field(default_factory=asyncio.Event)
    """It is durable, or packing has failed."""
    packing: asyncio.Future[int] | None = None
    """The program that makes its image."""
    detail: str = ""


class LayerStack(Protocol):
    """What names layers of the layer store, lowest first."""

    @property
    def layer_references(self) -> tuple[str, ...]:
        """As they were named."""
        ...

    @property
    def layer_digests(self) -> tuple[str, ...]:
        """What they are."""
        ...


class LayerOwner(Protocol):
    """Whoever counts the users of snapshot layers."""

    def let_go(self, layers: Sequence[str], taken: Collection[tuple[str, bool]]) -> None:
        """Count one user less of ``layers``, of which ``taken`` were mounted for it."""
        ...


class Hold:
    """What one sandbox has mounted of snapshots; see :class:`~dsec_sandboxd.ports.SnapshotHold`."""

    def __init__(self, owner: LayerOwner, layers: Sequence[str]) -> None:
        self.digests: tuple[str, ...] = ()
        self.taken: list[tuple[str, bool]] = []
        """Which layers, and whether each is the copy in memory."""
        self._owner = owner
        self._layers = tuple(layers)
        self._released = False

    def release(self) -> None:
        """Let go of them. Idempotent."""
        if not self._released:
            self._released = True
            self._owner.let_go(self._layers, self.taken)
