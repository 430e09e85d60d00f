"""Processors that wake at once while somebody works with sandboxes.

A short command is a chain of processes that wake each other: client, NATS, daemon, the sandbox's
first process, the command, and back. A processor that has gone to sleep meanwhile takes far longer
to wake (tens of microseconds, on a virtual machine most of all) than its link of the chain to run.
The kernel's PM quality of service has a word for that: whoever holds ``/dev/cpu_dma_latency`` open
with 0 in it has idle processors wait awake
(https://docs.kernel.org/admin-guide/pm/cpuidle.html). The daemon does so from a request to a
latency-sensitive sandbox until a while after the last one, and never else: an idle node sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final, Self

import structlog

from dsec_common.timers import timers_of

_log: Final = structlog.get_logger(__name__)

DEVICE: Final = "/dev/cpu_dma_latency"
_AWAKE: Final = (0).to_bytes(4, "little")  # the longest wake, in microseconds
_ASLEEP: Final = (2_000_000_000).to_bytes(4, "little")  # PM_QOS_CPU_LATENCY_DEFAULT_VALUE


class QuickWakes:
    """Holds the kernel's word while requests come. One that dies takes its word with it."""

    def __init__(self, hold_s: float, device: str = DEVICE) -> None:
        """Prepare; nothing is held yet.

        Args:
            hold_s: from the last request on; the word may last twice that. 0 never holds.
            device: the kernel's.
        """
        self._hold_s = hold_s
        self._device = device
        self._descriptor = -1
        self._held = False
        self._asked = False

    @property
    def held(self) -> bool:
        """Whether idle processors wait awake for this node now."""
        return self._held

    def __enter__(self) -> Self:
        """Ask for the device. Without it processors sleep as they like: slower, and no error."""
        if self._hold_s > 0:
            try:
                self._descriptor = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                _log.info("processors_sleep_as_they_like", device=self._device, error=str(error))
            else:
                self._write(_ASLEEP)
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self._close()

    def note(self) -> None:
        """Note a request that wants a quick answer. Costs nothing while the word is held."""
        self._asked = True
        if not self._held and self._descriptor >= 0:
            self._held = self._write(_AWAKE)
            if self._held:
                self._look_later()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._held = -1, False

    def _look_later(self) -> None:
        timers_of(asyncio.get_running_loop()).call_later(self._hold_s, self._look)

    def _look(self) -> None:
        if self._asked:
            self._asked = False
            self._look_later()
        elif self._held:
            self._held = False
            self._write(_ASLEEP)

    def _write(self, word: bytes) -> bool:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, word)
            return True
        _log.warning("processors_sleep_as_they_like", device=self._device)
        self._close()
        return False
