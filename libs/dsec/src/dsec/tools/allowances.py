"""What an agent's contract allows each tool, and the gate that holds it to a rate."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dsec_common.errors import DsecError, ErrorCode


@dataclass(frozen=True)
class Rate:
    """At most ``calls`` in any ``within_s`` seconds."""

    calls: int
    within_s: float


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one tool may do.

    Attributes:
        tool: its name.
        permissions: what it is granted.
        rate: how often it may be called; None for as often as one likes.
        model: the model that it may use; empty leaves it to the tool.
        max_tokens: how many a model may write for one call; None leaves it to the model's server.
        temperature: what calls take that name none.
    """

    tool: str
    permissions: frozenset[str] = frozenset()
    rate: Rate | None = None
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None


class RateGate:
    """Lets calls through at a rate; any thread may ask. It knows the calls of its process alone."""

    def __init__(
        self, tool: str, rate: Rate, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Take whose gate it is, and a clock in seconds."""
        self._tool = tool
        self._rate = rate
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._passed: deque[float] = deque()

    def take(self) -> None:
        """Count one call.

        Raises:
            DsecError: ``exhausted``, with ``retry_after_s``, when there were too many; this one
                is not counted.
        """
        with self._lock:
            now = self._monotonic()
            while self._passed and now - self._passed[0] >= self._rate.within_s:
                self._passed.popleft()
            if len(self._passed) < self._rate.calls:
                self._passed.append(now)
                return
            wait_s = self._rate.within_s - (now - self._passed[0])
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"{self._tool}: the contract allows {self._rate.calls} calls in "
            f"{self._rate.within_s:g} s; the next one is allowed in {wait_s:.3g} s",
            retry_after_s=wait_s,
        )
