"""One living sandbox; its commands and its files are on pages of their own."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from dsec_sandboxd.kernel.init import InitClient
from dsec_sandboxd.kernel.oom_victims import VictimLog
from dsec_sandboxd.kernel.pausing import Freezer
from dsec_sandboxd.kernel.sandbox_commands import SandboxCommands
from dsec_sandboxd.kernel.sandbox_files import SandboxFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.interface import SandboxSpec


class Sandbox(SandboxCommands, SandboxFiles):
    """A sandbox from its clone to its end. ``on_end`` is called when PID 1 ends by itself."""

    def __init__(
        self,
        local: str,
        slot: int,
        cgroup: Cgroup,
        *,
        pidfd: int,
        control_fd: int,
        on_end: Callable[[], None],
        adopted: bool = False,
    ) -> None:
        self.local = local
        self.slot = slot
        self.cgroup = cgroup
        self.freezer = Freezer(cgroup)
        self.pidfd = pidfd
        self.init = InitClient(control_fd, on_end, adopted=adopted)
        self.ending: asyncio.Task[None] | None = None
        self.oom_notices = 0
        self.oom_victims = VictimLog()
        self.oom_group = False
        self.hoarded = ""  # why it is ended by us: it took what the kernel cannot limit
        self.spec: SandboxSpec | None = None  # what it was made as, while it may be given away
        self._begin_commands(adopted=adopted)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        self.init.flush()
        self.init.close()
        self._end_commands()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
