"""Running a command alone in a paused sandbox of the recording kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dsec_common.errors import unavailable

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec


class RecordedAlone(ABC):
    """``AloneKernel`` in memory."""

    @abstractmethod
    def is_paused(self, local: str) -> bool:
        """Return whether a living sandbox stands still."""

    @abstractmethod
    async def exec(self, local: str, command: CommandSpec) -> CommandResult:
        """Answer what was scripted for the program."""

    async def run_alone(self, local: str, command: CommandSpec) -> CommandResult:
        """Answer what was scripted for the program, if the sandbox stands still."""
        if not self.is_paused(local):
            raise unavailable("the sandbox is not paused")
        return await self.exec(local, command)
