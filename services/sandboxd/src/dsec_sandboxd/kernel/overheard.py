"""Ends of short commands that PID 1 told a daemon which died before it heard of them.

PID 1 tells such an end once, with all that was printed, and forgets the command. What it told lies
in the socket, which outlives the daemon: the next one reads it there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dsec_sandboxd.kernel.interface import CommandResult
from dsec_sandboxd.kernel.protocol import CONTROL_REPLY_BYTES, ExitedFlag

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.protocol import ControlReply


class Overheard:
    """What one control socket still held when another daemon took it over."""

    def __init__(self, *, adopted: bool) -> None:
        self._listens = adopted
        self._results: dict[int, CommandResult] = {}

    def hear(self, reply: ControlReply, packet: bytes) -> None:
        """Take an end that nobody here asked for."""
        if not self._listens or not reply.file_mode & ExitedFlag.WHOLE:
            return
        error_at = CONTROL_REPLY_BYTES + reply.user_id
        code = os.waitstatus_to_exitcode(reply.status)
        self._results[reply.request_id] = CommandResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=packet[CONTROL_REPLY_BYTES:error_at],
            stderr=packet[error_at:],
        )

    def take(self) -> dict[int, CommandResult]:
        """Return them by the commands' numbers, and listen no more."""
        self._listens = False
        results, self._results = self._results, {}
        return results
