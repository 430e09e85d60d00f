"""Hearing of sandboxes that run out of memory, or take what the kernel cannot limit."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from dsec_sandboxd.kernel.hoarding import Hoarders
from dsec_sandboxd.kernel.oom_victims import OomVictims
from dsec_sandboxd.kernel.part import KernelPart

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.cgroups import CgroupDriver


class Watching(KernelPart):
    """The part of ``Kernel`` that is told by the kernel, and asks it nothing meanwhile."""

    _driver: CgroupDriver | None
    _bound: dict[str, str]

    def __init__(self) -> None:
        super().__init__()
        self._victims: OomVictims | None = None
        self._hoarders: Hoarders | None = None

    @abstractmethod
    def _require_driver(self) -> CgroupDriver:
        """Return the driver of this started kernel's cgroups."""

    def _begin_watching(self) -> list[str]:
        """Begin to hear; return the names of what this kernel does not tell."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._require_driver().oom_fileno(), self._read_ooms)
        missing = []
        try:
            self._victims = OomVictims()
            loop.add_reader(self._victims.fileno(), self._read_ooms)
        except OSError:  # out of memory is then told without saying which process died of it
            missing.append("oom_victims")
        try:
            self._hoarders = Hoarders(self._sandboxes.values, self._base_id)
        except OSError:
            missing.append("file_locks")
        return missing

    async def _stop_watching(self) -> None:
        """Stop hearing, and close the driver. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._hoarders is not None:
            await self._hoarders.close()
            self._hoarders = None
        if self._victims is not None:
            loop.remove_reader(self._victims.fileno())
            self._victims.close()
            self._victims = None
        if self._driver is not None:
            loop.remove_reader(self._driver.oom_fileno())
            self._driver.close()

    def _read_ooms(self) -> None:
        for name in self._require_driver().read_ooms():
            local = self._bound.get(name, name)
            if local in self._sandboxes:
                self._sandboxes[local].oom_notices += 1
        for victim in self._victims.read() if self._victims is not None else ():
            for sandbox in self._sandboxes.values():
                if victim.is_of(self._base_id(sandbox.slot)):
                    sandbox.oom_notices += 1
                    sandbox.oom_victims.note(victim)
