"""Giving a sandbox's id to another made for that: the new one is there before the old goes.

The new one is made under a name of its own, which its cgroups keep, as those of a sandbox that was
made ahead of need. So whatever line a crash comes after, one of the two is whole.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.adoption import is_alive
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.pausing import PAUSED
from dsec_sandboxd.kernel.spawner import readable

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from dsec_sandboxd.kernel.sandbox import Sandbox

_log: Final = structlog.get_logger(__name__)

_DEATH_TIMEOUT_S: Final = 10.0
#: Clearing away is as much work as a birth, and whoever asked for that waits for its answer.
_TOLD_AFTER_S: Final = 0.001


class Replacing(KernelPart):
    """The part of ``Kernel`` that puts one sandbox in the place of another. See the interface."""

    _bound: dict[str, str]

    @abstractmethod
    def _rename(self, sandbox: Sandbox, local: str) -> None:
        """Have a sandbox under another local id; its cgroups keep their name."""

    @abstractmethod
    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` as a task that the end of the kernel waits for."""

    @abstractmethod
    def _end(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Begin to remove a sandbox, or return the task that does already."""

    async def replace(self, local: str, heir: str) -> None:
        """End a sandbox and have the heir under its id, paused if it was."""
        new = self._require(heir)
        if new.ending is not None or not is_alive(new.pidfd):
            raise ended_error()
        old = self._sandboxes.get(local)
        if old is not None and old.freezer.holds(PAUSED):
            await new.freezer.hold(PAUSED)
            if not old.freezer.holds(PAUSED):
                new.freezer.release(PAUSED)  # it was to go on meanwhile
        if old is not None:
            self._rename(old, heir_name(local))
            old.cgroup.kill()
            old.init.close()
        self._rename(new, local)
        new.spec = None  # nobody else's to take
        if old is not None:
            await self._see_out(old)

    async def _see_out(self, old: Sandbox) -> None:
        """Return when nothing of one that was killed runs any more."""
        try:
            async with asyncio.timeout(_DEATH_TIMEOUT_S):
                if old.ending is None:
                    await readable(old.pidfd)
                else:
                    await asyncio.wait({old.ending})
        except TimeoutError:
            # It can do nothing but end, and has lost its id: the new one need not wait for that.
            _log.warning("hangs_in_the_kernel", cgroup=old.cgroup.local)
        finally:
            self._spawn_task(self._clear_away(old))

    async def _clear_away(self, old: Sandbox) -> None:
        """Free the directories and ids of one of which nothing runs, once the new one is told."""
        await asyncio.sleep(_TOLD_AFTER_S)
        try:
            await self._end(old)
        except DsecError:  # nobody's from here on: the reconciler removes what is left
            old.close()
            self._sandboxes.pop(old.local, None)
            self._bound.pop(old.cgroup.local, None)


def heir_name(local: str) -> str:
    """Return a name for one that is to have a sandbox's id, which no other daemon has given."""
    return f"{local}-{secrets.token_hex(4)}"
