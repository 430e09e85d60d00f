"""Running a command in a paused sandbox while everything else in it stands still."""

from __future__ import annotations

import asyncio
import signal
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from dsec_sandboxd.kernel.interface import CommandResult
from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.pausing import ALONE

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.interface import CommandSpec


class RunningAlone(KernelPart):
    """``AloneKernel`` on the real kernel."""

    @abstractmethod
    def _read_ooms(self) -> None:
        """Note which sandboxes the kernel has ended a process of for want of memory."""

    async def run_alone(self, local: str, command: CommandSpec) -> CommandResult:
        """Run a command in a paused sandbox; see ``AloneKernel``."""
        sandbox = self._require(local)
        # A limit of the command's own would stand still with the sandbox.
        spec = replace(command, timeout_s=0.0)
        async with sandbox.freezer.alone(sandbox.is_free_directory):
            try:
                async with asyncio.timeout(command.timeout_s or None):
                    return await sandbox.begin(spec, None, self._read_ooms)
            except TimeoutError:
                killed = signal.SIGKILL.value
                return CommandResult(
                    exit_code=None, signal=killed, stdout=b"", stderr=b"", timed_out=True
                )


def end_what_ran_alone(cgroup: Cgroup) -> None:
    """End what a daemon that was killed left of a command that ran alone; others stay stopped."""
    names = cgroup.exec_ids()
    if ALONE in names:
        for name in names:
            if cgroup.exec_populated(name) and not cgroup.exec_stopped(name):
                cgroup.kill_exec(name)
        cgroup.remove_exec(ALONE)
