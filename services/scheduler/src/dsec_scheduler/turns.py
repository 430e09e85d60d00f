"""Turns: how many sandboxes are being made at once, so that no node drowns in requests.

A node makes some hundred sandboxes a second. Thousands asked of it at once would each take longer
than they have, and its heartbeats would come late, which looks like its death. Who has no turn yet
waits here, first come first served, and nothing of it is anywhere else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from dsec_scheduler.errors import no_turn

LINE_SHARE: Final = 0.8
"""Of a request's time, what it may wait in a line; the rest is for making it and for the answer."""


class Turns:
    """At most so many at once.

    Args:
        limit: how many, asked each time; at least one has its turn whatever it says.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not turn.done() for turn in self._waiting)

    def turn(self, timeout_s: float, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Wait for a turn, have it, and give it back.

        Raises:
            DsecError: ``exhausted`` when there was none in time; nothing was done then.
        """
        return _Turn(self, timeout_s, retry_after_s)

    async def take(self, timeout_s: float, retry_after_s: float) -> None:
        """Wait for a turn, which must be given back; raises as :meth:`turn`."""
        if self._waiting or self._taken >= max(self._limit(), 1):
            await self._wait(timeout_s, retry_after_s)
        else:
            self._taken += 1

    def give_back(self) -> None:
        """Let the next one have it."""
        self._taken -= 1
        self._pass_on()

    async def _wait(self, timeout_s: float, retry_after_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._pass_on()
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the very moment
                self.give_back()
            turn.cancel()
            if not isinstance(error, TimeoutError):
                raise
            raise no_turn(timeout_s, retry_after_s) from None

    def _pass_on(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._taken < max(self._limit(), 1)):
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)


class _Turn(AbstractAsyncContextManager[None]):
    """No generator: each of those costs the event loop as much as the rest of a short request."""

    __slots__ = ("_retry_after_s", "_timeout_s", "_turns")

    def __init__(self, turns: Turns, timeout_s: float, retry_after_s: float) -> None:
        self._turns = turns
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s

    def __aenter__(self) -> Awaitable[None]:  # type: ignore[override]
        return self._turns.take(self._timeout_s, self._retry_after_s)

    async def __aexit__(self, *_: object) -> None:
        self._turns.give_back()
