"""What the parts of the kernel seam need of each other: the whole has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.sandbox import Sandbox
    from dsec_sandboxd.kernel.spawner import Spawner


class KernelPart(ABC):
    """A part of ``Kernel``; ``LinuxKernel`` is made of them."""

    _sandboxes: dict[str, Sandbox]
    """Those that are alive, by their local id."""

    @abstractmethod
    def _require(self, local: str) -> Sandbox:
        """Return a sandbox, or raise ``not_found``."""

    @abstractmethod
    async def _living_spawner(self) -> Spawner:
        """Return the spawner; one that has died is replaced first."""

    @abstractmethod
    def _base_id(self, slot: int) -> int:
        """Return the first of a sandbox's ids on the host."""
