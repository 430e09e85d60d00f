"""How much of the node the agents may have: bytes, requests a second, connections."""

from __future__ import annotations

import msgspec


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what sandboxes can make the daemon hold or do.

    Attributes:
        connections: of one sandbox at once; further ones wait in the kernel.
        connections_all: of all sandboxes at once; beyond it the longest idle one is closed.
        in_flight: unanswered requests of one connection; then it is not read.
        requests_per_s: of one sandbox; then none of its connections is read for a moment.
        burst: requests that may come at once after a quiet second.
        log_bytes_per_request: so many bytes to the behaviour log count as one request more.
        bytes_per_request: the same for everything else.
        large_frame_bytes: longer frames are charged to the two budgets below.
        large_bytes: of one sandbox's large frames, while they arrive and wait to be carried on.
        large_bytes_all: the same for all sandboxes.
        frame_timeout_s: a frame that has begun must be whole by then.
        write_timeout_s: an answer must be taken by then.
        unsent_bytes: of answers that wait to be taken; then the connection is not read.
    """

    connections: int = 8
    connections_all: int = 4096
    in_flight: int = 8
    requests_per_s: float = 2000.0
    burst: int = 1000
    log_bytes_per_request: int = 256
    bytes_per_request: int = 2048
    large_frame_bytes: int = 16 * 1024
    large_bytes: int = 2 * 1024 * 1024
    large_bytes_all: int = 128 * 1024 * 1024
    frame_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    unsent_bytes: int = 1024 * 1024


class ByteBudget:
    """Bytes that may be held at once, within a larger budget if there is one."""

    def __init__(self, limit: int, parent: ByteBudget | None = None) -> None:
        """Take the limit."""
        self._left = limit
        self._parent = parent

    def take(self, count: int) -> bool:
        """Take ``count`` bytes; return False, and take none, when they are not left."""
        if count > self._left or (self._parent is not None and not self._parent.take(count)):
            return False
        self._left -= count
        return True

    def give(self, count: int) -> None:
        """Give back what was taken."""
        self._left += count
        if self._parent is not None:
            self._parent.give(count)


class RequestRate:
    """A token bucket that may be in debt. Time is given to it, monotonic and in seconds."""

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        """Start full."""
        self._per_s = per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = now

    def delay_s(self, now: float) -> float:
        """Take a token and return 0, or return how long until there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s

    def change(self, per_s: float, burst: int, now: float) -> None:
        """Let so many through from now on; what is left of a burst is at most the new one."""
        self.delay_s(now)
        self._per_s, self._burst = per_s, float(burst)
        self._tokens = min(self._tokens, self._burst)

    def charge(self, count: int) -> None:
        """Take ``count`` more tokens for the request that just passed; later ones wait for them."""
        self._tokens -= count
